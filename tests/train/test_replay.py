"""al_replay equals the served acceptance of a greedy chain, step by step, in fp32."""

from collections import Counter

import numpy as np
import pytest
import torch

from draft_model.checkpoint import load_draft
from draft_model.chosen_blocks import ChosenBlocks
from draft_model.resolve import resolve_draft
from serve.engine import Engine
from serve.request import SamplingParams
from serve.tree import TreeConfig
from spec.bench.statistics import measure
from target_model.checkpoint import load_target
from target_model.resolve import resolve_target
from target_model.tokenizer import load_tokenizer
from tests.draft_model.drafts import random_draft
from tests.fixtures import random_target
from train.data import TrainingRows
from train.features import OnlineCapture
from train.replay import replay


def prompts_of(vocabulary: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, vocabulary, (length,), generator=generator).tolist() for length in (1, 7, 23)]


def check(target, draft, prompts, tokens: int, length: int, ignore_eos: bool, attention: str = "full") -> float:
    engine = Engine(
        target,
        draft,
        TreeConfig.chain(length),
        pages=256,
        context=256,
        max_running=len(prompts),
        draft_attention=attention,
    )
    completions = engine.generate(prompts, SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=ignore_eos))
    served = measure([step for completion in completions for step in completion.steps], length)
    ends = [[] if completion.stop_token is None else [completion.stop_token] for completion in completions]
    answers = [completion.token_ids + end for completion, end in zip(completions, ends, strict=True)]
    texts = list(zip(prompts, answers, strict=True))
    chosen = ChosenBlocks.parse(attention, target.config, draft.config)
    nothing = TrainingRows(*np.zeros((3, 0, 1), np.int32), Counter(), Counter())
    capture = OnlineCapture(target, nothing, draft.config.taps, 1, chosen=chosen)
    replayed = replay(draft, capture.text, target.config.eos_token_ids, texts, length)
    assert replayed.steps == sum(len(completion.steps) for completion in completions)
    assert replayed.al == pytest.approx(served.length, abs=1e-12)
    assert [count / replayed.steps for count in replayed.accepted_at] == pytest.approx(list(served.per_position))
    return replayed.al


@pytest.mark.parametrize("length", [1, 3, 5])
@torch.no_grad()
def test_replay_equals_serving(length):
    """A draft whose head and norm are the target's accepts now and then, mostly by looping text."""
    target = random_target()
    draft = random_draft()
    draft.lm_head.weight.copy_(target.lm_head.weight)
    check(target, draft, prompts_of(300), 60, length, True)


@torch.no_grad()
def test_a_sparse_draft_trains_on_the_mask_that_it_is_served_with():
    """Behind a few blocks the sparse chain proposes other tokens than the full one, and replays exactly as served."""
    target, lengths = random_target(), []
    draft = random_draft()
    draft.lm_head.weight.copy_(target.lm_head.weight)
    for layer in sorted({n for n, sparse in enumerate(target.config.sparse_layers) if sparse})[-2:]:
        for attention in (f"sparse:{layer}", "full"):
            lengths.append(check(target, draft, prompts_of(300), 120, 4, True, attention))
    assert lengths[0] != lengths[1]


@pytest.mark.parametrize("tokens", [10, 11, 12, 13, 96])
@torch.no_grad()
def test_replay_equals_serving_with_a_trained_draft(tokens):
    """Cut by the limit at different places of an accepted run, and ended by the target itself."""
    resolved = resolve_target("m3-tiny")
    tokenizer = load_tokenizer(resolved.path)
    texts = ("Write a Python function `add(a, b)`.", "Hello, how are you?")
    prompts = [tokenizer.render_chat([{"role": "user", "content": text}]) for text in texts]
    draft = load_draft(resolve_draft("eagle3", resolved).path)
    assert check(load_target("m3-tiny"), draft, prompts, tokens, 3, ignore_eos=False) > 1.2
