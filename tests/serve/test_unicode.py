"""Characters whose bytes span tokens arrive whole: in streams, at every border of an accepted run, cut or not."""

import pytest

from tests.serve.fake_engine import saying, service, tokenizer
from tests.serve.http_client import ask, chunks

TOKENIZER = tokenizer()
TEXT = "Café 語る 🎉 👩‍👩‍👧 e\u0301!"
BYTES = {TOKENIZER.token_bytes(token): token for token in range(13, TOKENIZER.vocab_size)}
# Three tokens for most characters of three bytes, four for an emoji: the worst that a byte-level tokenizer does.
IDS = [BYTES[bytes([byte])] for byte in TEXT.encode()]


def both(path, runs, max_tokens, **body):
    """The text of an answer, streamed and not."""
    texts = []
    for stream in (False, True):
        made = service(saying(IDS, runs=runs))
        response = ask(made, path, max_tokens=max_tokens, stream=stream, **body)
        assert response.status_code == 200, response.text
        choices = [c for e in (chunks(response) if stream else [response.json()]) for c in e["choices"]]
        parts = [
            c.get("text", c.get("delta", c.get("message", {})).get("content") if "text" not in c else "")
            for c in choices
        ]
        texts.append("".join(part or "" for part in parts))
        if stream and max_tokens > len(IDS):
            assert not any("\ufffd" in (part or "") for part in parts)
    return texts


PATHS = [
    ("/v1/completions", {"prompt": "x"}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
]


@pytest.mark.parametrize(("path", "body"), PATHS, ids=["completions", "chat"])
@pytest.mark.parametrize("run", range(1, 7))
def test_streamed_text_is_the_text(path, body, run):
    assert both(path, (run,), len(IDS) + 5, **body) == [TEXT, TEXT]


@pytest.mark.parametrize("runs", [(1,), (2, 5)])
def test_a_cut_character_is_one_replacement_in_both_ways(runs):
    for cap in range(1, len(IDS) + 1):
        whole, streamed = both("/v1/completions", runs, cap, prompt="x")
        assert whole == streamed == TEXT.encode()[:cap].decode("utf-8", "replace")
        assert whole.count("\ufffd") <= 1


def test_log_probability_entries_carry_the_bytes():
    made = service(saying(IDS, runs=(5,)))
    response = ask(made, "/v1/chat/completions", messages=[{"role": "user", "content": "x"}], logprobs=True)
    entries = response.json()["choices"][0]["logprobs"]["content"]
    assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == TEXT


def test_streamed_log_probabilities_come_with_their_text():
    made = service(saying(IDS, runs=(5,)))
    response = ask(made, "/v1/completions", prompt="x", logprobs=0, stream=True, max_tokens=100)
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
