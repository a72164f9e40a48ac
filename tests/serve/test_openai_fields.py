"""Every field that the installed `openai` package can send: it works, or is refused with a 400 that names it."""

import typing

import openai
import pytest
from openai.types import chat as chat_types
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from tests.serve.fake_engine import saying, service
from tests.serve.http_client import serving

MESSAGES = [{"role": "user", "content": "Hi"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}, "strict": True}}


def works(value, seen=None, **rest):
    """`seen`: what the engine was then asked for, as (attribute of the parameters, value)."""
    return {"value": value, "seen": seen, "refused": None, "rest": rest}


def refused(value, param=None):
    return {"value": value, "seen": None, "refused": param or True, "rest": {}}


BOTH = {
    "frequency_penalty": [works(0.5, ("frequency_penalty", 0.5))],
    "logit_bias": [works({"7": 3}, ("logit_bias", {7: 3.0}))],
    "max_tokens": [works(5, ("max_tokens", 5))],
    "model": [works("fake")],
    "n": [works(2)],
    "presence_penalty": [works(-0.5, ("presence_penalty", -0.5))],
    "seed": [works(11, ("seed", 11))],
    "stop": [works("x"), works(["x", "[e~["], ("stop_token_ids", (2,)))],
    "stream": [works(False)],
    "stream_options": [refused({"include_usage": True}), works({"include_obfuscation": False}, stream=True)],
    "temperature": [works(0.25, ("temperature", 0.25))],
    "top_p": [works(0.5, ("top_p", 0.5))],
    "user": [works("ann")],
}
CHAT = BOTH | {
    "audio": [refused({"voice": "alloy", "format": "wav"})],
    "function_call": [refused("auto")],
    "functions": [refused([{"name": "f"}])],
    "logprobs": [works(True, ("logprobs", 0))],
    "max_completion_tokens": [works(6, ("max_tokens", 6))],
    "messages": [works(MESSAGES)],
    "metadata": [works({"a": "b"})],
    "modalities": [works(["text"]), refused(["text", "audio"], "modalities[1]")],
    "moderation": [refused({"model": "x"})],
    "parallel_tool_calls": [works(True), works(False, tools=TOOLS)],
    "prediction": [refused({"type": "content", "content": "x"})],
    "prompt_cache_key": [works("k")],
    "prompt_cache_options": [refused({"mode": "explicit"})],
    "prompt_cache_retention": [refused("24h")],
    "reasoning_effort": [works("none"), refused("high")],
    "response_format": [works({"type": "text"}), works({"type": "json_object"}), works(FORMAT)],
    "safety_identifier": [works("ann")],
    "service_tier": [works("auto"), refused("flex")],
    "store": [works(False), refused(True)],
    "tool_choice": [works("none"), works("required", tools=TOOLS), works("auto", tools=TOOLS)]
    + [works({"type": "function", "function": {"name": "f"}}, tools=TOOLS)]
    + [refused({"type": "custom", "custom": {"name": "f"}}, "tool_choice.type")],
    "tools": [works(TOOLS), refused([{"type": "custom", "custom": {"name": "f"}}], "tools[0].type")],
    "top_logprobs": [works(2, ("logprobs", 2), logprobs=True)],
    "verbosity": [refused("low"), works("medium")],
    "web_search_options": [refused({})],
}
COMPLETIONS = BOTH | {
    "best_of": [works(2, ("logprobs", 0))],
    "echo": [works(True), works(True, ("prompt_logprobs", True), logprobs=1)],
    "logprobs": [works(2, ("logprobs", 2))],
    "prompt": [works("x"), works([5, 6]), works(["x", "y"]), works([[5], [6, 7]])],
    "suffix": [refused("x")],
}
CALL = {"role": "assistant", "tool_calls": [{"id": "a", **TOOLS[0], "function": {"name": "f", "arguments": "{}"}}]}
# Each kind of message and of content part, by the class that describes it.
MESSAGE_CASES = {
    "ChatCompletionDeveloperMessageParam": works({"role": "developer", "content": "x"}),
    "ChatCompletionSystemMessageParam": works({"role": "system", "content": [{"type": "text", "text": "x"}]}),
    "ChatCompletionUserMessageParam": works({"role": "user", "content": "x"}),
    "ChatCompletionAssistantMessageParam": works({"role": "assistant", "content": "x", "refusal": None}),
    "ChatCompletionToolMessageParam": works({"role": "tool", "content": "x", "tool_call_id": "a"}, before=[CALL]),
    "ChatCompletionFunctionMessageParam": refused(
        {"role": "function", "content": "x", "name": "f"}, "messages[0].role"
    ),
}
PART_CASES = {
    "ChatCompletionContentPartTextParam": works({"type": "text", "text": "x"}),
    "ChatCompletionContentPartImageParam": refused(
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}, "messages[0].content[0].image_url"
    ),
    "ChatCompletionContentPartInputAudioParam": refused(
        {"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}}, "messages[0].content[0].type"
    ),
    "File": refused({"type": "file", "file": {"file_id": "x"}}, "messages[0].content[0].type"),
}


def fields(*types):
    return set().union(*(typing.get_type_hints(each) for each in types))


def test_the_tables_hold_every_field():
    chat = (chat_create_params.CompletionCreateParamsNonStreaming, chat_create_params.CompletionCreateParamsStreaming)
    assert set(CHAT) == fields(*chat)
    completions = (
        completion_create_params.CompletionCreateParamsNonStreaming,
        completion_create_params.CompletionCreateParamsStreaming,
    )
    assert set(COMPLETIONS) == fields(*completions)
    assert set(MESSAGE_CASES) == {
        each.__name__ for each in typing.get_args(chat_types.ChatCompletionMessageParam) if isinstance(each, type)
    }
    assert set(PART_CASES) == {each.__name__ for each in typing.get_args(chat_types.ChatCompletionContentPartParam)}


@pytest.fixture(scope="module")
def client():
    made = service(saying("Hello there"))
    with serving(made) as url:
        yield openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=30), made.engine.engine


def check(client, create, body, case, name):
    engine = client[1]
    if case["refused"]:
        with pytest.raises(openai.BadRequestError) as caught:
            create(**body)
        param = name if case["refused"] is True else case["refused"]
        assert caught.value.param == param and param in caught.value.message
        return
    answer = create(**body)
    for _ in answer if body.get("stream") else ():
        pass
    if case["seen"] is not None:
        attribute, value = case["seen"]
        assert getattr(engine.seen[-1].params, attribute) == value


@pytest.mark.parametrize("name", CHAT)
def test_chat(client, name):
    for case in CHAT[name]:
        body = {"model": "fake", "messages": MESSAGES, **case["rest"], name: case["value"]}
        check(client, client[0].chat.completions.create, body, case, name)


@pytest.mark.parametrize("name", COMPLETIONS)
def test_completions(client, name):
    for case in COMPLETIONS[name]:
        body = {"model": "fake", "prompt": "x", **case["rest"], name: case["value"]}
        check(client, client[0].completions.create, body, case, name)


def test_null_is_not_given(client):
    """Some clients send all fields that there are."""
    for create, body, required in (
        (client[0].chat.completions.create, {"messages": MESSAGES}, CHAT),
        (client[0].completions.create, {"prompt": "x"}, COMPLETIONS),
    ):
        nulls = dict.fromkeys(set(required) - set(body) - {"model"})
        assert create(model="fake", **body, extra_body=nulls).choices


@pytest.mark.parametrize("name", [*MESSAGE_CASES, *PART_CASES])
def test_messages(client, name):
    case = MESSAGE_CASES.get(name) or PART_CASES[name]
    message = case["value"] if name in MESSAGE_CASES else {"role": "user", "content": [case["value"]]}
    messages = [*case["rest"].get("before", []), message]
    check(client, client[0].chat.completions.create, {"model": "fake", "messages": messages}, case, name)


def test_fields_of_ours(client):
    """Through `extra_body`, as other servers name them."""
    params = {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2, "min_tokens": 2, "stop_token_ids": (9,)}
    extra = {**params, "stop_token_ids": [9], "ignore_eos": True, "priority": 3}
    for create, body in (
        (client[0].chat.completions.create, {"messages": MESSAGES}),
        (client[0].completions.create, {"prompt": "x"}),
    ):
        create(model="fake", extra_body={"top_k": -1}, **body)
        assert client[1].seen[-1].params.top_k == 0
        create(model="fake", max_tokens=5, extra_body=extra, **body)
        request = client[1].seen[-1]
        assert {name: getattr(request.params, name) for name in params} == params
        assert request.params.ignore_eos and request.priority == 3
        with pytest.raises(openai.BadRequestError) as caught:
            create(model="fake", extra_body={"top_kk": 5}, **body)
        assert caught.value.param == "top_kk"
