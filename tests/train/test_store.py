"""The offline store: training from it is training online, an interrupted capture goes on, another target is refused."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save

from target_model.checkpoint import load_target
from target_model.errors import UserError
from target_model.resolve import resolve_target, target_config
from train.capture import bytes_per_token, capture_store
from train.config import parse_config
from train.ends import load_ends
from train.loop import train
from train.store import FeatureStore, dequantise, fingerprint, quantise, shard_name

TEXTS = ["def add(a, b):\n    return a + b\n", "for i in range(10):\n    print(i)\n", "x = [1]\ny = sum(x)\n" * 2]


@pytest.fixture
def settings(tmp_path):
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"text": text * (1 + i % 3)}) + "\n" for i, text in enumerate(TEXTS * 4)))

    def make(name="run", store=None, **data_changes):
        return parse_config(
            {
                "name": name,
                "output": str(tmp_path / "runs"),
                "data": {"path": str(data), "sequence_length": 48, "packing": True} | data_changes,
                "draft": {"intermediate_size": 64},
                "ttt": {"steps": 3},
                "schedule": {"steps": 8},
                "engine": {"device": "cpu", "dtype": "float32", "micro_batch": 2, "threads": 1},
                "log": {"every": 1},
                "features": {"store": store, "capture_rows": 2},
            }
        )

    return make


def capture(config, directory, **options):
    return capture_store(config, directory, **({"dtype": "fp32", "shard_rows": 2, "note": lambda _: None} | options))


def losses(result):
    return [json.loads(line)["loss"] for line in (result.directory / "log.jsonl").read_text().splitlines()]


def test_the_same_loss_curve_as_online(settings, tmp_path, monkeypatch):
    directory = str(tmp_path / "store")
    captured = capture(settings(), directory)
    online = train(settings("online"), progress=False)
    monkeypatch.setattr("train.origin.load_target", lambda *_, **__: pytest.fail("the whole target was loaded"))
    offline = train(settings("offline", directory), progress=False)
    assert captured.refused == 0 and captured.rows >= 5
    assert losses(offline) == pytest.approx(losses(online), abs=1e-5, rel=0)
    assert len(set(losses(online))) == 8


def test_the_ends_are_those_of_the_whole_target():
    whole = load_target("m3-tiny")
    ends = load_ends(resolve_target("m3-tiny"), dtype=torch.float32, device=torch.device("cpu"))
    for name in ("embed_tokens.weight", "norm.scale", "lm_head.weight"):
        assert torch.equal(ends.get_parameter(name), whole.get_parameter(name)), name
    assert all(parameter.is_meta for parameter in ends.layers.parameters())


def test_an_interrupted_capture_goes_on(settings, tmp_path, monkeypatch):
    """As after a kill: finished shards are neither lost nor written again, a half-written one does not count."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    capture(settings(), whole)
    shards = sorted(whole.glob("features-*"))
    calls = []

    def dies(tensors, metadata):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return save(tensors, metadata=metadata)

    with monkeypatch.context() as patched:
        patched.setattr("train.capture.save", dies)
        with pytest.raises(KeyboardInterrupt):
            capture(settings(), cut)
    assert sorted(path.name for path in cut.glob("*")) == [shard_name(0), shard_name(1), "manifest.json"]
    with pytest.raises(UserError, match="not complete: the same `spec capture` finishes it"):
        FeatureStore(cut)
    (cut / shard_name(2)).write_bytes(shards[2].read_bytes()[:-10])  # a shard that a crash of the machine cut short
    before = (cut / shard_name(0)).stat().st_mtime_ns
    lines = []
    capture(settings(), cut, note=lines.append)
    assert "2 of" in " ".join(lines) and (cut / shard_name(0)).stat().st_mtime_ns == before
    assert len(shards) == 4
    for path in shards:
        ours, theirs = load_file(cut / path.name), load_file(path)
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert FeatureStore(cut).manifest == FeatureStore(whole).manifest


def test_a_mismatch_names_its_field(settings, tmp_path, monkeypatch):
    directory = tmp_path / "store"
    capture(settings(), directory)
    with pytest.raises(UserError, match=r"has data\.sequence_length=48, but this run needs 32"):
        train(settings("other", str(directory), sequence_length=32), progress=False)
    for field, message in (("taps", r"has taps=\[1, 2, 3\]"), ("norm_convention", "has norm_convention='none'")):
        manifest = json.loads((directory / "manifest.json").read_text())
        changed = manifest | {"taps": [1, 2, 3], "norm_convention": "none"}
        (directory / "manifest.json").write_text(json.dumps(manifest | {field: changed[field]}))
        with pytest.raises(UserError, match=message):
            capture(settings(), directory)
        (directory / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="has dtype='fp32', but this run needs 'bf16'"):
        capture(settings(), directory, dtype="bf16")
    # Shards of one capture under the manifest of another.
    other = tmp_path / "other"
    capture(settings(overflow="truncate"), other)
    (directory / shard_name(1)).write_bytes((other / shard_name(1)).read_bytes())
    with pytest.raises(UserError, match="features-00001.safetensors belongs to another capture"):
        FeatureStore(directory)
    monkeypatch.setattr("train.store.fingerprint", lambda _: "f00")
    with pytest.raises(UserError, match=r"has target\.checkpoint='\w{64}', but this run needs 'f00'"):
        train(settings("copy", str(other), overflow="truncate"), progress=False)


def test_a_fingerprint_sees_every_file(tmp_path):
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.write_bytes(b"\0" * 5000)
    first = fingerprint(paths)
    paths[1].write_bytes(b"\0" * 4999 + b"\1")
    assert fingerprint(paths) != first


def test_precisions(settings, tmp_path):
    """bf16 rounds to 8 bits, fp8 to 4 with a scale for each tap of a token; the estimate is the size on disk."""
    stores = {}
    for dtype in ("fp32", "bf16", "fp8"):
        lines = []
        result = capture(settings(), tmp_path / dtype, dtype=dtype, note=lines.append)
        stores[dtype] = FeatureStore(tmp_path / dtype)
        stores[dtype].prepare({}, 3, torch.device("cpu"), torch.float32)
        estimate = stores[dtype].manifest["tokens"] * bytes_per_token(target_config("m3-tiny").hidden_size, 3, dtype)
        assert result.size == pytest.approx(estimate, rel=0.03) and f"take {estimate / 1e9:.3f} GB" in lines[1]
    exact, half, eighth = (store.features(np.array([3, 0])) for store in stores.values())
    for name in ("aux", "final_state"):
        reference = vars(exact)[name]
        assert torch.equal(vars(half)[name], reference.bfloat16().float())
        error = (vars(eighth)[name] - reference).norm() / reference.norm()
        assert 0.005 < error < 0.04
    assert torch.equal(eighth.token_ids, exact.token_ids) and torch.equal(eighth.valid_steps, exact.valid_steps)


def test_fp8_scales_each_tap():
    """A tap a thousand times larger than its neighbour costs the neighbour nothing; zeros stay zeros."""
    values = torch.cat([torch.randn(5, 8), 1000 * torch.randn(5, 8), torch.zeros(5, 8)], -1)
    back = dequantise(*quantise(values, 3))
    for tap in (slice(0, 8), slice(8, 16)):
        assert ((back - values)[:, tap].norm() / values[:, tap].norm()) < 0.05
    assert torch.equal(back[:, 16:], values[:, 16:])


def test_fp8_never_overflows():
    """What lies beyond 464 is NaN in some versions of torch and 448 in others: no row's largest number gets there."""
    generator = torch.Generator().manual_seed(0)
    largest = 10.0 ** torch.linspace(-44, 38.5, 20000)[:, None]
    shares = torch.rand(20000, 7, generator=generator) * 2 - 1
    values = torch.cat([largest, largest * shares], dim=-1)
    stored, scale = quantise(values, 1)
    assert stored.float().isfinite().all() and stored.float().abs().max() == 448
    normal = largest[:, 0] > 448 * torch.finfo(torch.float32).tiny
    error = (dequantise(stored, scale) - values).abs() / largest
    assert error[normal].max() <= 16 / 448 and dequantise(stored, scale).isfinite().all()


def test_places_that_are_refused(settings, tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"feature store .*none does not exist"):
        train(settings("x", str(tmp_path / "none")), progress=False)
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("x")
    with pytest.raises(UserError, match="is not a feature store, so nothing is written"):
        capture(settings(), foreign)
    monkeypatch.setattr("train.capture.shutil.disk_usage", lambda _: type("usage", (), {"free": 1000}))
    with pytest.raises(UserError, match=r"has 0\.000 GB free, but the features need 0\.00\d GB more"):
        capture(settings(), tmp_path / "new")
    assert not (tmp_path / "new").exists()
    with pytest.raises(UserError, match="features: cache keeps what is captured online, a store needs none"):
        parse_config(
            {"name": "x", "data": {"path": "x"}, "schedule": {"steps": 1}, "features": {"cache": True, "store": "x"}}
        )
