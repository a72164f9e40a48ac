"""LiteLLM and LangChain against servers of the bundled target: the same with speculation and without."""

import json
import os

import pytest

from tests.interop.structured import QUESTION, Person, Weather, both_servers

pytestmark = pytest.mark.slow
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the network for prices
MESSAGES = [{"role": "user", "content": QUESTION}]
SCHEMA = Weather.model_json_schema()
TOOL = {"type": "function", "function": {"name": "Weather", "strict": True, "parameters": SCHEMA}}


@pytest.fixture(scope="module")
def urls():
    with both_servers() as pair:
        yield [f"{url}/v1" for url in pair]


def same(urls, ask):
    speculating, plain = (ask(url) for url in urls)
    assert speculating == plain
    return plain


@pytest.fixture(scope="module")
def litellm():
    return pytest.importorskip("litellm", reason="litellm is not installed: pip install -e '.[interop-clients]'")


def options(url):
    return {"model": "openai/m3-tiny", "api_base": url, "api_key": "none", "max_tokens": 120, "seed": 3}


def test_litellm_chat_and_stream(litellm, urls):
    def ask(url):
        answer = litellm.completion(messages=MESSAGES, temperature=0.7, top_p=0.9, stop=["\n\n"], n=2, **options(url))
        details = answer.usage.completion_tokens_details
        assert details.accepted_prediction_tokens > 0 or url == urls[1]
        parts = litellm.completion(messages=MESSAGES, temperature=0.7, top_p=0.9, stream=True, **options(url))
        text = "".join(part.choices[0].delta.content or "" for part in parts)
        return [choice.message.content for choice in answer.choices], text

    texts, streamed = same(urls, ask)
    assert len(texts) == 2 and streamed.startswith(texts[0])


def test_litellm_structured_output_and_tools(litellm, urls):
    def ask(url):
        answer = litellm.completion(messages=MESSAGES, response_format=Person, **options(url))
        called = litellm.completion(messages=MESSAGES, tools=[TOOL], tool_choice="required", **options(url))
        calls = called.choices[0].message.tool_calls
        return answer.choices[0].message.content, [call.function.arguments for call in calls]

    text, calls = same(urls, ask)
    Person.model_validate_json(text)
    assert calls and all(Weather.model_validate_json(arguments) for arguments in calls)


def test_litellm_completions(litellm, urls):
    def ask(url):
        answer = litellm.text_completion(prompt="def add(a, b):", logprobs=2, temperature=0, **options(url))
        return answer.choices[0].text, answer.choices[0].logprobs.tokens

    text, tokens = same(urls, ask)
    assert "".join(tokens) == text


@pytest.fixture(scope="module")
def chat_models(urls):
    package = pytest.importorskip(
        "langchain_openai", reason="langchain-openai is not installed: pip install -e '.[interop-clients]'"
    )
    return [
        package.ChatOpenAI(model="m3-tiny", base_url=url, api_key="none", max_tokens=120, seed=3, max_retries=0)
        for url in urls
    ]


def test_langchain_chat_and_stream(chat_models):
    def ask(model):
        whole = model.invoke(QUESTION)
        assert whole.usage_metadata["output_tokens"] > 0
        return whole.content, "".join(part.content for part in model.stream(QUESTION))

    whole, streamed = same(chat_models, ask)
    assert whole == streamed != ""


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_structured_output(chat_models, method):
    found = same(chat_models, lambda model: model.with_structured_output(Weather, method=method).invoke(QUESTION))
    assert isinstance(found, Weather)


def test_langchain_json_mode(chat_models):
    def ask(model):
        return model.bind(response_format={"type": "json_object"}).invoke("An empty object.").content

    assert same(chat_models, ask).startswith("{")


def test_langchain_tools(chat_models):
    def ask(model):
        bound = model.bind_tools([Weather], tool_choice="any", strict=True, parallel_tool_calls=False)
        answer = bound.invoke(QUESTION)
        (call,) = answer.tool_calls
        # The conversation goes on with what the tool said.
        follow = [("user", QUESTION), answer, {"role": "tool", "tool_call_id": call["id"], "content": "sunny"}]
        return call["name"], call["args"], model.invoke(follow).content

    name, arguments, _ = same(chat_models, ask)
    assert name == "Weather" and Weather.model_validate_json(json.dumps(arguments))
