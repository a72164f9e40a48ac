"""lm-eval on small local tasks through the API: every item's output is the same with speculation and without."""

import json

import pytest

from target_model.resolve import resolve_target
from tests.interop.structured import both_servers

pytestmark = pytest.mark.slow
REASON = "lm-eval is not installed: pip install -e '.[interop-clients]'"
lm_eval = pytest.importorskip("lm_eval", reason=REASON)

QUESTIONS = ["def add(a, b):", "The sky is", "import os\n", "1, 2, 3,", "Dear Tom,", "for i in range("]
CHOICES = [
    ("One and one is", ["two", "a cat"], 0),
    ("def f(x):\n    return", [" x", " Monday"], 0),
    ("A", ["b", "c"], 1),
]


def tasks(directory):
    """A task that generates and one that scores choices, from files."""
    made = []
    for name, rows in (
        ("generate", [{"question": question, "answer": "x"} for question in QUESTIONS]),
        ("choose", [{"question": text, "choices": choices, "label": label} for text, choices, label in CHOICES]),
    ):
        path = directory / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        made.append(
            {
                "task": f"local_{name}",
                "dataset_path": "json",
                "dataset_kwargs": {"data_files": {"test": str(path)}, "cache_dir": str(directory / "cache")},
                "test_split": "test",
                "doc_to_text": "{{question}}",
            }
        )
    made[0] |= {
        "output_type": "generate_until",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 40, "temperature": 0.0},
        "metric_list": [{"metric": "exact_match"}],
    }
    made[1] |= {
        "output_type": "multiple_choice",
        "doc_to_choice": "choices",
        "doc_to_target": "label",
        "metric_list": [{"metric": "acc"}],
    }
    return made


def evaluate(url, directory):
    """Prompt and outputs of every item of every task, and the scores."""
    options = {
        "model": "m3-tiny",
        "base_url": f"{url}/v1/completions",
        "tokenizer_backend": "huggingface",
        "tokenizer": str(resolve_target("m3-tiny").path),
        "num_concurrent": 4,
        "max_length": 512,
        "max_retries": 1,
    }
    found = lm_eval.simple_evaluate(
        model="local-completions", model_args=options, tasks=tasks(directory), log_samples=True, bootstrap_iters=0
    )
    items = {
        task: [(sample["arguments"], sample["resps"]) for sample in sorted(samples, key=lambda each: each["doc_id"])]
        for task, samples in found["samples"].items()
    }
    return items, found["results"]


def test_every_item_is_the_same(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    with both_servers() as urls:
        speculating, scores = evaluate(urls[0], tmp_path)
        plain, plain_scores = evaluate(urls[1], tmp_path)
    generated, chosen = speculating["local_generate"], speculating["local_choose"]
    assert len(generated) == len(QUESTIONS) and len(chosen) == len(CHOICES)
    assert generated == plain["local_generate"]
    for (arguments, scored), (expected_arguments, expected) in zip(chosen, plain["local_choose"], strict=True):
        assert arguments == expected_arguments
        for ((value, best),), ((expected_value, expected_best),) in zip(scored, expected, strict=True):
            assert value == pytest.approx(expected_value, abs=1e-3) and best == expected_best
    assert scores == plain_scores
