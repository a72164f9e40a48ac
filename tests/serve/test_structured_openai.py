"""Structured output and tools through the `openai` package's own helpers, from the bundled target: valid, and the same
with speculation and without.
"""

import asyncio
import json

import openai
import pytest

from tests.interop.structured import QUESTION, Person, Weather, both_servers

MESSAGES = [{"role": "user", "content": QUESTION}]
OPTIONS = {"model": "m3-tiny", "messages": MESSAGES, "seed": 4, "max_tokens": 120}
TOOL = openai.pydantic_function_tool(Weather)


@pytest.fixture(scope="module")
def clients():
    with both_servers() as urls:
        yield [openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) for url in urls]


def same(clients, ask):
    """What both servers give, with the drafted tokens that became part of the first one's answer."""
    (speculating, accepted), (plain, none) = (ask(client) for client in clients)
    assert speculating == plain and accepted > 0 and none == 0
    return plain


def accepted(answer):
    return answer.usage.completion_tokens_details.accepted_prediction_tokens


def test_parse(clients):
    def ask(client):
        answer = client.chat.completions.parse(response_format=Person, **OPTIONS)
        return answer.choices[0].message.parsed, accepted(answer)

    assert isinstance(same(clients, ask), Person)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "Weather"}}])
def test_tools(clients, choice):
    def ask(client):
        answer = client.chat.completions.parse(
            tools=[TOOL], tool_choice=choice, parallel_tool_calls=False, temperature=0, **OPTIONS
        )
        (call,) = answer.choices[0].message.tool_calls
        return call.function.parsed_arguments, accepted(answer)

    assert isinstance(same(clients, ask), Weather)


def test_streamed(clients):
    """The helper puts the parts together as they come."""

    def ask(client):
        with client.chat.completions.stream(
            response_format=Person, stream_options={"include_usage": True}, **OPTIONS
        ) as stream:
            kinds = {event.type for event in stream}
            answer = stream.get_final_completion()
        assert {"content.delta", "content.done", "chunk"} <= kinds
        return answer.choices[0].message.parsed, accepted(answer)

    assert isinstance(same(clients, ask), Person)


def test_streamed_tools(clients):
    def ask(client):
        with client.chat.completions.stream(
            tools=[TOOL], tool_choice="required", stream_options={"include_usage": True}, **OPTIONS
        ) as stream:
            kinds = {event.type for event in stream}
            answer = stream.get_final_completion()
        assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
        calls = answer.choices[0].message.tool_calls
        return [call.function.parsed_arguments for call in calls], accepted(answer)

    calls = same(clients, ask)
    assert calls and all(isinstance(call, Weather) for call in calls)


def test_async_and_objects(clients):
    async def ask(client):
        client = openai.AsyncOpenAI(base_url=client.base_url, api_key="none", max_retries=0, timeout=60)
        answers = await asyncio.gather(
            *(
                client.chat.completions.create(
                    model="m3-tiny",
                    messages=[{"role": "user", "content": f"Settings number {number}?"}],
                    response_format={"type": "json_object"},
                    max_tokens=200,
                    seed=number,
                )
                for number in range(8)
            )
        )
        choices = [answer.choices[0] for answer in answers]
        return [(choice.message.content, choice.finish_reason) for choice in choices], sum(map(accepted, answers))

    answers = same(clients, lambda client: asyncio.run(ask(client)))
    whole = [text for text, reason in answers if reason == "stop"]
    assert whole and all(isinstance(json.loads(text), dict) for text in whole)
    assert all(text.startswith("{") for text, _ in answers)
