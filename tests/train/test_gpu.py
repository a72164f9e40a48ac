"""The CUDA paths of training: flash attention with an own column, and a whole step in bf16."""

import json

import pytest
import torch

from spec.bench import training
from target_model.kernels import ops
from train.attention import explicit_attention, flash_attention
from train.config import parse_config
from train.engine import DraftEngine, processes
from train.loss import Teacher

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("own", [0, 1, 6])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "length"), [(8, 8, 32, 512), (8, 2, 64, 333), (4, 4, 128, 97)])
def test_flash_is_as_exact_as_bf16_allows(packed, own, heads, kv_heads, dim, length):
    """Output and all gradients: error to fp64 at most twice that of the explicit definition in bf16."""
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(3, length, heads, dim)] + [(3, length, kv_heads, dim)] * (2 + 2 * own)
    values = [torch.randn(shape, device="cuda", generator=generator, dtype=torch.bfloat16) for shape in shapes]
    upstream = torch.randn(shapes[0], device="cuda", generator=generator, dtype=torch.bfloat16)
    documents = torch.ones(3, length, dtype=torch.int64, device="cuda")
    if packed:  # one whole row, documents of several lengths, and padding
        documents[1, 40:], documents[1, 41:], documents[2, length // 2 :], documents[2, -7:] = 2, 3, 2, 0

    def run(attend, dtype) -> list[torch.Tensor]:
        q, k, v, *rest = (value.to(dtype).requires_grad_() for value in values)
        out = attend(q, k, v, rest[:own], rest[own:], documents, packed, dim**-0.5)
        (out * upstream.to(dtype)).sum().backward()
        return [out.detach(), *(tensor.grad for tensor in (q, k, v, *rest))]

    exact = run(explicit_attention, torch.float64)
    plain = run(explicit_attention, torch.bfloat16)
    flash = run(flash_attention, torch.bfloat16)
    for reference, ours, theirs in zip(exact, flash, plain, strict=True):
        allowed = 2 * (theirs.double() - reference).abs().max() + 1e-3
        assert (ours.double() - reference).abs().max() <= allowed


def test_sums_over_chunks_are_fp32():
    """Products in bf16 that add up to a sum in fp32: error to fp64 far below what sums in bf16 would have."""
    generator = torch.Generator("cuda").manual_seed(0)
    a, b = (torch.randn(4096, n, device="cuda", generator=generator, dtype=torch.bfloat16) for n in (512, 384))
    exact, total, rounded = a.double().T @ b.double(), None, torch.zeros(512, 384, device="cuda", dtype=torch.bfloat16)
    for left, right in zip(a.split(512), b.split(512), strict=True):
        total = ops.add_product(total, left, right)
        rounded += left.T @ right
    assert total.dtype == torch.float32
    assert 100 * (total - exact).norm() < (rounded - exact).norm()
    factor = torch.tensor(0.5, device="cuda")
    assert torch.equal(ops.scaled(total, factor, torch.bfloat16), (total * 0.5).bfloat16())


ENGINES = {
    "zero 1": {"zero_stage": 1},
    "zero 2": {"zero_stage": 2},
    "zero 3": {"zero_stage": 3},
    "recompute": {"activation_checkpointing": True},
    "optimizer on the host": {"zero_stage": 2, "offload_optimizer": True},
    "all on the host": {"zero_stage": 3, "offload_optimizer": True, "offload_parameters": True},
}


def losses_of_an_engine(**engine) -> list[float]:
    """Four optimizer steps on one batch; before the last the counts of steps lie where an elastic resume puts them."""
    config, device, steps = training.draft_config(small=True), torch.device("cuda", torch.cuda.current_device()), 3
    features = training.random_features(config, 256, steps, device, torch.bfloat16)
    teacher = Teacher(training._teacher_head(config, device, torch.bfloat16), None)
    weights = training._weights(features, steps)
    settings = {"name": "x", "data": {"path": "x", "sequence_length": 256}, "ttt": {"steps": steps}}
    settings |= {"schedule": {"steps": 4}, "engine": {"device": "cuda", "micro_batch": 1, **engine}}
    made = DraftEngine(training.random_draft(config, device), teacher, parse_config(settings), torch.bfloat16)
    losses = []
    try:
        for number in range(4):
            if number == 3:
                for state in made.optimizer.state.values():
                    state["step"] = state["step"].cpu()
            losses.append(float((made.step([features], weights, 1e-3).loss * weights.double()).sum()))
        return losses
    finally:
        made.close()


def test_every_engine_takes_the_same_steps():
    with processes(torch.device("cuda", torch.cuda.current_device())):
        usual = losses_of_an_engine(zero_stage=0)
        assert usual[-1] < usual[0] - 0.01
        for name, engine in ENGINES.items():
            assert losses_of_an_engine(**engine) == pytest.approx(usual, rel=3e-3), name


def test_a_run_in_bf16_learns_and_resumes(tmp_path):
    from train.loop import train

    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"text": f"def f{i}(x):\n    return x + {i}\n" * 8}) + "\n" for i in range(64)))

    def settings(name: str, **draft):
        return parse_config(
            {
                "name": name,
                "output": str(tmp_path / "runs"),
                "data": {"path": str(data), "sequence_length": 128},
                "draft": draft,
                "optimizer": {"lr": 1e-3},
                "schedule": {"steps": 60},
                "engine": {"device": "cuda", "micro_batch": 16, "zero_stage": 1},
                "checkpoint": {"every": 30},
                "log": {"every": 1},
            }
        )

    def losses(result) -> list[float]:
        lines = (result.directory / "log.jsonl").read_text().splitlines()
        return [json.loads(line)["loss"] for line in lines]

    straight = losses(train(settings("straight"), progress=False))
    assert straight[-1] < 0.5 * straight[0]
    train(settings("cut"), progress=False, stop=(30).__eq__)
    assert losses(train(settings("cut"), progress=False)) == pytest.approx(straight, rel=5e-2)
    assert losses(train(settings("fitted", initialisation="regression"), progress=False))[0] < 0.7 * straight[0]
