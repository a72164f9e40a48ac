"""The field `draft_tokens` of streamed chats: every token once, with its depth, whatever cuts the text."""

import pytest

from serve.answer import Delta
from serve.draft_tokens import DraftTokens
from tests.serve.fake_engine import saying, service, tokenizer
from tests.serve.http_client import ask, chunks

TOKENIZER = tokenizer()
CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "Hi"}]


def stream(text, runs=(4,), **body):
    """Chunks of one streamed chat that asks for the field, and what it was cut into, by channel."""
    response = ask(service(saying(text, runs=runs)), CHAT, messages=USER, stream=True, draft_tokens=True, **body)
    assert response.status_code == 200, response.text
    choices = [choice for chunk in chunks(response) for choice in chunk["choices"]]
    whole = "".join(choice["delta"].get("reasoning_content", "") for choice in choices)
    whole += "".join(choice["delta"].get("content", "") for choice in choices)
    tokens = [token for choice in choices for token in choice["draft_tokens"]]
    return choices, whole, tokens


@pytest.mark.parametrize("runs", [(1,), (2,), (4,), (1, 3, 7)])
@pytest.mark.parametrize(
    "text", ["Plain words, one after another.", "naïve 🦙🦙 漢字 and more", "<mm:think>why</mm:think>because 🦙"]
)
def test_texts_are_the_answer_and_depths_are_the_trees(text, runs):
    mode = {"thinking_mode": "adaptive"} if "think" in text else {}
    ids = TOKENIZER.encode(text, allow_special=True)
    _, whole, tokens = stream(text, runs, **mode)
    assert whole == text.replace("<mm:think>", "").replace("</mm:think>", "")
    assert "".join(token["text"] for token in tokens) == whole
    expected, turn = [0], 0
    while len(expected) < len(ids):
        size, turn = runs[turn % len(runs)], turn + 1
        expected += [*range(1, size), 0]
    assert [token["depth"] for token in tokens] == expected[: len(ids)]
    if text.isascii() and not mode:
        assert [token["text"] for token in tokens] == [TOKENIZER.decode([token]) for token in ids]


def test_a_chunk_has_the_tokens_of_its_text():
    choices, _, _ = stream("Plain words, one after another.")
    assert sum(bool(choice["delta"].get("content")) for choice in choices) > 2
    for choice in choices:
        assert "".join(token["text"] for token in choice["draft_tokens"]) == choice["delta"].get("content", "")


@pytest.mark.parametrize("stop", ["after", "fter a", "one"])
def test_a_stop_string_cuts_its_token(stop):
    text = "Plain words, one after another."
    _, whole, tokens = stream(text, stop=stop)
    assert whole == text[: text.index(stop)] == "".join(token["text"] for token in tokens)


def test_text_that_comes_before_its_token_waits_for_it():
    cut = DraftTokens()
    cut.add(Delta(["ab"], [1], [0], [0], []))
    assert cut.take("ab", False) == [{"text": "ab", "depth": 0}]
    cut.add(Delta(["c"], [], [], [], []))
    assert cut.take("c", False) == []
    cut.add(Delta(["d"], [2], [2], [3], []))
    assert cut.take("d", False) == [{"text": "cd", "depth": 3}]
    cut.add(Delta([], [3], [4], [1], []))
    assert cut.take("", False) == [] and cut.take("", True) == [{"text": "", "depth": 1}]


def test_only_when_asked_for():
    response = ask(service(saying("word")), CHAT, messages=USER, stream=True)
    assert "draft_tokens" not in response.text
    for body, named in (({}, "stream"), ({"stream": True, "tools": True}, "tools")):
        if "tools" in body:
            body = {**body, "tools": [{"type": "function", "function": {"name": "f"}}]}
        response = ask(service(saying("word")), CHAT, messages=USER, draft_tokens=True, **body)
        assert response.status_code == 400 and response.json()["error"]["param"] == "draft_tokens"
        assert named in response.json()["error"]["message"]
