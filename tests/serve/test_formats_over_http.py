"""Answers with a form over HTTP, speculation on and off, alone and crowded, streamed and not: equal field by field.

The drafts follow the plain answers and lie in between, so forbidden tokens stand in the verified trees.
"""

import json

import jsonschema
import pytest

from serve.load import EngineOptions, load_engine
from serve.server import make_service
from serve.tool_calls import NAMESPACE
from serve.tree import TreeConfig
from tests.serve.comparison import CHAT, COMPLETIONS, Way, ask_all, bundled_pair
from tests.serve.fake_engine import tokenizer
from tests.serve.http_client import ask
from tests.serve.test_grammar import PERSON, WEATHER, tool

CLOSE, NAMESPACE_ID = str(tokenizer().special["</mm:think>"]), str(tokenizer().special[NAMESPACE])
PERSON_FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
TOOLS = [tool(WEATHER, name="weather"), tool({"type": "object", "properties": {"q": {"type": "string"}}}, name="find")]
LOOSE = [tool(WEATHER, strict=None, name="weather")]
CHOICE = {"type": "function", "function": {"name": "weather"}}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [CHOICE]}}


def user(text, **body):
    return CHAT, {"messages": [{"role": "user", "content": text}], "max_tokens": 75, **body}


WITH_JSON = [
    user("Describe a person.", response_format=PERSON_FORMAT, temperature=0),
    user("Describe two people.", response_format=PERSON_FORMAT, seed=3, n=2, logprobs=True, top_logprobs=2),
    user("Who?", response_format=PERSON_FORMAT, seed=4, presence_penalty=0.5, logit_bias={"300": 5, "50": -100}),
    user("Think of one.", response_format=PERSON_FORMAT, seed=6, thinking_mode="enabled", logit_bias={CLOSE: 14}),
    user("As you like.", response_format=PERSON_FORMAT, seed=7, thinking_mode="adaptive", logit_bias={CLOSE: 14}),
]
WITH_CALLS = [
    user("How is the weather?", tools=LOOSE, tool_choice=CHOICE, temperature=0),
    user("How is it in Rome?", tools=TOOLS[:1], tool_choice="required", parallel_tool_calls=False, seed=3),
    user("And in Oslo?", tools=TOOLS, tool_choice=ALLOWED, parallel_tool_calls=False, seed=5, min_p=0.01),
    # It is free to call, and does.
    user("Do call.", tools=TOOLS[:1], parallel_tool_calls=False, seed=4, logit_bias={NAMESPACE_ID: 30}),
    user("Think of rain.", tools=TOOLS, tool_choice=CHOICE, seed=2, thinking_mode="enabled", logit_bias={CLOSE: 14}),
]
OTHERS = [
    user("Some object?", response_format={"type": "json_object"}, temperature=0),
    user("Perhaps.", tools=TOOLS, seed=1),
    user("Either.", tools=TOOLS, response_format=PERSON_FORMAT, seed=1),
    user("Not now.", tools=TOOLS, tool_choice="none", seed=1),
    (COMPLETIONS, {"prompt": ["A cat", "Two dogs"], "echo": True, "logprobs": 2, "seed": 2, "max_tokens": 20}),
]
REQUESTS = [*WITH_JSON, *WITH_CALLS, *OTHERS]
WAYS = [
    Way(TreeConfig.chain(4), 1.0, crowded=True, stream=True),
    Way(TreeConfig(4, 3, 14), 0.67, crowded=True, stream=False),
]


@pytest.fixture(scope="module")
def bundled():
    return bundled_pair(REQUESTS, pages=256)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_speculation_changes_no_field(bundled, way):
    pair, expected = bundled
    pair.check(way, REQUESTS, expected, pages=256)


def check(answers):
    """The choices of WITH_JSON and WITH_CALLS keep to their schemas."""
    for (_, body), answer in zip(WITH_JSON + WITH_CALLS, answers, strict=False):
        for choice in answer["choices"]:
            message = choice["message"]
            if "tools" not in body:
                assert choice["finish_reason"] == "stop"
                jsonschema.validate(json.loads(message["content"]), PERSON)
            else:
                assert (choice["finish_reason"], message["content"]) == ("tool_calls", None)
                (call,) = message["tool_calls"]
                assert (call["type"], call["function"]["name"]) == ("function", "weather")
                jsonschema.validate(json.loads(call["function"]["arguments"]), WEATHER)
            assert body.get("thinking_mode") == "enabled" or not message.get("reasoning_content")


def test_answers_keep_to_their_schemas(bundled):
    check(bundled[1])


def test_the_bundled_draft_is_accepted_under_a_grammar():
    """Greedy and sampled, more than one token a step, as `usage` says."""
    engine, made, description = load_engine(EngineOptions(device="cpu", pages=256))
    responses = ask_all(make_service(engine, made, description), WITH_JSON + WITH_CALLS, crowded=True)
    answers = [response.json() for response in responses]
    check(answers)
    for answer in answers:
        details = answer["usage"]["completion_tokens_details"]
        assert details["accepted_prediction_tokens"] > 0
    stats = engine.stats()
    assert stats["acceptance_length"] > 1.5
    assert stats["pages_free"] + stats["pages_cached"] == stats["pages_total"]


def test_not_where_acceptance_is_synthetic():
    engine, made, description = load_engine(EngineOptions(device="cpu", pages=64, synthetic_acceptance=2.0))
    path, body = WITH_JSON[0]
    response = ask(make_service(engine, made, description), path, **body)
    assert response.status_code == 400 and response.json()["error"]["param"] == "response_format"
