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
# Schemas that mostly make sense, and forms of an answer that use them.
KINDS = st.sampled_from(["string", "integer", "number", "boolean", "null", "array", "object", "text"])
SCHEMAS = st.recursive(
    st.one_of(
        st.fixed_dictionaries({"type": KINDS}),
        st.fixed_dictionaries({"type": st.lists(KINDS, max_size=3)}),
        st.fixed_dictionaries({"enum": st.lists(LEAVES, max_size=3)}),
        st.fixed_dictionaries({"const": LEAVES}),
        st.fixed_dictionaries({"$ref": st.sampled_from(["#", "#/$defs/x", "#/properties/x", "http://x/y", "", 5])}),
        st.fixed_dictionaries({"type": st.just("string")}, optional={"minLength": LEAVES, "maxLength": LEAVES}),
        st.fixed_dictionaries(
            {
                "type": st.just("string"),
                "pattern": st.sampled_from(["^a|b$", "(", "(?=x)", "\\d{3}/", "a{9999}", "]~b]", 5]),
            }
        ),
        st.fixed_dictionaries(
            {"type": st.just("string"), "format": st.sampled_from(["date", "uuid", "email", "x", 1])}
        ),
        st.fixed_dictionaries({"type": st.just("integer"), "minimum": LEAVES}, optional={"maximum": LEAVES}),
        VALUES,
    ),
    lambda inner: st.one_of(
        st.fixed_dictionaries({"anyOf": st.lists(inner, max_size=3)}),
        st.fixed_dictionaries({"allOf": st.lists(inner, max_size=3)}),
        st.fixed_dictionaries({"type": st.just("array"), "items": inner}, optional={"minItems": LEAVES}),
        st.fixed_dictionaries(
            {"type": st.just("object"), "properties": st.dictionaries(st.text(max_size=3), inner, max_size=3)},
            optional={"required": st.lists(st.text(max_size=3), max_size=2), "additionalProperties": inner},
        ),
    ),
    max_leaves=6,
)
TOOLS = st.lists(
    st.fixed_dictionaries(
        {
            "type": st.just("function"),
            "function": st.fixed_dictionaries(
                {"name": st.sampled_from(["f", "g"])}, optional={"strict": st.booleans(), "parameters": SCHEMAS}
            ),
        }
    ),
    max_size=2,
)
CHOICES = st.one_of(
    st.sampled_from(["auto", "none", "required", {"type": "function", "function": {"name": "f"}}]),
    st.sampled_from(["auto", "required"]).map(
        lambda mode: {
            "type": "allowed_tools",
            "allowed_tools": {"mode": mode, "tools": [{"type": "function", "function": {"name": "g"}}]},
        }
    ),
)
FORMATS = st.one_of(
    st.just({"type": "json_object"}),
    SCHEMAS.map(lambda schema: {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}),
)
FORMS = st.fixed_dictionaries(
    {},
    optional={
        "tools": TOOLS,
        "tool_choice": CHOICES,
        "response_format": FORMATS,
        "parallel_tool_calls": st.booleans(),
        "thinking_mode": st.sampled_from(["enabled", "disabled", "adaptive"]),
        "stream": st.booleans(),
    },
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


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(FORMS)
def test_no_form_is_a_fault_of_the_server(http, form):
    """Schemas of every kind, right and wrong, for answers and for tools."""
    check(http.post("/v1/chat/completions", content=json.dumps({**MODELS["/v1/chat/completions"][1], **form})))


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(list(MODELS)), st.binary(max_size=60))
def test_no_bytes_are_a_fault_of_the_server(http, path, body):
    check(http.post(path, content=body))
    assert http.get("/health").status_code == 200
