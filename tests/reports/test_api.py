"""API: the shape of what the client receives: log-probabilities, characters, counts.

Reports R11 (log-probabilities zero, missing or of other tokens when several are accepted) and R13 (characters whose
bytes span tokens break in streams). Also tried, of the same kind: every sampling field, penalties and biases, n,
best_of, echo, lists of prompts and reasoning, field by field on the bundled target with drafts that are right always,
often and never; accepted runs of 1 to 6 tokens that end at every byte of two-, three- and four-byte characters, of a
joined emoji sequence and of a combining mark; a cap at every byte; offsets and bytes of log-probability entries; the
usage of an answer against the server's own counters.
"""

import asyncio
import json
import math

import pytest

from serve.tree import TreeConfig
from tests.serve.comparison import CHAT, COMPLETIONS, Way, bundled_pair, joined, whole
from tests.serve.fake_engine import saying, service, tokenizer
from tests.serve.http_client import ask, chunks, client

TOKENIZER = tokenizer()
SPECIAL = {"]~b]", "[e~[", "<mm:think>", "</mm:think>"}


def user(text):
    return [{"role": "user", "content": text}]


LONG = {"max_tokens": 40, "ignore_eos": True}
REQUESTS = [
    (CHAT, {"messages": user("A list?"), "temperature": 0, "logprobs": True, "top_logprobs": 3, **LONG}),
    (CHAT, {"messages": user("Another list?"), "seed": 2, "logprobs": True, "top_logprobs": 3, **LONG}),
    (COMPLETIONS, {"prompt": "def add(a, b):", "temperature": 0, "logprobs": 3, **LONG}),
    (COMPLETIONS, {"prompt": "def sub(a, b):", "seed": 9, "logprobs": 3, **LONG}),
    (CHAT, {"messages": user("Tell me of trees."), "seed": 5, "max_tokens": 40, "n": 2, "logprobs": True}),
    (CHAT, {"messages": user("Think first."), "thinking_mode": "enabled", "seed": 1, "max_tokens": 30}),
    (CHAT, {"messages": user("Be quick"), "temperature": 0, "max_completion_tokens": 1}),
    (COMPLETIONS, {"prompt": "import os", "temperature": 0, "max_tokens": 60, "stop": ["\n\n", "self"], "logprobs": 0}),
    (COMPLETIONS, {"prompt": "for i in range(", "seed": 7, "top_p": 0.8, "top_k": 20, "max_tokens": 30, "echo": True}),
    (COMPLETIONS, {"prompt": ["one two", "three four five"], "seed": 8, "n": 2, "max_tokens": 25}),
    (COMPLETIONS, {"prompt": "x = [1, 2", "temperature": 0, "max_tokens": 40, "repetition_penalty": 1.3}),
    (COMPLETIONS, {"prompt": "The same", "temperature": 0, "max_tokens": 40, "frequency_penalty": 0.8}),
    (COMPLETIONS, {"prompt": "A bias", "temperature": 0, "max_tokens": 30, "logit_bias": {"50": -100, "300": 5}}),
    (COMPLETIONS, {"prompt": "The end of", "seed": 3, "max_tokens": 40, "min_tokens": 6, "stop": ["e"], "logprobs": 1}),
    (COMPLETIONS, {"prompt": "wide " * 100, "seed": 4, "min_p": 0.05, "max_tokens": 30}),
    (COMPLETIONS, {"prompt": "class Node:", "seed": 6, "best_of": 3, "n": 2, "max_tokens": 20}),
]
WAYS = [
    Way(TreeConfig.chain(4), 1.0, crowded=True, stream=False),
    Way(TreeConfig.chain(4), 0.67, crowded=False, stream=True),
    Way(TreeConfig(4, 3, 14), 0.67, crowded=True, stream=True),
    Way(TreeConfig(3, 2, 6), 0.0, crowded=True, stream=False),
]


@pytest.fixture(scope="module")
def bundled():
    """The bundled target with a draft that follows its plain answers, and these answers."""
    return bundled_pair(REQUESTS, pages=256)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_r11_speculation_changes_no_field(bundled, way):
    pair, expected = bundled
    kept = [
        (request, answer)
        for request, answer in zip(REQUESTS, expected, strict=True)
        if not (way.stream and "best_of" in request[1])
    ]
    requests, answers = zip(*kept, strict=True)
    made, counts = pair.check(way, list(requests), list(answers), pages=256)
    totals = made.metrics.json()
    assert totals["accepted_tokens"] == sum(count["accepted_prediction_tokens"] for count in counts)
    assert totals["drafted_tokens"] - totals["accepted_tokens"] == sum(
        count["rejected_prediction_tokens"] for count in counts
    )
    assert totals["completion_tokens"] == sum(answer["usage"]["completion_tokens"] for answer in answers)


def test_r11_log_probabilities_are_distributions(bundled):
    """One entry for each token of the text; their strings join to it; alternatives share at most the whole."""
    _, expected = bundled
    for (path, _), answer in zip(REQUESTS[:4], expected, strict=False):
        choice = answer["choices"][0]
        if path == CHAT:
            content = choice["logprobs"]["content"]
            names, own = [entry["token"] for entry in content], [entry["logprob"] for entry in content]
            top = [{item["token"]: item["logprob"] for item in entry["top_logprobs"]} for entry in content]
            text = choice["message"]["content"]
        else:
            columns = choice["logprobs"]
            names, own, top = (columns[name] for name in ("tokens", "token_logprobs", "top_logprobs"))
            text = choice["text"]
        assert "".join(name for name in names if name not in SPECIAL) == text
        assert len(names) == answer["usage"]["completion_tokens"] == 40
        for name, value, alternatives in zip(names, own, top, strict=True):
            assert alternatives.get(name, value) == value and len(alternatives) in (3, 4)
            assert sum(map(math.exp, alternatives.values())) <= 1 + 1e-6
        assert len(set(own)) > 5 and min(own) < -0.01


TEXT = "Café 語る 🎉 👩‍👩‍👧 e\u0301!"
BYTES = {TOKENIZER.token_bytes(token): token for token in range(13, TOKENIZER.vocab_size)}
# Three tokens for most characters of three bytes, four for an emoji: the worst that a byte-level tokenizer does.
IDS = [BYTES[bytes([byte])] for byte in TEXT.encode()]
PATHS = [(COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": user("x")})]


def both(path, runs, max_tokens, **body):
    """The text of an answer, not streamed and streamed."""
    texts = []
    for stream in (False, True):
        made = service(saying(IDS, runs=runs))
        options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        response = ask(made, path, max_tokens=max_tokens, **options, **body)
        (choice,) = (joined if stream else whole)(response)[0]["choices"]
        texts.append(choice["text"] if path == COMPLETIONS else choice["message"]["content"])
        if stream and max_tokens > len(IDS):
            assert "\ufffd" not in response.text
    return texts


@pytest.mark.parametrize(("path", "body"), PATHS, ids=["completions", "chat"])
@pytest.mark.parametrize("run", range(1, 7))
def test_r13_streamed_text_is_the_text(path, body, run):
    assert both(path, (run,), len(IDS) + 5, **body) == [TEXT, TEXT]


@pytest.mark.parametrize("runs", [(1,), (2, 5)])
def test_r13_a_cut_character_is_one_replacement_in_both_ways(runs):
    for cap in range(1, len(IDS) + 1):
        unbroken, streamed = both(COMPLETIONS, runs, cap, prompt="x")
        assert unbroken == streamed == TEXT.encode()[:cap].decode("utf-8", "replace")
        assert unbroken.count("\ufffd") <= 1


def test_r13_every_event_is_whole():
    """Each event of a stream is sent as one piece, which is valid UTF-8 and JSON by itself."""

    async def run():
        async with client(service(saying(IDS, runs=(2, 5)))) as http:
            body = {"prompt": "x", "stream": True, "max_tokens": 99}
            async with http.stream("POST", COMPLETIONS, json=body) as response:
                return [piece async for piece in response.aiter_raw()]

    *events, last = [event for piece in asyncio.run(run()) for event in piece.decode().split("\n\n") if event]
    assert last == "data: [DONE]" and len(events) > 10
    assert "".join(json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events) == TEXT


def test_r13_log_probability_entries_carry_the_bytes():
    response = ask(service(saying(IDS, runs=(5,))), CHAT, messages=user("x"), logprobs=True)
    entries = response.json()["choices"][0]["logprobs"]["content"]
    assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == TEXT


def test_r13_streamed_log_probabilities_come_with_their_text():
    response = ask(service(saying(IDS, runs=(5,))), COMPLETIONS, prompt="x", logprobs=0, stream=True, max_tokens=100)
    text, entries, offsets = "", 0, []
    for event in chunks(response):
        choice = event["choices"][0]
        text += choice["text"]
        offsets += choice["logprobs"]["text_offset"]
        entries += len(choice["logprobs"]["tokens"])
        # Entries so far never run ahead of the text, and lag only by what is held for an unfinished character.
        assert len(TOKENIZER.decode(IDS[:entries])) == len(text)
    assert (text, entries) == (TEXT, len(IDS))
    assert offsets == sorted(offsets)
