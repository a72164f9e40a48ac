"""Reasoning, content and tool calls of scripted answers, cut in every way."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.chat_parser import ChatParser
from serve.detokenize import Detokenizer
from serve.tool_calls import CallArguments, CallStart
from target_model.tokenizer import Tokenizer
from tests.serve.fake_engine import tokenizer

TOKENIZER: Tokenizer = tokenizer()
NS = "]<]minimax[>["
SCHEMA = {
    "type": "object",
    "$defs": {"Point": {"type": "object", "properties": {"x": {"type": "number"}, "name": {"type": "string"}}}},
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "exact": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "points": {"type": "array", "items": {"$ref": "#/$defs/Point"}},
        "maybe": {"anyOf": [{"$ref": "#/$defs/Point"}, {"type": "null"}]},
        "unit": {"enum": ["C", "F"]},
        "options": {"type": "object"},
        "either": {"type": ["string", "integer"]},
    },
}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]


def parse(text, mode="disabled", tools=TOOLS, size=1, complete=True):
    """The joined parts of an answer: reasoning, content, and calls as (name, arguments text)."""
    ids = TOKENIZER.encode(text, allow_special=True)
    detokenizer, parser = Detokenizer(TOKENIZER), ChatParser(TOKENIZER, mode, tools)
    parts = []
    for start in range(0, len(ids), size):
        parts += parser.take(detokenizer.push(ids[start : start + size]).segments)
    parts += parser.take(detokenizer.finish().segments) + parser.finish(complete)
    texts, calls = {"reasoning": "", "content": ""}, []
    for part in parts:
        if isinstance(part, CallStart):
            assert part.index == len(calls)
            calls.append([part.name, ""])
        elif isinstance(part, CallArguments):
            calls[part.index][1] += part.json
        else:
            texts[part[0]] += part[1]
    return texts["reasoning"], texts["content"], calls


def call(name, body):
    return f'{NS}<invoke name="{name}">{body}{NS}</invoke>\n'


def tag(name, value):
    return f"{NS}<{name}>{value}{NS}</{name}>"


def block(*calls):
    return f"{NS}<tool_call>\n{''.join(calls)}{NS}</tool_call>"


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("mode", "text", "reasoning", "content"),
    [
        ("enabled", "why</mm:think>so", "why", "so"),
        ("enabled", "never closed", "never closed", ""),
        ("disabled", "so", "", "so"),
        ("adaptive", "<mm:think>why</mm:think>so", "why", "so"),
        ("adaptive", "</mm:think>so", "", "so"),
        ("disabled", "a<mm:think>b</mm:think>c", "b", "ac"),
    ],
)
def test_reasoning(mode, text, reasoning, content, size):
    assert parse(text, mode, size=size) == (reasoning, content, [])


def test_spelt_out_markers_are_text():
    """Ordinary tokens that spell a marker are content: only the special token is one."""
    detokenizer, parser = Detokenizer(TOKENIZER), ChatParser(TOKENIZER, "disabled", TOOLS)
    segments = detokenizer.push(TOKENIZER.encode(f"<mm:think>x{NS}<tool_call>")).segments
    assert parser.take(segments) == [("content", f"<mm:think>x{NS}<tool_call>")]


ARGUMENTS = [
    (tag("city", "São Paulo"), {"city": "São Paulo"}),
    (tag("city", "5"), {"city": "5"}),
    (tag("city", ""), {"city": ""}),
    (tag("city", "<b>&amp;</city>"), {"city": "<b>&amp;</city>"}),
    (tag("city", "\n two\n"), {"city": "\n two\n"}),
    (tag("days", "3"), {"days": 3}),
    (tag("days", "many"), {"days": "many"}),
    (tag("exact", "true"), {"exact": True}),
    (tag("tags", tag("item", "1") + tag("item", "b")), {"tags": ["1", "b"]}),
    (tag("tags", ""), {"tags": []}),
    (tag("options", ""), {"options": {}}),
    (tag("options", tag("item", tag("k", "1"))), {"options": {"item": {"k": 1}}}),
    (
        tag("points", tag("item", tag("x", "1.5") + tag("name", "7")) + tag("item", tag("x", "2"))),
        {"points": [{"x": 1.5, "name": "7"}, {"x": 2}]},
    ),
    (tag("maybe", tag("name", "1")), {"maybe": {"name": "1"}}),
    (tag("unit", "C"), {"unit": "C"}),
    (tag("either", "5"), {"either": "5"}),
    (tag("free", "1.50"), {"free": 1.5}),
    (tag("free", "text"), {"free": "text"}),
    (tag("free", tag("item", "1") + tag("item", "x")), {"free": [1, "x"]}),
    (tag("free", tag("deep", tag("er", "null"))), {"free": {"deep": {"er": None}}}),
    (tag("free", "NaN"), {"free": "NaN"}),
    (tag("free", "1e999"), {"free": "1e999"}),
    (tag("free", "stray" + tag("k", "1")), {"free": {"k": 1, "$text": "stray"}}),
    (tag("city", "a") + tag("days", "1"), {"city": "a", "days": 1}),
    ("", {}),
]


@pytest.mark.parametrize("size", [1, 4, 1000])
@pytest.mark.parametrize(("body", "expected"), ARGUMENTS)
def test_arguments(body, expected, size):
    reasoning, content, calls = parse(f"plan</mm:think>Sure.{block(call('weather', body))}", "enabled", size=size)
    assert (reasoning, content) == ("plan", "Sure.")
    assert [(name, json.loads(text)) for name, text in calls] == [("weather", expected)]


def test_several_calls():
    _, content, calls = parse(
        block(call("weather", tag("city", "A")), call("other", tag("n", "1")), call("weather", ""))
    )
    assert content == ""
    assert [(name, json.loads(text)) for name, text in calls] == [
        ("weather", {"city": "A"}),
        ("other", {"n": 1}),
        ("weather", {}),
    ]


def test_without_tools_the_syntax_is_content():
    assert parse(block(call("weather", tag("city", "A"))), tools=[])[2] == []
    assert "<city>A" in parse(block(call("weather", tag("city", "A"))), tools=[])[1]


def test_text_around_calls_is_delivered():
    text = f"before{block(call('weather', ''))} after {NS}not a tag {NS}<b>bold"
    assert parse(text)[1] == "before after not a tag <b>bold"


def test_a_call_cut_by_the_length_keeps_what_is_complete():
    cut = f'{NS}<tool_call>\n{NS}<invoke name="weather">{tag("city", "A")}{NS}<days>1'
    assert parse(cut, complete=False)[2] == [["weather", '{"city": "A"']]
    assert json.loads(parse(cut, complete=True)[2][0][1]) == {"city": "A", "days": 1}


def test_half_a_tag_at_the_end_is_no_text():
    whole = f"before{block(call('weather', tag('city', 'A')), call('weather', ''))}"
    ids = TOKENIZER.encode(whole, allow_special=True)
    for length in range(len(ids)):
        detokenizer, parser = Detokenizer(TOKENIZER), ChatParser(TOKENIZER, "disabled", TOOLS)
        segments = detokenizer.push(ids[:length]).segments + detokenizer.finish().segments
        parts = parser.take(segments) + parser.finish(complete=False)
        content = "".join(part[1] for part in parts if isinstance(part, tuple))
        assert "before".startswith(content), length
        ended = "".join(map(str, segments)).count("</invoke>")
        assert parser.tool_calls == ended, length


@pytest.mark.parametrize("text", ["a <in", "a <tool_call", f"a {NS}<in"])
def test_the_same_text_without_tools_is_content(text):
    assert parse(text, tools=[], complete=False)[1] == text.replace(NS, "")


def test_deep_nesting_is_no_crash():
    depth = 3000
    body = "".join(f"{NS}<k>" for _ in range(depth)) + "x" + "".join(f"{NS}</k>" for _ in range(depth))
    (name, text), *_ = parse(block(call("weather", body)))[2]
    assert name == "weather"
    json.loads(text)


PIECES = st.sampled_from(
    [
        NS,
        "<tool_call>",
        "</tool_call>",
        '<invoke name="weather">',
        "</invoke>",
        "<city>",
        "</city>",
        "<item>",
        "</item>",
        "x",
        "\n",
    ]
    + ["<mm:think>", "</mm:think>", "<days>", "</x>", "{", "<"]
)


@settings(max_examples=300)
@given(st.lists(PIECES, max_size=25).map("".join), st.integers(1, 7))
def test_any_answer_parses_to_valid_json_whatever_the_cuts(text, size):
    whole = parse(text, size=1000)
    assert parse(text, size=size) == whole
    for _, arguments in whole[2]:
        assert isinstance(json.loads(arguments), dict)


def test_reasoning_tokens_are_counted():
    ids = TOKENIZER.encode("why not</mm:think>so", allow_special=True)
    close = ids.index(TOKENIZER.special["</mm:think>"])
    parser = ChatParser(TOKENIZER, "enabled", [])
    assert sum(parser.count_reasoning([token]) for token in ids) == close
    assert ChatParser(TOKENIZER, "disabled", []).count_reasoning(ids) == 0
