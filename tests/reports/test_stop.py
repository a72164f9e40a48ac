"""STOP: what ends an answer is looked for token by token, however many tokens a step accepts.

Report R6: a step accepts tokens beyond a stop string, a stop token, the end of text or the cap, and the client sees
something of them, or another finish reason, or counts that do not fit. Also tried, of the same kind: the text of a
special token as a stop string, stop strings across two accepted runs and across none, several of which one begins
another, near misses, `ignore_eos`, `min_tokens`, n = 3 of which one ends early, both endpoints, runs of exactly 1 to 6
tokens.
"""

import re

import pytest

from tests.serve.comparison import CHAT, COMPLETIONS, WAYS, Pair, close, joined, whole
from tests.serve.fake_engine import logprob_of, saying, service, tokenizer
from tests.serve.http_client import ask
from tests.serve.known_target import Following, known_target

TOKENIZER = tokenizer()
# Twelve words of one token each, none part of another.
SCRIPT = [
    token
    for token in range(TOKENIZER.vocab_size)
    if re.fullmatch(r" [b-df-hj-np-tv-z][a-z]{5}", TOKENIZER.decode([token]))
][:12]
WORDS = [TOKENIZER.decode([token]) for token in SCRIPT]
END = TOKENIZER.eos_ids[0]
USER = [{"role": "user", "content": "x"}]
STARTS = (TOKENIZER.encode("x")[0], TOKENIZER.render_chat(USER, thinking_mode="disabled")[-1])


def completion(**body):
    return COMPLETIONS, {"prompt": "x", "temperature": 0, "logprobs": 2, **body}


def chat(**body):
    return CHAT, {"messages": USER, "temperature": 0, "logprobs": True, "top_logprobs": 2, **body}


# The prefill decides the first word alone, a run of six begins with the second: the stop completes at token k of it.
CAPPED = [
    request(**how, max_tokens=cap)
    for k in range(1, 7)
    for cap in (k, k + 1, k + 2, k + 4)
    for request, how in (
        (completion, {"stop": WORDS[k].strip()}),
        (completion, {"stop_token_ids": [SCRIPT[k]]}),
        (chat, {"stop": [WORDS[k][-3:] + WORDS[k + 1][:2], "never"]}),
    )
]
OTHER = [
    completion(stop=WORDS[2][-2:] + WORDS[3] + WORDS[4][:2], max_tokens=12),
    completion(stop=[f"{WORDS[-1]}!", WORDS[1] + WORDS[3]], max_tokens=12),
    completion(stop=[WORDS[5], WORDS[5] + WORDS[6]], max_tokens=12),
    completion(stop=WORDS[1], min_tokens=4, max_tokens=20),
    completion(stop=WORDS[0].strip(), max_tokens=9),
    completion(stop_token_ids=[SCRIPT[0]], max_tokens=9),
    completion(stop_token_ids=[SCRIPT[3]], min_tokens=6, max_tokens=20),
    chat(stop=WORDS[7], max_tokens=30),
    chat(n=3, temperature=1.5, seed=3, stop=[WORDS[3], WORDS[6]], max_tokens=12),
]


@pytest.fixture(scope="module")
def endless():
    """Says the twelve words for ever."""
    following = Following.chain(SCRIPT, starts=STARTS)
    return Pair(known_target(following), following.script)


@pytest.fixture(scope="module")
def expected(endless):
    return endless.plain(CAPPED + OTHER)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_r6_stops_inside_accepted_runs(endless, expected, way):
    endless.check(way, CAPPED + OTHER, expected)


def test_r6_the_stop_wins_up_to_the_cap(expected):
    """What plain decoding says of each case, told from the words: nothing of the stop or behind it in any field."""
    for (path, body), answer in zip(CAPPED, expected, strict=False):
        choice, cap = answer["choices"][0], body["max_tokens"]
        k = CAPPED.index((path, body)) // 12 + 1
        if path == CHAT:  # complete with the next word; the third letter from the end of the word is where it begins
            taken, text = k + 2, "".join(WORDS[: k + 1])[:-3]
        else:
            taken, text = k + 1, "".join(WORDS[: k + 1]).removesuffix(WORDS[k].strip())
        if "stop_token_ids" in body:
            text = "".join(WORDS[:k])
        stopped = cap >= taken
        assert choice["finish_reason"] == ("stop" if stopped else "length")
        assert answer["usage"]["completion_tokens"] == min(cap, taken)
        said = choice["message"]["content"] if path == CHAT else choice["text"]
        assert said == (text if stopped else "".join(WORDS[:cap]))
        entries = choice["logprobs"]["content"] if path == CHAT else choice["logprobs"]["tokens"]
        # The token that ends an answer was decided, and counts; it has no text and no log-probability.
        assert len(entries) == min(cap, taken) - (stopped and "stop_token_ids" in body)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_r6_the_end_of_text_inside_an_accepted_run(way):
    """The target ends after the fifth word; the draft goes on behind it, and so does an answer told to ignore it."""
    words = [*SCRIPT[:5], END, *SCRIPT[5:]]
    following = Following.chain(words, starts=STARTS)
    pair = Pair(known_target(following), following.script)
    requests = [completion(max_tokens=cap) for cap in (4, 5, 6, 7, 20)]
    requests += [chat(max_tokens=9), chat(max_tokens=9, ignore_eos=True), completion(max_tokens=9, min_tokens=7)]
    requests += [completion(max_tokens=12, ignore_eos=True, stop=WORDS[7].strip())]
    expected = pair.plain(requests)
    for answer, count, reason in zip(expected, (4, 5, 6, 6, 6, 6), ("length", "length", *["stop"] * 4), strict=False):
        assert (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) == (count, reason)
        said = answer["choices"][0].get("text") or answer["choices"][0]["message"]["content"]
        assert said == "".join(WORDS[: min(count, 5)])
    pair.check(way, requests, expected)


def answer(runs, *, stream, end=False, script=None, **body):
    """One completion of the scripted engine, in one shape for both ways of answering."""
    made = service(saying(SCRIPT if script is None else script, runs=runs, end=end))
    options = {"stream_options": {"include_usage": True}} if stream else {}
    response = ask(made, COMPLETIONS, prompt="x", logprobs=2, stream=stream, **options, **body)
    seen, counts = (joined if stream else whole)(response)
    assert made.engine.engine.requests == {}
    return seen, counts, made


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("offset", range(1, 7))
@pytest.mark.parametrize("kind", ["stop_token_ids", "end of text", "text of a special token", "stop string"])
def test_r6_a_run_of_exactly_six(offset, stream, kind):
    """As above, but the engine is scripted: it does accept six tokens, and every count can be told."""
    script, body = SCRIPT, {"stop": WORDS[offset].strip()}
    if kind == "end of text":
        script, body = [*SCRIPT[:offset], END, *SCRIPT[offset:]], {}
    elif kind == "stop_token_ids":
        body = {"stop_token_ids": [SCRIPT[offset]]}
    elif kind == "text of a special token":
        special = TOKENIZER.special["<mm:think>"]
        script, body = [*SCRIPT[:offset], special, *SCRIPT[offset:]], {"stop": ["<mm:think>"]}
    for cap in (offset, offset + 1, offset + 2, offset + 4):
        seen, counts, _ = answer((6,), stream=stream, script=script, max_tokens=cap, **body)
        plain, _, _ = answer((1,), stream=False, script=script, max_tokens=cap, **body)
        assert seen == close(plain)
        stopped, text = cap >= offset + 1, "".join(WORDS[:offset]) + " " * (kind == "stop string")
        choice = seen["choices"][0]
        assert choice["finish_reason"] == ("stop" if stopped else "length")
        assert choice["text"] == (text if stopped else "".join(WORDS[:cap]))
        assert seen["usage"]["completion_tokens"] == offset + stopped
        kept = offset + (stopped and kind == "stop string")
        assert choice["logprobs"]["token_logprobs"] == close([logprob_of(t, 2).logprob for t in SCRIPT[:kept]])
        assert counts["accepted_prediction_tokens"] == min(offset + stopped - 1, 5)


def test_r6_a_stop_string_across_two_runs():
    for runs in ((1,), (2,), (3,), (5,)):
        border = WORDS[2][-2:] + WORDS[3] + WORDS[4][:2]
        seen, _, _ = answer(runs, stream=True, stop=[border], max_tokens=12)
        assert seen["choices"][0]["text"] == "".join(WORDS[:3])[:-2]


def test_r6_near_misses_are_delivered_whole():
    seen, _, _ = answer((4,), stream=True, stop=[f"{WORDS[-1]}!", WORDS[1] + WORDS[3]], max_tokens=12)
    assert (seen["choices"][0]["text"], seen["choices"][0]["finish_reason"]) == ("".join(WORDS[:12]), "length")


def test_r6_min_tokens_holds_a_stop_string_off():
    seen, _, _ = answer((6,), stream=False, stop=WORDS[1], min_tokens=4, max_tokens=6)
    assert (seen["choices"][0]["text"], seen["choices"][0]["finish_reason"]) == ("".join(WORDS[:6]), "length")
