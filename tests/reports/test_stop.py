"""Answers end at the same token whatever a step accepts: text, reasons, counts, log-probabilities as in plain
decoding."""

import re

import pytest

from tests.serve.fake_engine import logprob_of, saying, service, tokenizer
from tests.serve.http_client import ask, chunks

TOKENIZER = tokenizer()
# Twelve words of one token each, none part of another.
SCRIPT = [
    token
    for token in range(TOKENIZER.vocab_size)
    if re.fullmatch(r" [b-df-hj-np-tv-z][a-z]{5}", TOKENIZER.decode([token]))
][:12]
WORDS = [TOKENIZER.decode([token]) for token in SCRIPT]


def answer(runs, *, stream, end=False, script=None, **body):
    """What a client can see of one completion, in one shape for both ways of answering."""
    engine = saying(SCRIPT if script is None else script, runs=runs, end=end)
    made = service(engine)
    options = {"stream_options": {"include_usage": True}} if stream else {}
    response = ask(made, "/v1/completions", prompt="x", logprobs=2, stream=stream, **options, **body)
    assert response.status_code == 200, response.text
    if stream:
        events = chunks(response)
        choices = [choice for event in events for choice in event["choices"]]
        usage = events[-1]["usage"]
        columns = [choice["logprobs"] for choice in choices]
        finish = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
        text = "".join(choice["text"] for choice in choices)
        logprobs = {name: [value for column in columns for value in column[name]] for name in columns[0]}
    else:
        choice, usage = response.json()["choices"][0], response.json()["usage"]
        text, logprobs, finish = choice["text"], choice["logprobs"], [choice["finish_reason"]]
    assert len(finish) == 1
    counts = usage["completion_tokens_details"]
    assert usage["completion_tokens"] == usage["total_tokens"] - usage["prompt_tokens"]
    return (
        {
            "text": text,
            "finish_reason": finish[0],
            "completion_tokens": usage["completion_tokens"],
            **logprobs,
        },
        counts,
        made,
    )


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("offset", range(1, 7))
def test_a_stop_string_inside_an_accepted_run(offset, stream):
    """The stop string completes at token `offset` of a run of 6, with the cap around it. The first token is a run of
    its own."""
    word = WORDS[offset].strip()
    for cap in (offset, offset + 1, offset + 2, offset + 4):
        seen, _, made = answer((6,), stream=stream, stop=word, max_tokens=cap)
        plain, _, _ = answer((1,), stream=False, stop=word, max_tokens=cap)
        assert seen == plain
        taken = min(cap, offset + 1)
        assert seen["finish_reason"] == ("stop" if cap >= offset + 1 else "length")
        assert seen["completion_tokens"] == taken == len(seen["tokens"])
        assert seen["tokens"] == WORDS[:taken]
        assert seen["token_logprobs"] == [logprob_of(token, 2).logprob for token in SCRIPT[:taken]]
        assert seen["text"] == "".join(WORDS[:taken]).removesuffix(word if cap >= offset + 1 else "")
        assert made.engine.engine.requests == {}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("offset", range(1, 7))
@pytest.mark.parametrize("kind", ["stop_token_ids", "end of text", "text of a special token"])
def test_a_stop_token_inside_an_accepted_run(offset, stream, kind):
    end = TOKENIZER.eos_ids[0]
    if kind == "end of text":
        script, body = [*SCRIPT[:offset], end, *SCRIPT[offset:]], {}
    elif kind == "stop_token_ids":
        script, body = SCRIPT, {"stop_token_ids": [SCRIPT[offset]]}
    else:
        special = TOKENIZER.special["<mm:think>"]
        script, body = [*SCRIPT[:offset], special, *SCRIPT[offset:]], {"stop": ["<mm:think>"]}
    for cap in (offset, offset + 1, offset + 3):
        seen, counts, _ = answer((6,), stream=stream, script=script, max_tokens=cap, **body)
        plain, _, _ = answer((1,), stream=False, script=script, max_tokens=cap, **body)
        assert seen == plain
        stopped = cap >= offset + 1
        assert seen["finish_reason"] == ("stop" if stopped else "length")
        assert seen["text"] == "".join(WORDS[:offset])
        # The token that ended the answer was decided, and counts; it has no text and no log-probability.
        assert seen["completion_tokens"] == offset + stopped
        assert len(seen["tokens"]) == offset
        assert counts["accepted_prediction_tokens"] == min(offset + stopped - 1, 5)


def test_a_stop_string_across_two_runs():
    for runs in ((1,), (2,), (3,), (5,)):
        border = WORDS[2][-2:] + WORDS[3] + WORDS[4][:2]
        seen, _, _ = answer(runs, stream=True, stop=[border], max_tokens=12)
        assert (seen["text"], seen["finish_reason"]) == ("".join(WORDS[:3])[:-2], "stop")


def test_near_misses_are_delivered_whole():
    seen, _, _ = answer((4,), stream=True, stop=[f"{WORDS[-1]}!", WORDS[1] + WORDS[3]], max_tokens=12)
    assert (seen["text"], seen["finish_reason"]) == ("".join(WORDS[:12]), "length")


def test_ignore_eos_goes_on():
    seen, _, _ = answer((3,), stream=False, script=[*SCRIPT[:2], 2, *SCRIPT[2:]], max_tokens=5, ignore_eos=True)
    assert (seen["completion_tokens"], seen["finish_reason"]) == (5, "length")
    assert seen["text"] == "".join(WORDS[:4])


def test_min_tokens_holds_a_stop_string_off():
    seen, _, _ = answer((6,), stream=False, stop=WORDS[1], min_tokens=4, max_tokens=6)
    assert seen["finish_reason"] == "length"
    assert seen["text"] == "".join(WORDS[:6])


def test_counts_stop_where_the_answer_stops():
    """Accepted tokens behind the stop string are not counted, neither for the client nor in /stats; the drafts were
    made."""
    _, counts, made = answer((6,), stream=False, stop=WORDS[3].strip(), max_tokens=12)
    assert counts["accepted_prediction_tokens"] == 3
    assert counts["rejected_prediction_tokens"] == 9 - 3
    totals = made.metrics.json()
    assert (totals["verify_steps"], totals["accepted_tokens"], totals["drafted_tokens"]) == (1, 3, 9)
    assert totals["acceptance_length"] == 4.0
    assert totals["accepted_per_position"] == [1.0, 1.0, 1.0]
