"""Log-probabilities of a prompt (echo with logprobs): the transformers package's, however the prompt is computed."""

import pytest
import torch

from serve.load import EngineOptions, load_engine
from serve.request import Request, SamplingParams
from serve.server import make_service
from target_model.resolve import resolve_target
from tests.serve.fake_engine import tokenizer
from tests.serve.http_client import ask, chunks

PROMPTS = ["def add(a, b):\n    return a + b\n\n\nprint(add(1, 2))", "]~b]user\nNaïve café 🎉[e~[", "x"]
URL = "/v1/completions"
SPECIAL = tokenizer().special  # in an answer they are not shown


@pytest.fixture(scope="module")
def expected():
    """For each prompt its ids and transformers' log-probabilities of what comes behind each token."""
    from transformers import MiniMaxM3SparseForConditionalGeneration

    _, tokenizer, _ = load_engine(EngineOptions(draft=None, pages=16, device="cpu"))
    path = resolve_target("m3-tiny").path
    model = MiniMaxM3SparseForConditionalGeneration.from_pretrained(path, dtype=torch.float32).eval()
    found = []
    for prompt in PROMPTS:
        ids = tokenizer.encode(prompt, allow_special=True)
        with torch.no_grad():
            found.append((ids, model(torch.tensor([ids])).logits[0].log_softmax(-1)))
    return found


def service(**options):
    engine, tokenizer, description = load_engine(EngineOptions(device="cpu", **{"pages": 32, **options}))
    return make_service(engine, tokenizer, description)


@pytest.mark.parametrize(
    "options", [{"draft": None}, {}, {"prefill_tokens": 5}, {"prefill_tokens": 16, "max_running": 1}], ids=str
)
def test_they_are_transformers(expected, options):
    running = service(**options)
    body = ask(running, URL, prompt=PROMPTS, echo=True, logprobs=3, temperature=0, max_tokens=4, n=2).json()
    for index, choice in enumerate(body["choices"]):
        (ids, logprobs), prompt = expected[index // 2], PROMPTS[index // 2]
        reported, count = choice["logprobs"], len(ids)
        assert choice["text"].startswith(prompt)
        assert {len(column) for column in reported.values()} == {count + 4}
        assert (reported["token_logprobs"][0], reported["top_logprobs"][0]) == (None, None)
        own = torch.tensor(reported["token_logprobs"][1:count])
        rows = torch.arange(count - 1)
        assert torch.allclose(own, logprobs[rows, torch.tensor(ids[1:], dtype=torch.int64)], atol=1e-4)
        for place in range(1, count):
            top = sorted(reported["top_logprobs"][place].values(), reverse=True)[:3]
            assert torch.allclose(torch.tensor(top), logprobs[place - 1].topk(3).values[: len(top)], atol=1e-4)
        for start, token in zip(reported["text_offset"], reported["tokens"], strict=True):
            if not token.startswith("bytes:") and (start < len(prompt) or token not in SPECIAL):
                assert choice["text"].startswith(token, start)
    assert body["usage"]["prompt_tokens"] == sum(len(ids) for ids, _ in expected)


def test_what_is_cached_does_not_go_missing():
    """The prompt's pages are in the cache already: its logits are computed all the same."""
    engine, tokenizer, _ = load_engine(EngineOptions(device="cpu", pages=32))
    prompt = tokenizer.encode("one two three four five " * 10)
    first = SamplingParams(temperature=0, max_tokens=3, logprobs=0, prompt_logprobs=True)
    (alone,) = engine.generate([prompt], first)
    assert len(alone.prompt_logprobs) == len(prompt) - 1
    (again,) = engine.generate([prompt], first)
    assert again.prompt_logprobs == alone.prompt_logprobs and again.cached_tokens == 0
    (plain,) = engine.generate([prompt], SamplingParams(temperature=0, max_tokens=3))
    assert plain.cached_tokens > 0 and plain.prompt_logprobs is None


def test_a_preempted_request_reports_its_prompt_once():
    engine, tokenizer, _ = load_engine(EngineOptions(device="cpu", pages=32))
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=0, prompt_logprobs=True)
    prompt = tokenizer.encode("one two three four five " * 3)
    (undisturbed,) = engine.generate([prompt], params)
    engine.add(Request("a", prompt, params))
    updates = engine.step()
    (entry,) = engine.scheduler.running
    engine.scheduler.running.remove(entry)
    engine.scheduler._free(entry[2])
    engine.scheduler.waiting.append(entry)
    while engine.has_work():
        updates += engine.step()
    assert [update.prompt_logprobs for update in updates if update.prompt_logprobs] == [undisturbed.prompt_logprobs]


def test_a_stream_says_the_same():
    body = {"prompt": PROMPTS, "echo": True, "logprobs": 2, "temperature": 0, "max_tokens": 5}
    running = service()
    whole = ask(running, URL, **body).json()["choices"]
    streamed = chunks(ask(service(), URL, stream=True, **body))
    for index, choice in enumerate(whole):
        parts = [event["choices"][0] for event in streamed if event["choices"][0]["index"] == index]
        assert "".join(part["text"] for part in parts) == choice["text"]
        for column, values in choice["logprobs"].items():
            assert [value for part in parts for value in part["logprobs"][column]] == values


def test_only_the_prompt():
    """max_tokens 0: as evaluations ask."""
    body = {"prompt": PROMPTS[0], "echo": True, "logprobs": 1, "max_tokens": 0}
    response = ask(service(), URL, **body).json()
    (choice,) = response["choices"]
    assert choice["text"] == PROMPTS[0] and choice["finish_reason"] == "length"
    assert "".join(choice["logprobs"]["tokens"]) == PROMPTS[0]
    assert response["usage"]["completion_tokens"] == 0
    (event,) = chunks(ask(service(), URL, stream=True, **body))
    assert event["choices"][0] == choice
    refused = ask(service(), URL, prompt="x", max_tokens=0)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "max_tokens"
