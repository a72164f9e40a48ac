"""The judge of a training run: serves the draft on held-out prompts and measures what the target accepts."""

from collections.abc import Callable
from typing import Any

import torch

from draft_model.model import Eagle3Draft
from serve.tree import TreeConfig
from spec.bench.statistics import measure
from spec.bench.sweep import sampling_params
from spec.pair import Pair
from spec.suites import HELD_OUT, load_suite
from target_model.checkpoint import load_target
from target_model.model import TargetModel
from target_model.resolve import resolve_target
from target_model.tokenizer import load_tokenizer

CHAIN = 3
TOKENS = 96


def served_acceptance(
    target: str, draft_attention: str = "full"
) -> Callable[[Eagle3Draft, TargetModel | None], dict[str, Any]]:
    """A callable that measures chains of 3: "al", greedy, by which a run keeps its best, and "al_sampled", at T = 1.

    It serves the draft with the target it is given. Without one, `target` is loaded when the first draft comes, on that
    draft's device and in its precision. `draft_attention` as in `spec serve`.
    """
    tokenizer = load_tokenizer(resolve_target(target).path)
    loaded: TargetModel | None = None

    def judge(draft: Eagle3Draft, model: TargetModel | None) -> dict[str, Any]:
        nonlocal loaded
        if model is None and loaded is None:
            weight = draft.lm_head.weight
            loaded = load_target(target, dtype=weight.dtype, device=weight.device)
        return measure_draft(Pair(model or loaded, draft, tokenizer, f"target {target}"), draft_attention)

    return judge


@torch.no_grad()
def measure_draft(pair: Pair, draft_attention: str = "full") -> dict[str, Any]:
    """Served acceptance on the held-out prompts, all answered at once."""
    prompts = [pair.render(prompt.turns[0]) for prompt in load_suite(HELD_OUT).prompts]
    longest = TOKENS + max(map(len, prompts))
    engine = pair.engine(TreeConfig.chain(CHAIN), longest, len(prompts), draft_attention)
    result: dict[str, Any] = {"prompts": len(prompts), "tokens": TOKENS, "chain": CHAIN}
    for key, temperature in (("al", 0.0), ("al_sampled", 1.0)):
        params = [sampling_params(temperature, TOKENS, seed) for seed in range(len(prompts))]
        steps = [step for completion in engine.generate(prompts, params) for step in completion.steps]
        acceptance = measure(steps, CHAIN)
        result[key] = acceptance.length
        if temperature == 0:
            result["per_position"] = list(acceptance.per_position or ())
    return result
