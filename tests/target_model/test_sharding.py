"""Layers split over processes, and stages of a pipeline, compute what one process does."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from target_model.checkpoint import load_target
from target_model.config import M3Config
from target_model.dummy import dummy_shard
from target_model.errors import UserError
from target_model.format_coverage import parameter_formats
from target_model.pipeline import PipelineStage
from target_model.quantise_checkpoint import quantise_checkpoint
from target_model.shard_loading import load_shard
from target_model.sharding import Shard, local_config, part_bytes, shard_specs
from target_model.sizes import cache_bytes_per_token
from target_model.tensor_names import text_specs
from tests.fixtures import tiny_config, write_checkpoint
from tests.target_model.sharded import Case, exercise, run_cases

TAPS = (1, 3, 5)
TOLERANCE = 1e-4
REUSE = {"use_index_cache": True, "index_topk_freq": 3}
# Split in two, every scale of these still belongs to one part.
WIDE = {"shared_width": 64}


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints by name."""
    root = tmp_path_factory.mktemp("targets")
    write_checkpoint(tiny_config(), root / "plain", seed=1)
    write_checkpoint(tiny_config(num_heads=8, num_kv_heads=4, num_experts=6, top_k_blocks=3), root / "other", seed=2)
    write_checkpoint(tiny_config(**REUSE), root / "reuse", seed=4)
    write_checkpoint(tiny_config(**WIDE), root / "wide", seed=3)
    for name in ("mxfp8", "mxfp4", "nvfp4"):
        quantise_checkpoint(str(root / "wide"), root / name, name)
    _with_fp8_attention(root / "mxfp4", root / "mxfp4-fp8")
    return root


def _with_fp8_attention(source: Path, destination: Path) -> None:
    """A copy whose attention is e4m3 with one number for each row."""
    document = json.loads((source / "config.json").read_text())
    document["quantization_config"]["exclude"] = []
    tensors = {name: tensor for file in source.glob("*.safetensors") for name, tensor in load_file(file).items()}
    for name in [name for name in tensors if name.endswith("_proj.weight") and "self_attn" in name]:
        scale = tensors[name].float().abs().amax(-1) / 448
        tensors[f"{name}_scale"] = scale
        tensors[name] = (tensors[name].float() / scale[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    destination.mkdir()
    save_file(tensors, destination / "model.safetensors")
    (destination / "config.json").write_text(json.dumps(document))


def equal(ours: list[Tensor], theirs: list[Tensor]) -> None:
    assert len(ours) == len(theirs) > 0
    for mine, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, expected, atol=TOLERANCE, rtol=TOLERANCE)


def compare(cases: list[Case], directory: Path) -> None:
    """What every process saw, against one process."""
    for case, ranks in zip(cases, run_cases(cases, directory), strict=True):
        model = load_target(case.target, device=case.device)
        alone = exercise(model, case)
        for seen in ranks[-case.parts :]:
            for name in ("logits", "aux", "captured"):
                equal(seen[name], alone[name])
            if not case.cuts:
                assert torch.equal(seen["choice"][0], alone["choice"][0])
        _compare_layers(case, ranks, alone, model.config)


def _compare_layers(
    case: Case, ranks: list[dict[str, list[Tensor]]], alone: dict[str, list[Tensor]], config: M3Config
) -> None:
    """Residual streams, chosen blocks and caches of each process's own layers and heads."""
    edges = [0, *case.cuts, config.num_layers]
    passes = len(alone["hidden"]) // (config.num_layers + 1)
    sparse = [layer for layer in range(config.num_layers) if config.sparse_layers[layer]]
    for rank, seen in enumerate(ranks):
        stage, part = divmod(rank, case.parts)
        layers = range(edges[stage], edges[stage + 1])
        own_sparse = [n for n, layer in enumerate(sparse) if layer in layers]
        heads = max(1, config.num_kv_heads // case.parts)
        first = part * (config.num_kv_heads // heads) // case.parts * heads
        hidden = [
            alone["hidden"][step * (config.num_layers + 1) + layer]
            for step in range(passes)
            for layer in (*layers, layers.stop)
        ]
        equal(seen["hidden"], hidden)
        chosen = [
            alone["blocks"][step * len(sparse) + n][:, first : first + heads]
            for step in range(passes)
            for n in own_sparse
        ]
        if chosen:
            assert all(torch.equal(mine, expected) for mine, expected in zip(seen["blocks"], chosen, strict=True))
        k, v, index_k = seen["cache"]
        kept = slice(layers.start, layers.stop)
        equal([k, v], [pool[kept, :, :, first : first + heads] for pool in alone["cache"][:2]])
        if own_sparse:
            equal([index_k], [alone["cache"][2][own_sparse]])


def test_two_processes_equal_one(targets: Path, tmp_path: Path):
    """Every layer halved, and the layers halved at odd and even cuts, before dense and sparse layers, and where the
    next layer reuses a choice of blocks.
    """
    cases = [
        Case("m3-tiny", (2, 4, 5), 2, length=150),
        Case(str(targets / "other"), TAPS, 2),
        Case(str(targets / "reuse"), TAPS, 2),
        Case("m3-tiny", (2, 4, 5), cuts=(4,), length=150),
        Case(str(targets / "plain"), (2, 3), cuts=(3,)),
        Case(str(targets / "plain"), TAPS, cuts=(1,)),
        Case(str(targets / "reuse"), (0, 4, 5), cuts=(4,)),
        *(Case(str(targets / name), TAPS, 2) for name in ("mxfp8", "mxfp4", "nvfp4", "mxfp4-fp8")),
        Case(str(targets / "mxfp8"), TAPS, cuts=(5,)),
    ]
    compare(cases, tmp_path)


@pytest.mark.slow
def test_four_processes_equal_one(targets: Path, tmp_path: Path):
    """Two KV heads on four ranks, one expert on each; halved layers in two stages; four stages."""
    plain = str(targets / "plain")
    cases = [
        Case(plain, TAPS, 4),
        Case("m3-tiny", (2, 4, 5), 4, length=150),
        Case(plain, TAPS, 2, cuts=(3,)),
        Case(str(targets / "reuse"), TAPS, 2, cuts=(5,)),
        Case(plain, (0, 2, 5), cuts=(1, 2, 5)),
    ]
    compare(cases, tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_equal_one(tmp_path: Path):
    """Over NCCL, through the kernels."""
    compare([Case("m3-tiny", (2, 4, 5), 2, length=150, device="cuda")], tmp_path)
    (tmp_path / "stages").mkdir()
    compare([Case("m3-tiny", (2, 4, 5), cuts=(5,), length=150, device="cuda")], tmp_path / "stages")


@pytest.mark.parametrize(("size", "stages"), [(1, 1), (2, 3), (8, 1)])
def test_the_parts_of_minimax_m3_are_the_whole(size: int, stages: int):
    """Every tensor is read as a whole by somebody: no number is missing, and only what is repeated counts twice."""
    config = M3Config.from_json("configs/minimax-m3.json")
    edges = [round(stage * config.num_layers / stages) for stage in range(stages)] + [config.num_layers]
    read: dict[str, set] = {}
    for rank in range(size):
        for first, end in zip(edges, edges[1:], strict=False):
            for spec, own, region in shard_specs(config, Shard(rank, size, first, end)):
                region = region or tuple((0, extent) for extent in spec.shape)
                assert own.shape == tuple(stop - start for start, stop in region)
                read.setdefault(spec.name, set()).add(region)
    for spec in text_specs(config):
        covered = sum(_area(region) for region in read.pop(spec.name))
        assert covered == spec.size, spec.name
    assert not read


def _area(region: tuple[tuple[int, int], ...]) -> int:
    return torch.Size(stop - start for start, stop in region).numel()


@pytest.mark.parametrize("name", ["bf16", "mxfp4"])
@pytest.mark.parametrize("shard", [Shard(0, 8), Shard(3, 4, 0, 30), Shard(0, 1, 30, 60)])
def test_bytes_of_a_part(name: str, shard: Shard):
    config = M3Config.from_json("configs/minimax-m3.json")
    formats = parameter_formats(local_config(config, shard), name)
    part = PipelineStage(
        config,
        shard,
        torch.bfloat16,
        previous=1 if shard.first else None,
        following=None if shard.end in (None, 60) else 2,
        formats=formats,
    )
    held = sum(parameter.numel() * parameter.element_size() for parameter in part.parameters())
    assert held == part_bytes(config, shard, 2, formats=formats)


def test_a_part_that_does_not_fit():
    config = M3Config.from_json("configs/minimax-m3.json")
    with pytest.raises(UserError, match=r"GB are free, \d+\.\d GB are needed for this process's part of M3$"):
        dummy_shard("M3", config, Shard(1, 2), "bf16", dtype=torch.bfloat16)


def test_a_rank_keeps_the_cache_of_its_heads():
    """120 KiB a token of K and V fall with the ranks, down to one KV head; the one index K stays."""
    config = M3Config.from_json("configs/minimax-m3.json")
    sizes = [cache_bytes_per_token(local_config(config, Shard(0, size))) / 1024 for size in (1, 2, 4, 8, 64)]
    assert sizes == [134.25, 74.25, 44.25, 44.25, 44.25]


@pytest.mark.parametrize(
    ("change", "shard", "words"),
    [
        ({}, Shard(0, 3), "split over 3 processes: its 4 query heads do not divide"),
        ({"num_heads": 6, "num_kv_heads": 3, "dense_width": 126}, Shard(0, 2), "3 KV heads neither divide nor repeat"),
        ({"num_experts": 3}, Shard(1, 2), "its 3 experts do not divide"),
        ({"dense_width": 127}, Shard(0, 2), "its 127 columns of the dense MLP do not divide"),
        ({"shared_width": 49}, Shard(0, 2), "its 49 columns of the shared expert do not divide"),
        ({"vocab_size": 301}, Shard(0, 2), "its 301 entries of the vocabulary do not divide"),
        ({}, Shard(2, 2), "rank 2 is none of 2 processes"),
        ({}, Shard(0, 1, 3, 3), "layers 3 to 3 are no stage of a target of 6 layers"),
        ({}, Shard(0, 1, 2, 7), "layers 2 to 7 are no stage"),
    ],
)
def test_what_does_not_divide_is_refused(change: dict, shard: Shard, words: str):
    with pytest.raises(UserError, match=words):
        local_config(tiny_config(**change), shard)


def test_a_group_of_quantised_columns_is_not_cut(tmp_path: Path):
    """The 32 columns of the shared expert's second product have one scale."""
    write_checkpoint(tiny_config(shared_width=32), tmp_path / "plain")
    quantise_checkpoint(str(tmp_path / "plain"), tmp_path / "mxfp4", "mxfp4")
    with pytest.raises(UserError, match=r"the 16 columns .*shared_experts.down_proj.weight, stored as mxfp4, are no"):
        load_shard(tmp_path / "mxfp4", Shard(0, 2))


def test_a_rank_reads_its_own_regions_but_checks_every_tensor(tmp_path: Path):
    directory = write_checkpoint(tiny_config(), tmp_path / "target", shards=1)
    file = directory / "model-00001-of-00001.safetensors"
    tensors = load_file(file)
    for spec, _, region in shard_specs(tiny_config(), Shard(1, 2)):
        if region is not None or spec.expert is not None:
            tensors[spec.name][tuple(slice(*part) for part in region or ((0, None),))] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    model = load_shard(directory, Shard(0, 2))
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert load_shard(directory, Shard(1, 2)).layers[3].mlp.w13.isnan().all()
    lost = "language_model.model.layers.3.block_sparse_moe.experts.3.w1.weight"  # the other rank's
    del tensors[lost]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match=f"tensor {lost} is missing"):
        load_shard(directory, Shard(0, 2))


def test_the_vision_tower_is_whole_where_tokens_are_embedded():
    options = {"language_only": False}
    whole, part = load_target("m3-tiny", **options), load_shard("m3-tiny", Shard(1, 2), **options)
    first, second = (
        load_shard("m3-tiny", shard, build=partial(PipelineStage, previous=previous, following=following), **options)
        for shard, previous, following in ((Shard(0, 1, 0, 4), None, 1), (Shard(0, 1, 4, 8), 0, None))
    )
    for model in (part, first):
        for name, parameter in whole.vision.named_parameters():
            assert torch.equal(model.vision.get_parameter(name), parameter)
    assert second.vision is None and not hasattr(second, "embed_tokens") and not hasattr(first, "lm_head")


def test_one_part_is_the_whole():
    """A single process gets every parameter as it is, and needs no group."""
    alone, whole = load_shard("m3-tiny", Shard()), load_target("m3-tiny")
    for (name, ours), (other, theirs) in zip(alone.named_parameters(), whole.named_parameters(), strict=True):
        assert torch.equal(ours, whole.get_parameter(name)) and theirs.shape == alone.get_parameter(other).shape
    ids = torch.arange(30).view(1, 30)
    assert torch.equal(alone.capture(ids, (2, 4))[1], whole.capture(ids, (2, 4))[1])
