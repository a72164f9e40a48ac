"""LIMITS: bad, huge and edge-case requests and lengths.

Reports R16 (a request that is too long, malformed or of the wrong types) and R21 (a draft whose config names a shorter
context than the target's). Both against a real engine with a draft. Also tried, of the same kind: prompts as text, as
ids and as a chat around the edge of the context, caps around what is left of it, n and best_of at the edge, a cache
that holds less than a context, bodies of the wrong encoding, nesting and size, an answer that ends exactly at the
context while the draft would go on. Every field with a wrong value: tests/serve/test_refusals.py.
"""

import asyncio
import dataclasses
import json

import pytest

from draft_model.checkpoint import save_draft
from serve.load import EngineOptions, load_engine
from serve.request import SamplingParams
from serve.service import Settings
from serve.tree import TreeConfig
from tests.serve.comparison import CHAT, COMPLETIONS, WAYS, Pair
from tests.serve.fake_engine import saying, service, tokenizer
from tests.serve.http_client import ask, client
from tests.serve.known_target import Following, known_target

TOKENIZER = tokenizer()
CONTEXT = 256
LETTERS = [token for token in range(TOKENIZER.vocab_size) if TOKENIZER.token_bytes(token).isalpha()][:40]
USER = [{"role": "user", "content": "x"}]
START, CHAT_START = TOKENIZER.encode("x")[0], TOKENIZER.render_chat(USER, thinking_mode="disabled")[-1]
NORMAL = (COMPLETIONS, {"prompt": "x", "seed": 1, "max_tokens": 9, "logprobs": 1})


def ids(length):
    return [LETTERS[place % 7] for place in range(length - 1)] + [START]


@pytest.fixture(scope="module")
def known():
    following = Following.chain(LETTERS, starts=(START, CHAT_START))
    return Pair(known_target(following), following.script)


def body(path, **fields):
    base = {"messages": USER} if path == CHAT else {"prompt": "x"}
    return path, json.dumps({**base, **fields})


# Path and body, and what the error names.
BAD = [
    *((*body(path, max_tokens=value), "max_tokens") for path in (CHAT, COMPLETIONS) for value in (-1, 1.5, "8")),
    (*body(COMPLETIONS, prompt=ids(256)), "prompt"),
    (*body(COMPLETIONS, prompt=ids(257)), "prompt"),
    (*body(COMPLETIONS, prompt=ids(100_000)), "prompt"),
    (*body(COMPLETIONS, prompt="x " * 100_000), "prompt"),
    (*body(CHAT, messages=[{"role": "user", "content": "x " * 100_000}]), "messages"),
    (*body(COMPLETIONS, prompt=[TOKENIZER.vocab_size]), "prompt"),
    (*body(COMPLETIONS, stop_token_ids=[TOKENIZER.vocab_size]), "stop_token_ids"),
    (*body(COMPLETIONS, logit_bias={str(TOKENIZER.vocab_size): 1}), "logit_bias"),
    (CHAT, body(CHAT)[1][:20], "body"),
    (CHAT, "", "body"),
    (CHAT, "[]", "body"),
    (CHAT, json.dumps(json.dumps({"messages": USER})), "body"),
    (CHAT, '{"messages": [{"role": "user", "content": "\\ud800"}]}', "body"),
    (COMPLETIONS, '{"prompt": "x\\udfff"}', "body"),
    (COMPLETIONS, "[" * 100_000, "body"),
    (COMPLETIONS, '{"prompt": "x"}'.encode("utf-16"), "body"),
    (CHAT, body(CHAT)[1][:-1] + ', "temperature": NaN}', "temperature"),
    (CHAT, body(CHAT)[1][:-1] + ', "temperature": 1e400}', "temperature"),
    *((*body(CHAT, top_p=value), "top_p") for value in (0, 1.1)),
    *((*body(path, n=value), "n") for path in (CHAT, COMPLETIONS) for value in (0, 10_000, 10**30)),
    (*body(COMPLETIONS, best_of=10_000), "best_of"),
    (*body(CHAT, logprobs=True, top_logprobs=10**6), "top_logprobs"),
    (*body(COMPLETIONS, logprobs=10**6), "logprobs"),
    (*body(CHAT, stop=["x"] * 1000), "stop"),
    (*body(CHAT, stop=""), "stop"),
    (*body(CHAT, messages=[]), "messages"),
    (*body(CHAT, messages=[{"role": "robot", "content": "x"}]), "messages[0].role"),
    (*body(CHAT, messages=[{"role": "user", "content": None}]), "messages[0].content"),
    (*body(CHAT, model="gpt-4"), "model"),
    (*body(COMPLETIONS, prompt=""), "prompt"),
]


def test_r16_bad_requests_are_refused_by_name_and_change_nothing(known):
    """After each comes a normal request, whose answer must stay the same."""

    async def run():
        async with client(known.service(WAYS[2])) as http:
            path, normal = NORMAL
            expected = (await http.post(path, json=normal)).json()["choices"]
            for path, content, param in BAD:
                response = await http.post(path, content=content)
                assert response.status_code == (404 if param == "model" else 400), (content[:99], response.text)
                error = response.json()["error"]
                assert error["param"] == param and error["message"], (content[:99], error)
                again = await http.post(NORMAL[0], json=normal)
                assert again.json()["choices"] == expected, content[:99]
            assert (await http.get("/health")).status_code == 200

    asyncio.run(run())


EDGE = [
    (COMPLETIONS, {"prompt": ids(length), "temperature": 0, "logprobs": 0, "max_tokens": cap})
    for length, caps in ((250, (1, 5, 6, 7, 10**9)), (253, (2, 255)), (254, (10**9,)), (255, (1, 2, 10**9)))
    for cap in caps
]
EDGE += [(CHAT, {"messages": USER, "temperature": 0, "max_tokens": cap}) for cap in (1, 255, None)]
EDGE += [(COMPLETIONS, {"prompt": ids(254), "seed": 2, "n": 3, "max_tokens": 10**9})]
EDGE += [
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}], "max_tokens": 3, "seed": 4})
]


@pytest.fixture(scope="module")
def at_the_edge(known):
    return known.plain(EDGE)


def test_r16_the_context_is_the_last_cap(at_the_edge):
    """A prompt of one token less than the context gives one token; larger caps end there as well."""
    for (_, sent), answer in zip(EDGE, at_the_edge, strict=True):
        room = CONTEXT - answer["usage"]["prompt_tokens"]
        count = min(sent["max_tokens"] or room, room) * sent.get("n", 1)
        assert answer["usage"]["completion_tokens"] == count
        assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_r16_lengths_up_to_the_context(known, at_the_edge, way):
    known.check(way, EDGE, at_the_edge)


@pytest.mark.parametrize("length", [256, 257, 100_000])
def test_r16_an_overflow_names_both_lengths(known, length):
    response = ask(known.service(WAYS[0]), COMPLETIONS, prompt=ids(length))
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "prompt")
    assert str(length) in error["message"] and str(CONTEXT) in error["message"]


def test_r16_a_cache_smaller_than_the_context(known):
    """12 pages of 8: what fits is served, what never can is refused and the largest that can is named in the models."""

    async def run():
        made = known.service(WAYS[0], pages=12)
        async with client(made) as http:
            room = (await http.get("/v1/models")).json()["data"][0]["max_model_len"]
            assert 0 < room < 96
            fits = await http.post(COMPLETIONS, json={"prompt": ids(room - 1), "max_tokens": 10**9})
            assert fits.json()["usage"]["completion_tokens"] == 1
            refused = await http.post(COMPLETIONS, json={"prompt": ids(room)})
            assert refused.status_code == 400 and str(room) in refused.json()["error"]["message"]

    asyncio.run(run())


@pytest.mark.parametrize("content", ["x" * 30_000_000, "]~b]" * 2_000_000], ids=["long", "markers"])
def test_r16_a_text_far_too_long_is_refused_without_encoding_it(content, monkeypatch):
    monkeypatch.setattr(TOKENIZER, "encode", lambda *args, **kwargs: pytest.fail("encoded"))
    for path, body in (
        (COMPLETIONS, {"prompt": content}),
        (CHAT, {"messages": [{"role": "user", "content": content}]}),
    ):
        response = ask(service(saying([50], context=CONTEXT)), path, **body)
        assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize("chunked", [False, True])
def test_r16_a_body_that_is_too_large(chunked):
    async def run():
        made = service(saying("x"), settings=Settings(max_body=1000))
        content = b'{"prompt": "' + b"x" * 2000 + b'"}'

        async def parts():
            yield content

        async with client(made) as http:
            return await http.post(COMPLETIONS, content=parts() if chunked else content)

    response = asyncio.run(run())
    assert response.status_code == 413 and "1000 bytes" in response.json()["error"]["message"]


# Prompts before, at and behind the draft's end at 64, and some that end exactly at the target's.
LONG = [(60, 40), (63, 40), (64, 40), (65, 40), (200, 40), (230, 26), (216, 40), (217, 40)]
BEYOND = [(COMPLETIONS, {"prompt": ids(length), "temperature": 0, "max_tokens": cap}) for length, cap in LONG]
BEYOND += [(COMPLETIONS, {"prompt": ids(length), "seed": length, "max_tokens": 40}) for length in (63, 200)]


@pytest.fixture(scope="module")
def beyond(known):
    return known.plain(BEYOND)


@pytest.mark.parametrize("way", WAYS[1:], ids=str)
def test_r21_a_draft_with_a_shorter_context(known, beyond, way):
    known.check(way, BEYOND, beyond, draft={"max_position": 64})


def test_r21_acceptance_goes_on_behind_the_draft_s_context(tmp_path):
    """The bundled draft under a config of 64 positions drafts behind them what it drafts otherwise, and the start says
    what will happen."""
    engine, words, description = load_engine(EngineOptions(context=CONTEXT, device="cpu"))
    assert not any("positions" in line for line in description.lines)
    draft = engine.runner.drafter.draft
    draft.config = dataclasses.replace(draft.config, max_position=64)
    save_draft(draft, tmp_path / "short")
    short, _, told = load_engine(
        EngineOptions(draft=str(tmp_path / "short"), context=CONTEXT, device="cpu", tree=TreeConfig.chain(3))
    )
    assert any("64 positions" in line and "256" in line for line in told.lines)
    long, _, _ = load_engine(EngineOptions(context=CONTEXT, device="cpu", tree=TreeConfig.chain(3)))
    text = words.encode("def add(a, b):\n    return a + b\n\n" * 9)[:140]
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    answers = [engine.generate([text, text[:62]], params) for engine in (short, long)]
    assert answers[0] == answers[1]
    assert sum(step.accepted for step in answers[0][0].steps) > 10
