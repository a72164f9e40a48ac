"""Random bodies: every answer is a success or an error of the client's, in the usual shape; the server has no fault."""

import json

import httpx
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from serve.openai_types import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from tests.serve.fake_engine import saying, service
from tests.serve.http_client import serving

MODELS = {
    "/v1/chat/completions": (ChatRequest, {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9}),
    "/v1/completions": (CompletionRequest, {"prompt": "Hi", "max_tokens": 9}),
    "/tokenize": (TokenizeRequest, {"prompt": "Hi"}),
    "/detokenize": (DetokenizeRequest, {"tokens": [5]}),
}
# Values that are right for some field, and values that are right for none.
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, 1, 2, 5, -1, 10**30, 0.5, 1.0, -0.0, 1e300, float("nan"), float("inf"), 4095, 4096]),
    st.sampled_from(
        ["", "x", "auto", "none", "user", "assistant", "tool", "text", "function", "enabled", "]~b]", "\ud800", "é🎉"]
    ),
)
NAMES = st.sampled_from(
    [
        "role",
        "content",
        "type",
        "text",
        "function",
        "name",
        "arguments",
        "tool_calls",
        "tool_call_id",
        "id",
        "parameters",
    ]
    + ["include_usage", "thinking_mode", "5", "x", "reasoning_content", "properties", "$ref", "anyOf"]
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(NAMES, inner, max_size=4)),
    max_leaves=8,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "tool", "system", "root"])},
        optional={"content": VALUES, "reasoning_content": LEAVES, "tool_calls": VALUES, "tool_call_id": LEAVES},
    ),
    max_size=4,
)


@st.composite
def bodies(draw):
    path = draw(st.sampled_from(list(MODELS)))
    model, base = MODELS[path]
    fields = st.sampled_from([*model.model_fields, "unknown"])
    changes = draw(st.dictionaries(fields, VALUES, max_size=3))
    if "messages" in model.model_fields and draw(st.booleans()):
        changes["messages"] = draw(MESSAGES)
    return path, json.dumps({**base, **changes})


@pytest.fixture(scope="module")
def http():
    tags = ("<tool_call>\n", '<invoke name="f">', "<x>1", "</x>", "</invoke>")
    text = "a" + "".join(f"]<]minimax[>[{tag}" for tag in tags)
    with serving(service(saying(text))) as url, httpx.Client(base_url=url, timeout=30) as client:
        yield client


def check(response):
    if response.status_code == 200:
        if response.headers["content-type"].startswith("text/event-stream"):
            assert response.text.endswith("data: [DONE]\n\n")
        return
    assert response.status_code in (400, 404), response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] and error["param"]


@settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))
@given(bodies())
@example(
    (
        "/v1/chat/completions",
        json.dumps({"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function"}]}),
    )
)
def test_no_body_is_a_fault_of_the_server(http, request):
    path, body = request
    check(http.post(path, content=body))


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(list(MODELS)), st.binary(max_size=60))
def test_no_bytes_are_a_fault_of_the_server(http, path, body):
    check(http.post(path, content=body))
    assert http.get("/health").status_code == 200
