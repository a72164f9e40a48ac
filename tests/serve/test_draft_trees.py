"""The field `draft_trees` of streamed chats: every verified tree once, with the path that became part of the answer."""

import asyncio
import json

import pytest

from serve.engine import Engine
from serve.request import Request, SamplingParams
from serve.tree import TreeConfig
from tests.serve.comparison import Pair, Way
from tests.serve.drafts import random_draft
from tests.serve.fake_engine import DRAFTED, saying, service, tokenizer
from tests.serve.http_client import ask, chunks, client
from tests.serve.known_target import Following, known_target

TOKENIZER = tokenizer()
CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "x"}]
LETTERS = [token for token in range(TOKENIZER.vocab_size) if TOKENIZER.token_bytes(token).isalpha()][:40]
START = TOKENIZER.render_chat(USER, thinking_mode="disabled")[-1]


def choices_of(response):
    assert response.status_code == 200, response.text
    return [choice for chunk in chunks(response) for choice in chunk["choices"]]


def stream(made, **body):
    return choices_of(ask(made, CHAT, messages=USER, stream=True, draft_trees=True, **body))


@pytest.fixture(scope="module")
def pair():
    following = Following.chain(LETTERS, starts=(START,))
    return Pair(known_target(following), following.script)


@pytest.mark.parametrize("tree", [TreeConfig.chain(4), TreeConfig(4, 3, 14)], ids=str)
@pytest.mark.parametrize("stop", [None, TOKENIZER.decode(LETTERS[5:7])])
def test_accepted_paths_join_to_the_answer(pair, tree, stop):
    """The paths of all trees, each followed by the root of the next, are the answer; nothing behind its end."""
    made = pair.service(Way(tree, 0.7, crowded=False, stream=True))
    choices = stream(made, temperature=0, max_tokens=30, stop=stop)
    text = "".join(choice["delta"].get("content", "") for choice in choices)
    trees = [entry for choice in choices for entry in choice["draft_trees"]]
    said = ""
    for entry in trees:
        tokens, parents = entry["tokens"], entry["parents"]
        assert len(tokens) == len(parents) and parents[0] == -1
        assert all(parent < node for node, parent in enumerate(parents))
        assert [parents[node] for node in entry["accepted"]] == [0, *entry["accepted"]][: len(entry["accepted"])]
        said += tokens[0] + "".join(tokens[node] for node in entry["accepted"])
    whole = text + (stop or "")
    assert whole.startswith(said) and len(said) >= len(whole) - 1  # the last token may be the target's own
    totals = made.metrics.totals
    assert len(trees) == totals.steps and sum(len(entry["accepted"]) for entry in trees) == totals.accepted
    assert sum(len(entry["tokens"]) - 1 for entry in trees) == totals.drafted


def test_every_choice_has_its_own_and_text_need_not_come():
    """A text held back for a stop string sends no chunk; its trees come with the next."""
    text = "Plain words, one after another."
    choices = stream(service(saying(text)), n=2, stop=text + "!")
    for index in (0, 1):
        mine = [choice for choice in choices if choice["index"] == index]
        trees = [entry for choice in mine for entry in choice["draft_trees"]]
        assert len(trees) == -(-len(TOKENIZER.encode(text)) // 4)
        assert all(len(entry["tokens"]) == DRAFTED + 1 for entry in trees)


def test_parts_of_a_character_have_a_sign():
    choices = stream(service(saying("🦙🦙🦙")))
    texts = [token for choice in choices for entry in choice["draft_trees"] for token in entry["tokens"]]
    assert "\ufffd" in texts


def test_only_when_asked_for():
    async def run():
        async with client(service(saying("word"))) as http:
            plain = await http.post(CHAT, json={"messages": USER, "stream": True})
            assert "draft_trees" not in plain.text
            refused = await http.post(CHAT, json={"messages": USER, "draft_trees": True})
            assert refused.status_code == 400 and refused.json()["error"]["param"] == "draft_trees"
            tools = [{"type": "function", "function": {"name": "f"}}]
            body = {"messages": USER, "stream": True, "draft_trees": True, "tools": tools}
            assert all("draft_trees" in choice for choice in choices_of(await http.post(CHAT, json=body)))

    asyncio.run(run())


def test_updates_carry_what_was_verified(pair):
    engine = Engine(pair.target, random_draft(pair.target), TreeConfig(3, 2, 6))
    engine.add(Request("a", [START], SamplingParams(temperature=0, max_tokens=8)))
    updates = []
    while engine.has_work():
        updates += engine.step()
    assert updates[0].verified is None
    for update in updates[1:]:
        assert len(update.verified.tree) == update.step.drafted + 1
        assert len(update.verified.path) >= update.step.accepted
        json.dumps(update.verified.tree.tokens)
