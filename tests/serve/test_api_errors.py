"""What a 400 says: the field that is wrong in what was meant, whatever else the field could have been."""

import json

import pytest

from serve.api_errors import ApiError, parse_body
from serve.openai_types import ChatRequest, CompletionRequest

TOOL = {"type": "function", "function": {"name": "f"}}
USER = {"role": "user", "content": "Hi"}


def chat(**body):
    return ChatRequest, {"messages": [USER], **body}


def message(**body):
    return ChatRequest, {"messages": [body]}


def part(**body):
    return message(role="user", content=[body])


def choice(**body):
    return chat(tools=[TOOL], tool_choice=body)


def form(**body):
    return chat(response_format=body)


def prompt(value):
    return CompletionRequest, {"prompt": value}


@pytest.mark.parametrize(
    ("request_", "told"),
    [
        (prompt([1, "x"]), "prompt[1]: Input should be a valid integer"),
        (prompt(["x", 5]), "prompt[1]: Input should be a valid string"),
        (prompt([[1], "x"]), "prompt[1]: Input should be a valid array"),
        (prompt([-1]), "prompt[0]: Input should be greater than or equal to 0"),
        (prompt(5), "prompt: Input should be a string, a list of strings, token ids or a list of lists of them"),
        (chat(stop=["x"] * 17), "stop: List should have at most 16 items after validation, not 17"),
        (chat(stop=5), "stop: Input should be a string or a list of strings"),
        (chat(logit_bias={"str": 200}), "logit_bias.str: Input should be less than or equal to 100"),
        (message(role="user", content=5), "messages[0].content: Input should be a string or a list of parts"),
        (message(role="user", tool_calls=5), "messages[0].tool_calls: only with role assistant"),
        (message(role="system", reasoning=5), "messages[0].reasoning: only with role assistant"),
        (message(role="assistant", tool_call_id=5), "messages[0].tool_call_id: only with role tool"),
        (
            message(role="system", content=[{"type": "video_url", "video_url": 5}]),
            "messages[0].content: pictures and videos only with the roles user and tool",
        ),
        (
            message(role="robot", content=[{"type": "text", "text": 5}]),
            "messages[0].role: Input should be 'root', 'system', 'developer', 'user', 'assistant' or 'tool'",
        ),
        (
            message(role="assistant", tool_calls=[{"type": "custom", "function": {"name": 5}}]),
            "messages[0].tool_calls[0].type: Input should be 'function'",
        ),
        (part(type="text", text=5), "messages[0].content[0].text: Input should be a valid string"),
        (part(type="text", text="x", image_url={"ur": 5}), "messages[0].content[0].image_url: not with type text"),
        (part(type="image_url", text=5), "messages[0].content[0].image_url: is missing"),
        (
            part(type="image", image_url={"url": 5}),
            "messages[0].content[0].type: Input should be 'text', 'image_url' or 'video_url'",
        ),
        (chat(tools=[{"type": "custom", "function": {"name": 5}}]), "tools[0].type: Input should be 'function'"),
        (chat(tools=[TOOL], tool_choice=5), "tool_choice: Input should be 'auto', 'none', 'required' or an object"),
        (choice(type="allowed_tools", function={"name": 5}), "tool_choice.allowed_tools: is missing"),
        (choice(**TOOL, allowed_tools={}), "tool_choice.allowed_tools: not with type function"),
        (
            choice(type="custom", function={"name": 5}),
            "tool_choice.type: Input should be 'function' or 'allowed_tools'",
        ),
        (
            choice(type="allowed_tools", allowed_tools={"mode": "any", "tools": [TOOL]}),
            "tool_choice.allowed_tools.mode: Input should be 'auto' or 'required'",
        ),
        (form(type="text", json_schema={"name": 5}), "response_format.json_schema: not with type text"),
        (form(type="json_schema"), "response_format.json_schema: is missing"),
        (
            form(type="xml", json_schema={"name": 5}),
            "response_format.type: Input should be 'text', 'json_object' or 'json_schema'",
        ),
    ],
    ids=lambda case: json.dumps(case[1])[:80] if isinstance(case, tuple) else "",
)
def test_the_fault_is_named_in_what_was_meant(request_, told):
    model, body = request_
    with pytest.raises(ApiError) as caught:
        parse_body(model, json.dumps(body).encode())
    assert caught.value.message == told and caught.value.param == told.split(":")[0]


def test_what_is_null_is_not_there():
    nothing = {"image_url": None, "video_url": None}
    parse_body(ChatRequest, json.dumps(part(type="text", text="x", **nothing)[1]).encode())
