"""Compiles for sm_90, without a GPU, every kernel that the engine launches for the bundled pair: run as a program, in a
process without TRITON_INTERPRET.

Launches compile and compute nothing, so memory is zero wherever a kernel should have written. Prints a line a kernel.
"""

import torch
from triton.runtime.jit import JITFunction

from serve.engine import Engine
from serve.load import EngineOptions, load_engine
from serve.request import Request, SamplingParams
from serve.tree import TreeConfig
from target_model.kernels import ops
from tests.target_model.kernels.compile_all import compile_instead

TREES = (None, TreeConfig.chain(3), TreeConfig(3, 2, 6), TreeConfig(5, 4, 24))
CHOICES = ({"temperature": 0.0}, {"temperature": 1.0, "top_k": 40, "top_p": 0.95}, {"temperature": 1.0})


def zero(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.device.type == "meta" else tensor.zero_()


def main() -> None:
    empty, empty_like = torch.empty, torch.empty_like
    torch.empty = lambda *shape, **options: zero(empty(*shape, **options))
    torch.empty_like = lambda like, **options: zero(empty_like(like, **options))
    JITFunction.run = compile_instead
    loaded, _, _ = load_engine(EngineOptions(device="cpu", dtype=torch.bfloat16, draft_dtype=torch.bfloat16))
    target, draft = loaded.runner.target, loaded.runner.drafter.draft
    ops.override = "triton"
    for batch in (1, 3):
        for tree in TREES:
            for choice in CHOICES:
                engine = Engine(target, draft if tree else None, tree, pages=100, device_step=True)
                for number in range(batch):
                    params = SamplingParams(**choice, seed=1, max_tokens=12, ignore_eos=True)
                    engine.add(Request(str(number), [5] * (200 + number), params))
                for _ in range(3):
                    engine.step()


if __name__ == "__main__":
    main()
