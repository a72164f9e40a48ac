"""Bad, huge and edge-case requests: an error that names the field, and a server that goes on as before."""

import asyncio
import json

from tests.serve.fake_engine import FakeEngine, saying, service, tokenizer
from tests.serve.http_client import client

TOKENIZER = tokenizer()
USER = [{"role": "user", "content": "Hi"}]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
CONTEXT = 256


def chat(**body):
    return CHAT, json.dumps({"messages": USER, **body})


def completion(**body):
    return COMPLETIONS, json.dumps({"prompt": "x", **body})


def raw(path, text):
    return path, text


def tool(properties):
    """A strict tool."""
    function = {"name": "g", "strict": True, "parameters": {"type": "object", "properties": properties}}
    return {"type": "function", "function": function}


def schema(content):
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": content}}


TOOL = {"type": "function", "function": {"name": "f"}}
REFUSED = [
    (chat(max_tokens=-1), 400, "max_tokens"),
    (chat(max_tokens=0), 400, "max_tokens"),
    (chat(max_tokens=1.5), 400, "max_tokens"),
    (chat(max_tokens="8"), 400, "max_tokens"),
    (chat(max_tokens=True), 400, "max_tokens"),
    (chat(max_tokens=5, max_completion_tokens=6), 400, "max_completion_tokens"),
    (chat(temperature="hot"), 400, "temperature"),
    (raw(CHAT, '{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}'), 400, "temperature"),
    (raw(CHAT, '{"messages": [{"role": "user", "content": "x"}], "temperature": 1e400}'), 400, "temperature"),
    (chat(temperature=-0.1), 400, "temperature"),
    (chat(temperature=2.1), 400, "temperature"),
    (chat(top_p=0), 400, "top_p"),
    (chat(top_p=1.1), 400, "top_p"),
    (chat(top_k=-2), 400, "top_k"),
    (chat(min_p=2), 400, "min_p"),
    (chat(repetition_penalty=0), 400, "repetition_penalty"),
    (chat(presence_penalty=3), 400, "presence_penalty"),
    (chat(n=0), 400, "n"),
    (chat(n=10_000), 400, "n"),
    (chat(seed=2**64), 400, "seed"),
    (chat(seed="7"), 400, "seed"),
    (chat(min_tokens=9, max_tokens=8), 400, "min_tokens"),
    (chat(logprobs=True, top_logprobs=10**6), 400, "top_logprobs"),
    (chat(top_logprobs=2), 400, "top_logprobs"),
    (completion(logprobs=10**6), 400, "logprobs"),
    (chat(stop=["x"] * 1000), 400, "stop"),
    (chat(stop=""), 400, "stop"),
    (chat(stop=["a", ""]), 400, "stop[1]"),
    (chat(stop=["a[e~["]), 400, "stop"),
    (chat(stop_token_ids=[-1]), 400, "stop_token_ids[0]"),
    (chat(logit_bias={"x": 1}), 400, "logit_bias"),
    (chat(logit_bias={"5": 101}), 400, "logit_bias.5"),
    (chat(stream_options={"include_usage": True}), 400, "stream_options"),
    (chat(stream=True, stream_options={"include_obfuscation": True}), 400, "stream_options.include_obfuscation"),
    (chat(messages=[]), 400, "messages"),
    (chat(messages="Hi"), 400, "messages"),
    (raw(CHAT, "{}"), 400, "messages"),
    (chat(messages=[{"role": "robot", "content": "x"}]), 400, "messages[0].role"),
    (chat(messages=[{"role": "user", "content": None}]), 400, "messages[0].content"),
    (chat(messages=[{"role": "user", "content": 5}]), 400, "messages[0].content"),
    (chat(messages=[{"role": "user", "content": "x", "name": "Ann"}]), 400, "messages[0].name"),
    (chat(messages=[{"role": "user", "content": "x", "mood": 1}]), 400, "messages[0].mood"),
    (
        chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]),
        400,
        "messages[0].content[0].image_url",
    ),
    (
        chat(
            messages=[
                *USER,
                {"role": "user", "content": "x", "tool_calls": [{"function": {"name": "f", "arguments": ""}}]},
            ]
        ),
        400,
    )
    + ("messages[1].tool_calls",),
    (
        chat(messages=[*USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]),
        400,
        "messages[1].tool_calls[0].function.arguments",
    ),
    (
        chat(
            messages=[
                {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{}"}}]},
                {"role": "tool", "tool_call_id": "b", "content": "1"},
            ]
        ),
        400,
        "messages[1].tool_call_id",
    ),
    (chat(tools=[TOOL, tool({"v": {"type": "string", "format": "x"}})]), 400, "tools[1].function.parameters"),
    (chat(tools=[tool({"v": {"type": "integer", "not": {}}})]), 400, "tools[0].function.parameters"),
    (chat(tools=[tool({"v": {"type": "integer", "minimum": 2, "maximum": 1}})]), 400, "tools[0].function.parameters"),
    (chat(tools=[tool({"v": {"$ref": "#/$defs/x"}})]), 400, "tools[0].function.parameters"),
    (chat(tools=[tool({"v": {"type": "text"}})]), 400, "tools[0].function.parameters"),
    (chat(tools=[{"type": "custom", "custom": {"name": "f"}}]), 400, "tools[0].type"),
    (chat(tools=[TOOL, TOOL]), 400, "tools"),
    (chat(tools=[{"type": "function", "function": {"name": "has space"}}]), 400, "tools[0].function.name"),
    (chat(tool_choice="required"), 400, "tool_choice"),
    (chat(tools=[TOOL], tool_choice="any"), 400, "tool_choice"),
    (chat(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "g"}}), 400, "tool_choice"),
    (chat(tools=[TOOL], tool_choice={"type": "function"}), 400, "tool_choice.function"),
    (chat(tools=[TOOL], tool_choice={"type": "custom", "custom": {"name": "f"}}), 400, "tool_choice.type"),
    (chat(tools=[TOOL], tool_choice="required", ignore_eos=True), 400, "ignore_eos"),
    (chat(response_format={"type": "json_object"}, min_tokens=2), 400, "min_tokens"),
    (chat(response_format={"type": "json_object"}, tools=[TOOL], tool_choice="required"), 400, "response_format"),
    (
        chat(response_format=schema({}), tools=[TOOL], tool_choice={"type": "function", "function": {"name": "f"}}),
        400,
        "response_format",
    ),
    (chat(response_format={"type": "xml"}), 400, "response_format.type"),
    (chat(response_format={"type": "json_schema"}), 400, "response_format.json_schema"),
    (chat(response_format=schema({"type": "text"})), 400, "response_format.json_schema.schema"),
    (chat(response_format=schema({"not": {}})), 400, "response_format.json_schema.schema"),
    (chat(response_format=schema({"anyOf": [{"$ref": "#"}]})), 400, "response_format.json_schema.schema"),
    (chat(response_format=schema({"enum": []})), 400, "response_format.json_schema.schema"),
    (chat(response_format=schema({"type": "string", "pattern": "("})), 400, "response_format.json_schema.schema"),
    (chat(response_format=schema([])), 400, "response_format.json_schema.schema"),
    (chat(reasoning_effort="high"), 400, "reasoning_effort"),
    (chat(thinking_mode="on"), 400, "thinking_mode"),
    (chat(thinking_mode="enabled", reasoning_effort="none"), 400, "thinking_mode"),
    (chat(modalities=["text", "audio"]), 400, "modalities[1]"),
    (chat(store=True), 400, "store"),
    (chat(functions=[]), 400, "functions"),
    (chat(model="gpt-4"), 404, "model"),
    (completion(prompt=[]), 400, "prompt"),
    (completion(prompt=""), 400, "prompt"),
    (completion(prompt=5), 400, "prompt"),
    (completion(prompt=[[1], "x"]), 400, "prompt[1]"),
    (completion(prompt=["x"] * 200), 400, "prompt"),
    (completion(suffix="x"), 400, "suffix"),
    (completion(max_tokens=0), 400, "max_tokens"),
    (completion(best_of=1, n=2), 400, "best_of"),
    (completion(best_of=2, stream=True), 400, "best_of"),
    (raw(CHAT, '{"messages": [{"role": "user", "content": "\\ud800"}]}'), 400, "body"),
    (raw(CHAT, chat()[1][: len(chat()[1]) // 2]), 400, "body"),
    (raw(CHAT, ""), 400, "body"),
    (raw(CHAT, "[]"), 400, "body"),
    (raw(CHAT, "null"), 400, "body"),
    (raw(CHAT, b"\xff\xfe{}"), 400, "body"),
    (raw(COMPLETIONS, "[" * 100_000), 400, "body"),
]


def names(request):
    path, text = request
    return f"{path.split('/')[2]} {str(text)[:90]}"


def test_every_bad_request_is_refused_by_name():
    """Each is followed by a normal request, whose answer must not change."""

    async def run():
        made = service(saying("Hello there", context=CONTEXT))
        async with client(made) as http:
            normal = (await http.post(CHAT, content=chat(seed=1)[1])).json()["choices"]
            for (path, body), status, param in REFUSED:
                response = await http.post(path, content=body)
                assert response.status_code == status, (path, body, response.text)
                error = response.json()["error"]
                assert error["param"] == param, (body, error)
                assert set(error) == {"message", "type", "param", "code"}
                assert error["type"] == ("invalid_request_error" if status == 400 else "not_found_error")
                assert param in error["message"] or param == "body"
                again = await http.post(CHAT, content=chat(seed=1)[1])
                assert again.json()["choices"] == normal
        assert len(made.engine.engine.seen) == len(REFUSED) + 1

    asyncio.run(run())


def test_unknown_paths_and_methods():
    async def run():
        async with client(service(saying("x"))) as http:
            return await http.get("/v1/nothing"), await http.get(CHAT), await http.get("/v1/models/other")

    for response, status in zip(asyncio.run(run()), (404, 405, 404), strict=True):
        assert response.status_code == status
        assert response.json()["error"]["message"]


def test_more_requests_than_the_server_takes():
    async def run():
        made = service(FakeEngine(lambda request: [50], seconds=0.01), max_open=2)
        async with client(made) as http:
            posts = [http.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 60}) for _ in range(4)]
            return sorted([response.status_code for response in await asyncio.gather(*posts)])

    assert asyncio.run(run()) == [200, 200, 429, 429]
