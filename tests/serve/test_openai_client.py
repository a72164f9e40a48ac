"""The `openai` package against a real server on loopback: sync, async, streaming, tools, reasoning."""

import asyncio
import json

import httpx
import openai
import pydantic
import pytest

from tests.serve.fake_engine import FakeEngine, saying, service, tokenizer
from tests.serve.http_client import serving

TOKENIZER = tokenizer()
NS = "]<]minimax[>["
CALLS = (
    f'Let me see.{NS}<tool_call>\n{NS}<invoke name="weather">{NS}<city>Paris{NS}</city>{NS}<days>3{NS}</days>'
    f"{NS}</invoke>\n"
    f'{NS}<invoke name="weather">{NS}<city>Oslo{NS}</city>{NS}</invoke>\n{NS}</tool_call>'
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
        },
    }
]
USER = [{"role": "user", "content": "How is it?"}]


def answers(request):
    """Depends on how the prompt ends: thinking or not, tools or not."""
    prompt = TOKENIZER.decode(request.prompt_ids)
    text = CALLS if "# Tools" in prompt else f"Hello number {request.choice_index}!"
    thought = "I think.</mm:think>" if prompt.endswith("<mm:think>") else ""
    return [*TOKENIZER.encode(thought + text, allow_special=True), *TOKENIZER.eos_ids]


@pytest.fixture(scope="module")
def url():
    with serving(service(FakeEngine(answers, runs=(3, 5)))) as url:
        yield f"{url}/v1"


@pytest.fixture(scope="module")
def sync(url):
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=30)


def test_models(sync):
    assert [model.id for model in sync.models.list()] == ["fake"]
    assert sync.models.retrieve("fake").id == "fake"


def test_completion(sync):
    answer = sync.completions.create(model="fake", prompt=["a", "b"], n=2, logprobs=1, max_tokens=50)
    assert [choice.text for choice in answer.choices] == ["Hello number 0!", "Hello number 1!"] * 2
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    for choice in answer.choices:
        assert "".join(choice.logprobs.tokens) == choice.text
        assert len(choice.logprobs.top_logprobs) == len(choice.logprobs.token_logprobs)
    assert answer.usage.prompt_tokens == 2
    assert answer.usage.completion_tokens == sum(len(choice.logprobs.tokens) + 1 for choice in answer.choices)


def test_echo_and_best_of(sync):
    answer = sync.completions.create(model="fake", prompt="Ask: ", echo=True, best_of=3, max_tokens=50)
    assert len(answer.choices) == 1
    assert answer.choices[0].text.startswith("Ask: Hello number ")
    assert answer.choices[0].logprobs is None
    streamed = sync.completions.create(model="fake", prompt="Ask: ", echo=True, max_tokens=50, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == "Ask: Hello number 0!"


def test_best_of_takes_the_likelier_answer():
    """The scripted log-probability of a token falls with its id."""

    def script(request):
        return [100 + 10 * ((request.choice_index + 1) % 3), 2]

    with serving(service(FakeEngine(script))) as url:
        body = {"prompt": "x", "best_of": 3, "n": 2}
        choices = httpx.post(f"{url}/v1/completions", json=body).json()["choices"]
    assert [choice["text"] for choice in choices] == [TOKENIZER.decode([100]), TOKENIZER.decode([110])]


def test_chat(sync):
    answer = sync.chat.completions.create(model="fake", messages=USER, n=2, logprobs=True, top_logprobs=2, user="ann")
    assert [choice.message.content for choice in answer.choices] == ["Hello number 0!", "Hello number 1!"]
    assert {choice.finish_reason for choice in answer.choices} == {"stop"}
    content = answer.choices[1].logprobs.content
    assert "".join(entry.token for entry in content) == "Hello number 1!"
    assert all(len(entry.top_logprobs) == 2 for entry in content)
    details = answer.usage.completion_tokens_details
    assert details.accepted_prediction_tokens > 0
    assert details.accepted_prediction_tokens + details.rejected_prediction_tokens > details.accepted_prediction_tokens


def test_reasoning(sync):
    for mode, reasoning in (("enabled", "I think."), ("disabled", None)):
        options = {"extra_body": {"thinking_mode": mode}}
        message = sync.chat.completions.create(model="fake", messages=USER, **options).choices[0].message
        assert message.content == "Hello number 0!"
        assert getattr(message, "reasoning_content", None) == reasoning
    usage = sync.chat.completions.create(
        model="fake", messages=USER, extra_body={"chat_template_kwargs": {"thinking_mode": "enabled"}}
    ).usage
    assert usage.completion_tokens_details.reasoning_tokens == len(TOKENIZER.encode("I think."))


def test_streamed_chat(sync):
    stream = sync.chat.completions.create(
        model="fake", messages=USER, n=2, stream=True, stream_options={"include_usage": True}, logprobs=True
    )
    texts, finish, entries, usage, roles = ["", ""], [None, None], [0, 0], None, []
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            roles.append(choice.delta.role)
            texts[choice.index] += choice.delta.content or ""
            finish[choice.index] = choice.finish_reason or finish[choice.index]
            entries[choice.index] += len(choice.logprobs.content) if choice.logprobs else 0
    assert texts == ["Hello number 0!", "Hello number 1!"]
    assert finish == ["stop", "stop"]
    assert roles.count("assistant") == 2
    assert usage.completion_tokens == sum(entries) + 2


def test_streamed_reasoning(sync):
    parts = {"content": "", "reasoning_content": ""}
    for chunk in sync.chat.completions.create(
        model="fake", messages=USER, stream=True, extra_body={"thinking_mode": "enabled"}
    ):
        for name in parts:
            parts[name] += getattr(chunk.choices[0].delta, name, None) or ""
    assert parts == {"content": "Hello number 0!", "reasoning_content": "I think."}


EXPECTED = [("weather", {"city": "Paris", "days": 3}), ("weather", {"city": "Oslo"})]


def test_tools_and_their_results(sync):
    answer = sync.chat.completions.create(model="fake", messages=USER, tools=TOOLS)
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see."
    calls = choice.message.tool_calls
    assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == EXPECTED
    assert len({call.id for call in calls}) == 2
    # The answer goes back as it came, results in another order than the calls.
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": name} for call, name in zip(calls, "PO", strict=True)
    ]
    history = [*USER, choice.message, *reversed(results)]
    assert sync.chat.completions.create(model="fake", messages=history).choices[0].message.content == "Hello number 0!"


class Weather(pydantic.BaseModel):
    city: str
    days: int = 1


def test_what_the_client_parsed_goes_back(sync):
    """Its helpers add fields of their own to messages and calls, filled or not."""
    tools = [openai.pydantic_function_tool(Weather, name="weather")]
    with sync.chat.completions.stream(model="fake", messages=USER, tools=tools) as stream:
        called = stream.get_final_completion().choices[0].message
    with sync.chat.completions.stream(model="fake", messages=USER) as stream:
        said = stream.get_final_completion().choices[0].message
    assert called.tool_calls[0].function.parsed_arguments.city == "Paris" and "parsed" in said.model_dump()
    results = [{"role": "tool", "tool_call_id": call.id, "content": "warm"} for call in called.tool_calls]
    for message in (called, called.model_dump()):
        history = [*USER, said, *USER, message, *results]
        assert sync.chat.completions.create(model="fake", messages=history).choices[0].message.content


def test_streamed_tools(sync):
    calls, content, finish = {}, "", None
    for chunk in sync.chat.completions.create(model="fake", messages=USER, tools=TOOLS, stream=True):
        choice = chunk.choices[0]
        content += choice.delta.content or ""
        finish = choice.finish_reason or finish
        for call in choice.delta.tool_calls or []:
            entry = calls.setdefault(call.index, {"id": call.id, "name": call.function.name, "arguments": ""})
            entry["arguments"] += call.function.arguments or ""
    assert (content, finish) == ("Let me see.", "tool_calls")
    assert [(call["name"], json.loads(call["arguments"])) for call in calls.values()] == EXPECTED
    assert all(call["id"].startswith("call_") for call in calls.values())


@pytest.mark.parametrize(
    ("reason", "options", "rest"),
    [
        ("length", {"max_tokens": len(TOKENIZER.encode(CALLS, allow_special=True)) - 12}, '{"city": "Oslo"'),
        ("stop", {"stop": "slo"}, ""),
    ],
)
def test_a_tool_call_cut_short_is_left_out(reason, options, rest):
    """By the length or by a stop string: a stream has begun it by then, so there it stays open; neither has markup."""
    with serving(service(FakeEngine(answers, runs=(4,)))) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=30)
        asked = {"model": "fake", "messages": USER, "tools": TOOLS, **options}
        choice = client.chat.completions.create(**asked).choices[0]
        chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, stream=True)]
    assert (choice.finish_reason, choice.message.content) == (reason, "Let me see.")
    assert [json.loads(call.function.arguments) for call in choice.message.tool_calls] == [EXPECTED[0][1]]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == "Let me see."
    calls = [call for chunk in chunks for call in chunk.delta.tool_calls or []]
    assert "".join(call.function.arguments for call in calls if call.index == 1) == rest
    assert chunks[-1].finish_reason == reason


def test_tools_that_must_not_be_called_are_not_offered(sync):
    answer = sync.chat.completions.create(model="fake", messages=USER, tools=TOOLS, tool_choice="none")
    assert answer.choices[0].message.content == "Hello number 0!"


def test_errors_are_the_clients_own(sync):
    with pytest.raises(openai.BadRequestError, match="top_p") as caught:
        sync.chat.completions.create(model="fake", messages=USER, top_p=2)
    assert caught.value.param == "top_p"
    with pytest.raises(openai.NotFoundError):
        sync.chat.completions.create(model="other", messages=USER)
    with pytest.raises(openai.BadRequestError, match="response_format"):
        wrong = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "text"}}}
        sync.chat.completions.create(model="fake", messages=USER, response_format=wrong)


def test_an_engine_that_dies_raises_in_the_stream():
    with serving(service(saying([50], end=False, fail_after=5))) as url:
        broken = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=30)
        stream = broken.chat.completions.create(model="fake", messages=USER, stream=True)
        with pytest.raises(openai.APIError, match="crashed"):
            list(stream)
        with pytest.raises(openai.InternalServerError):
            broken.chat.completions.create(model="fake", messages=USER)


def test_many_at_once_with_the_async_client(url):
    async def run():
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=30) as client:

            async def one(stream):
                answer = await client.chat.completions.create(model="fake", messages=USER, stream=stream)
                if not stream:
                    return answer.choices[0].message.content
                return "".join([chunk.choices[0].delta.content or "" async for chunk in answer])

            return await asyncio.gather(*[one(index % 2 == 0) for index in range(24)])

    assert set(asyncio.run(run())) == {"Hello number 0!"}


def test_a_stream_left_early_is_closed(url, sync):
    with sync.chat.completions.create(model="fake", messages=USER, stream=True) as stream:
        next(iter(stream))
    assert sync.models.list().data
