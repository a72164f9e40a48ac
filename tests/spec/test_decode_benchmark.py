"""`spec bench decode`: its options, what the bytes promise, and the command with random and with real weights."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from draft_model.dummy import dummy_draft
from serve.engine import Engine
from serve.request import Request, SamplingParams
from serve.tree import TreeConfig
from spec.bench import decode, step_timing
from spec.bench.decode_settings import Shape, Variant, parse_decode_shapes, parse_variants
from spec.bench.decode_table import Row, fastest, fastest_lines
from spec.bench.step_bytes import DraftBytes, TargetBytes, loaded_formats, promised, stored_bytes
from spec.bench.step_timing import StepTimes
from spec.cli import app
from target_model.dummy import dummy_target
from target_model.errors import UserError
from target_model.format_coverage import parameter_formats
from target_model.resolve import target_config
from target_model.sizes import weight_bytes

M3 = target_config("MiniMax-M3")


def test_acceptance_is_decreed_for_random_weights_only():
    shapes = parse_decode_shapes("1,3", ["3,2,6", "4,4,16=3.5"], synthetic=True)
    assert [shape.length for shape in shapes] == [1.78, 2.83, pytest.approx(2.83 * 1.08, abs=0.01), 3.5]
    assert parse_decode_shapes("none", ["3,2,6"], synthetic=False) == (Shape(TreeConfig(3, 2, 6), None),)
    for chain, trees, synthetic, message in (
        ("9", [], True, "the AL of a chain of 9 is not known"),
        ("3", ["4,4,16"], True, "give one, for example 4,4,16=3.1"),
        ("3", ["4,4,16=x"], True, "the AL behind = must be a number"),
        ("3", ["4,4,16=3"], False, "with real weights the acceptance length is measured"),
        ("none", ["none"], True, "nothing to measure"),
    ):
        with pytest.raises(UserError, match=message):
            parse_decode_shapes(chain, trees, synthetic)


def test_one_thing_of_the_draft_is_changed_at_a_time_and_then_all():
    found = parse_variants("none,mxfp8,mxfp4", "full,32768", "full,sparse", synthetic=True)
    assert [variant.short for variant in found] == [
        "draft as it is", "mxfp8", "mxfp4", "32768", "sparse", "mxfp4 32768 sparse"
    ]  # fmt: skip
    assert str(found[-1]) == "--draft-weights mxfp4 --draft-vocab 32768 --draft-attention sparse"
    assert parse_variants("mxfp8", "full", "full", synthetic=False) == (Variant("mxfp8"),)
    with pytest.raises(UserError, match="--draft-vocab is for --dummy-weights"):
        parse_variants("none", "640", "full", synthetic=False)
    with pytest.raises(UserError, match="must be full or a number of tokens, got 'few'"):
        parse_variants("none", "few", "full", synthetic=True)
    with pytest.raises(UserError, match="unknown draft weights 'int8'"):
        parse_variants("none,int8", "full", "full", synthetic=True)


def test_bytes_of_a_target():
    """What is read of MiniMax-M3 in MXFP4: all but the embedding when every expert is chosen; at few tokens few."""
    formats = parameter_formats(M3, "mxfp4")
    sizes = TargetBytes.of(M3, 2, formats)
    everything = weight_bytes(M3, 2, formats=formats)
    embedding = M3.vocab_size * M3.hidden_size * 2
    assert sizes.dense + sizes.routed == pytest.approx(everything - embedding, rel=1e-5)
    assert sizes.step(10_000, 1, 1) == pytest.approx(sizes.dense + sizes.routed, rel=1e-4)
    one, four = (sizes.step(nodes, 1, 0) - sizes.dense for nodes in (1, 4))
    assert one == pytest.approx(sizes.routed * 4 / 128)
    assert four / one == pytest.approx(3.8, abs=0.05)
    assert sizes.step(2, 2, 0) - sizes.dense == four  # a batch of two with two nodes each


def test_bytes_of_the_cache():
    """Full layers read all of it, sparse ones 16 blocks of 128, and index keys where there are more than that."""
    sizes = TargetBytes.of(M3, 2, {})
    full, sparse = M3.sparse_layers.count(False), M3.sparse_layers.count(True)
    token, none = 2 * 4 * 128 * 2, sizes.step(1, 1, 0)
    assert sizes.step(1, 1, 2048) - none == M3.num_layers * 2048 * token
    expected = full * 8192 * token + sparse * (2048 * token + 8192 * 128 * 2)
    assert sizes.step(1, 1, 8192) - none == expected
    assert sizes.step(1, 3, 8192) - sizes.step(3, 1, 0) == 3 * expected


def test_bytes_of_loaded_weights_and_of_a_draft():
    config = target_config("m3-tiny")
    target = dummy_target("m3-tiny", config, "mxfp4")
    sizes = TargetBytes.of(config, 4, loaded_formats(target))
    loaded = stored_bytes(target) - stored_bytes(target.embed_tokens)
    assert sizes.dense + sizes.routed == pytest.approx(loaded, rel=0.001)
    draft = dummy_draft(config)
    bytes_, chain = DraftBytes.of(draft, config, "full"), TreeConfig.chain(3)
    weights = stored_bytes(draft) - stored_bytes(draft.embed_tokens) + 2 * (bytes_.level)
    assert bytes_.step(chain, 1, 0) == pytest.approx(weights, rel=0.001)
    sparse = DraftBytes.of(draft, config, "sparse")
    assert bytes_.step(chain, 1, 1000) > sparse.step(chain, 1, 1000) == sparse.step(chain, 1, 2000)
    speed_up = promised(sizes, bytes_, 2.83, chain, 1, 100)
    assert speed_up == 2.83 * sizes.step(1, 1, 100) / (sizes.step(4, 1, 100) + bytes_.step(chain, 1, 100))


def test_a_random_draft_grows_deep_trees_and_knows_as_many_tokens_as_it_is_to():
    """Else the decreed acceptance could not be met, and what is timed would not be what is served."""
    config = target_config("m3-tiny")
    target, draft = dummy_target("m3-tiny", config), dummy_draft(config, vocab=500)
    known = draft.target_ids(draft.d2t.new_tensor(range(500)))
    assert len(known.unique()) == 500 and 0 <= known.min() and known.max() < config.vocab_size
    engine = Engine(target, draft, TreeConfig(5, 4, 24), pages=40, synthetic_acceptance=4.0)
    engine.add(Request("a", list(range(20)), SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)))
    depths = []
    while engine.has_work():
        depths += [max(update.verified.tree.depths()) for update in engine.step() if update.verified]
    assert sum(depths) / len(depths) > 4.5
    assert engine.stats()["acceptance_length"] == pytest.approx(4.0, abs=0.2)


def test_kernels_that_overlap_count_once():
    assert step_timing.busy([(5, 7), (0, 2), (1, 3), (1, 2), (3, 4)]) == 6
    assert step_timing.busy([]) == 0


def test_the_fastest_row_of_each_batch():
    def row(batch: int, speed: float, tree: TreeConfig | None = None, variant: Variant | None = None) -> Row:
        return Row(tree, variant, batch, None, 0, StepTimes(2.0, speed, 0.01, 0.002, 0.005, 0.008, 0.01), 0.004, 1.5)

    assert row(1, 1.0).times.other == pytest.approx(0.003) and row(1, 1.0).times.overhead == pytest.approx(0.25)
    quantised = row(1, 300.0, TreeConfig.chain(3), Variant("mxfp4"))
    rows = [row(1, 100.0), row(8, 900.0), quantised, row(8, 500.0, TreeConfig(3, 2, 6), Variant())]
    assert fastest(rows) == {1: quantised, 8: rows[1]}
    assert fastest_lines(rows) == [
        "fastest at batch 1: --tree 3,1,4 --draft-weights mxfp4: 300.0 tokens/s, 1.50 times plain decoding",
        "fastest at batch 8: plain decoding: 900.0 tokens/s, 1.50 times plain decoding",
    ]


def test_what_was_measured_before_an_interrupt_is_kept():
    class Interrupted:
        def __init__(self, rows: int):
            self.count = rows

        def rows(self):
            for _ in range(self.count):
                yield Row(None, None, 1, None, 0, StepTimes(1.0, 9.0, 0.1, 0.0, 0.1, None, 0.1), 0.1)
            raise KeyboardInterrupt

    console = Console(file=io.StringIO())
    assert len(decode._measured(Interrupted(2), console)) == 2
    assert "interrupted: these are the first rows" in console.file.getvalue()
    with pytest.raises(KeyboardInterrupt):
        decode._measured(Interrupted(0), console)


def command(*options: str, device: str = "cpu") -> tuple[str, dict]:
    outcome = CliRunner().invoke(app, ["bench", "decode", "--device", device, *options], catch_exceptions=False)
    assert outcome.exit_code == 0
    return outcome.output, json.loads(outcome.output.splitlines()[-1])


def test_the_command_with_random_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(step_timing, "WARM_UP", 1)
    options = ("--dummy-weights", "mxfp4", "--layers", "7", "--context", "40", "--batch", "2", "--steps", "8")
    drafts = ("--draft-weights", "none,mxfp8", "--draft-vocab", "500")
    file = tmp_path / "decode.json"
    text, result = command(*options, *drafts, "--chain", "3", "--tree", "2,2,5=2.5", "--output", str(file))
    assert json.loads(file.read_text()) == result
    rows = result["rows"]
    assert [row["shape"] for row in rows] == ["plain", *["chain 3", "tree 2,2,5"] * 2]
    assert (
        rows[-1]["options"] == "--draft-weights mxfp8 --draft-vocab 500"
        and rows[0]["options"] is None
        and rows[0]["decreed"] is None
    )
    for row in rows[1:]:
        assert row["decreed"] == {"chain 3": 2.83, "tree 2,2,5": 2.5}[row["shape"]]
        # In few steps the mean is met to a few of them.
        assert row["tokens_per_second"] * row["wall"] / 2 == pytest.approx(row["length"], abs=1e-3)
        assert row["length"] == pytest.approx(row["decreed"], abs=0.4)
        assert row["wall"] > row["draft"] + row["verify"] > 0 and row["kernels"] is row["overhead"] is None
        assert row["speed_up"] == pytest.approx(row["tokens_per_second"] / rows[0]["tokens_per_second"], rel=1e-4)
        assert row["whole"] > row["promised"] > 1  # with more layers the draft weighs less
    assert "fastest at batch 2: " in text and result["fastest"].keys() == {"2"}
    assert rows[3]["promised"] > rows[1]["promised"]  # the quantised draft reads less


def test_the_command_with_real_weights(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(step_timing, "WARM_UP", 1)
    monkeypatch.setattr(decode, "GROUPS", 2)
    _, result = command("--chain", "2", "--tree", "none", "--steps", "8", "--context", "200")
    plain, chain = result["rows"]
    assert plain["context"] > 200 and chain["decreed"] is None and chain["whole"] is None
    assert 1.5 < chain["length"] < 3  # the bundled draft is one of the target's
    outcome = CliRunner().invoke(app, ["bench", "decode", "--device", "cpu", "--chain", "1", "--context", "4096"])
    assert "exceed the target's 4096 positions: lower --context or --steps" in str(outcome.exception)


@pytest.mark.gpu
def test_the_command_on_a_gpu():
    options = ("--dummy-weights", "mxfp4", "--layers", "7", "--context", "100", "--steps", "8", "--chain", "2")
    text, result = command(*options, "--tree", "none", "--draft-weights", "mxfp4", device="cuda")
    assert result["bandwidth"] > 1e11 and result["machine"] in text
    for row in result["rows"]:
        assert 0 < row["kernels"] < 10 * row["wall"] and row["overhead"] == pytest.approx(
            row["wall"] / row["kernels"] - 1, rel=0.02
        )
