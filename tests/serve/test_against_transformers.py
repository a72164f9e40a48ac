"""The served text of the bundled pair is what the transformers package generates from the same checkpoint, token for
token.
"""

import pytest
import torch

from serve.load import EngineOptions, load_engine
from serve.request import SamplingParams
from serve.tree import TreeConfig
from target_model.resolve import resolve_target

QUESTIONS = [
    "What is a binary search tree?",
    "Tom has 3 boxes with 12 apples each and gives away 7 apples. How many apples does he have left?",
    "Write a Python function that returns the n-th Fibonacci number.",
]
TOKENS = 120


@pytest.fixture(scope="module")
def expected():
    """Prompt ids and transformers' greedy continuation of each."""
    from transformers import MiniMaxM3SparseForConditionalGeneration

    _, tokenizer, _ = load_engine(EngineOptions(draft=None, pages=16, device="cpu"))
    path = resolve_target("m3-tiny").path
    model = MiniMaxM3SparseForConditionalGeneration.from_pretrained(path, dtype=torch.float32).eval()
    prompts = [tokenizer.render_chat([{"role": "user", "content": question}]) for question in QUESTIONS]
    answers = []
    for prompt in prompts:
        with torch.no_grad():
            ids = model.generate(
                torch.tensor([prompt]), max_new_tokens=TOKENS, do_sample=False, eos_token_id=tokenizer.eos_ids[0]
            )
        answers.append(ids[0, len(prompt) :].tolist())
    return prompts, answers


@pytest.mark.parametrize("tree", [TreeConfig.chain(3), TreeConfig(5, 4, 24)], ids=str)
def test_greedy_text_is_transformers_text(expected, tree):
    prompts, answers = expected
    engine, _, _ = load_engine(EngineOptions(tree=tree, device="cpu", pages=256))
    completions = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=TOKENS))
    for completion, answer in zip(completions, answers, strict=True):
        # transformers keeps the end-of-text token, the engine reports it apart.
        assert completion.token_ids + [t for t in (completion.stop_token,) if t is not None] == answer
    steps = [step for completion in completions for step in completion.steps]
    assert sum(step.accepted for step in steps) / len(steps) > 1
    # At least one answer is long enough that its rows choose among more blocks than the top 8.
    assert max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True)) > 9 * 16
