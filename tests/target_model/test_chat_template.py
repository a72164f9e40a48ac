"""The chat format, compared with transformers on the same template; training rows are what the server is asked."""

import itertools

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from target_model.errors import UserError
from target_model.resolve import BUNDLED
from target_model.tokenizer import load_tokenizer

DIRECTORY = BUNDLED / "m3-tiny"
TOKENIZER = load_tokenizer(DIRECTORY)
REFERENCE = transformers.AutoTokenizer.from_pretrained(DIRECTORY)
NS = "]<]minimax[>["
TOOLS = [{"type": "function", "function": {"name": "f", "description": "Ü", "parameters": {"type": "object"}}}]
CALL = {
    "type": "function",
    "function": {"name": "f", "arguments": '{"a": {"b": [1, null, {"c": true}], "d": null}, "e": "x"}'},
}


def user(text="Hi"):
    return {"role": "user", "content": text}


def assistant(content="Hello", reasoning=None, calls=None):
    message = {"role": "assistant", "content": content}
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    if calls is not None:
        message["tool_calls"] = calls
    return message


def tool(content="42"):
    return {"role": "tool", "content": content}


def system(text="Be brief."):
    return {"role": "system", "content": text}


def text_of(messages, **options):
    return TOKENIZER.decode(TOKENIZER.render_chat(messages, **options))


CONVERSATIONS = {
    "one turn": [user(), assistant()],
    "three turns": [user(), assistant("a"), user("b"), assistant("c"), user("d"), assistant("e")],
    "system": [system(), user(), assistant()],
    "developer": [{"role": "developer", "content": "x"}, user(), assistant()],
    "root": [{"role": "root", "content": "r"}, system(), user(), assistant()],
    "system later": [user(), assistant(), system(), user(), assistant()],
    "reasoning": [user(), assistant("a", "why"), user(), assistant("b", "because")],
    "mixed reasoning": [user(), assistant("a", "why"), user(), assistant("b"), user(), assistant("c", "")],
    "tool call": [user(), assistant(None, "plan", [CALL]), tool(), assistant("It is 42.")],
    "two calls": [user(), assistant("Wait", None, [CALL, CALL]), tool("1"), tool("2"), assistant("done", "so")],
    "white space": [user("\n\n x\n"), assistant("\n\n y \n"), user(" "), assistant("")],
    "parts": [user([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]), assistant()],
    "null content": [user(), assistant(None)],
    "markers in the answer": [
        user(),
        assistant("Close with </mm:think>, open with <mm:think> and end with [e~[ ."),
        user(),
    ],
}
OPENINGS = {"enabled": "<mm:think>", "disabled": "</mm:think>", "adaptive": ""}


@pytest.mark.parametrize("name", [name for name in CONVERSATIONS if name != "markers in the answer"])
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["no tools", "tools"])
def test_equal_to_transformers(name, tools):
    """transformers passes tool arguments to the template as they are: it gets them as objects."""
    messages = [
        {
            **message,
            "tool_calls": [{"function": {"name": "f", "arguments": {"a": {"b": [1, None, {"c": True}]}, "e": "x"}}}]
            * n,
        }
        if (n := len(message.get("tool_calls") or []))
        else message
        for message in CONVERSATIONS[name]
    ]
    for mode in OPENINGS:
        expected = REFERENCE.apply_chat_template(
            messages,
            tools=tools,
            chat_template=TOKENIZER.template,
            thinking_mode=mode,
            add_generation_prompt=True,
            return_dict=False,
        )
        assert TOKENIZER.render_chat(messages, tools, mode) == expected
    both = REFERENCE.apply_chat_template(
        messages, tools=tools, chat_template=TOKENIZER.template, return_dict=True, return_assistant_tokens_mask=True
    )
    ids, mask = TOKENIZER.render_training(messages, tools)
    assert ids == both["input_ids"]
    assert mask == [bool(value) for value in both["assistant_masks"]]


def test_the_format_in_full():
    messages = [user(), assistant("Let me see.", "plan", [CALL]), tool("1"), tool("2"), assistant("Done")]
    assert text_of(messages, thinking_mode="enabled") == (
        "]~!b[]~b]system\nYou are a helpful assistant.[e~[\n]~b]user\nHi[e~[\n"
        f"]~b]ai\n<mm:think>plan</mm:think>Let me see.{NS}<tool_call>\n"
        f'{NS}<invoke name="f">{NS}<a>{NS}<b>{NS}<item>1{NS}</item>{NS}<item>{NS}<c>true{NS}</c>{NS}</item>'
        f"{NS}</b>{NS}</a>{NS}<e>x{NS}</e>{NS}</invoke>\n{NS}</tool_call>[e~[\n"
        "]~b]tool\n<response>1</response>\n<response>2</response>[e~[\n]~b]ai\n</mm:think>Done[e~[\n]~b]ai\n<mm:think>"
    )


def test_tools_stand_in_the_first_system_turn():
    text = text_of([{"role": "root", "content": "r"}, system("Be brief."), user()], tools=TOOLS)
    turn = text.split("]~b]")[2]
    assert turn.startswith("system\nBe brief.\n\n# Tools")
    assert '<tool>{"name": "f", "description": "Ü", "parameters": {"type": "object"}}</tool>' in turn
    assert text.count("# Tools") == 1


def test_an_image_is_its_placeholder():
    parts = [{"type": "text", "text": "See"}, {"type": "image_url", "image_url": {"url": "data:"}}]
    assert "user\nSee]<]start of image[>[]<]image[>[]<]end of image[>[[e~[" in text_of([user(parts)])


def test_reasoning_at_the_head_of_the_content_is_reasoning():
    inline = [user(), assistant("<mm:think>why</mm:think>because"), user()]
    field = [user(), assistant("because", "why"), user()]
    assert TOKENIZER.render_chat(inline) == TOKENIZER.render_chat(field)


def test_the_prompt_only_grows():
    """A rendered conversation begins with every shorter one: cached prefixes stay valid."""
    messages = CONVERSATIONS["two calls"] + CONVERSATIONS["mixed reasoning"]
    whole = TOKENIZER.render_chat(messages, add_generation_prompt=False)
    for end, message in enumerate(messages):
        if message["role"] == "assistant":
            part = TOKENIZER.render_chat(messages[: end + 1], add_generation_prompt=False)
            assert whole[: len(part)] == part


def spans(mask):
    """Borders of each run of True."""
    runs = [(value, list(group)) for value, group in itertools.groupby(enumerate(mask), key=lambda item: item[1])]
    return [(group[0][0], group[-1][0] + 1) for value, group in runs if value]


def produced(message, mode):
    """What the model has to write for a turn, as text."""
    reasoning = message.get("reasoning_content")
    head = f"{reasoning}</mm:think>" if reasoning else ""
    opening = ("<mm:think>" if reasoning else "</mm:think>") if mode == "adaptive" else ""
    return opening + head + (message["content"] or "") + "[e~["


@pytest.mark.parametrize("mode", ["auto", *OPENINGS])
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_training_rows_are_what_the_server_is_asked(name, mode):
    messages = CONVERSATIONS[name]
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    reasons = [bool(messages[turn].get("reasoning_content")) for turn in turns]
    impossible = (mode == "enabled" and not all(reasons)) or (mode == "disabled" and any(reasons))
    if impossible:
        with pytest.raises(UserError, match=rf"messages\[{turns[reasons.index(mode == 'disabled')]}\]: has"):
            TOKENIZER.render_training(messages, TOOLS, mode)
        return
    ids, mask = TOKENIZER.render_training(messages, TOOLS, mode)
    found = spans(mask)
    assert len(found) == len(turns)
    for turn, reasoned, (start, end) in zip(turns, reasons, found, strict=True):
        turn_mode = mode if mode != "auto" else "enabled" if reasoned else "disabled"
        assert ids[:start] == TOKENIZER.render_chat(messages[:turn], TOOLS, turn_mode)
        if not messages[turn].get("tool_calls"):
            assert TOKENIZER.decode(ids[start:end]) == produced(messages[turn], mode)
        assert ids[end - 1] in TOKENIZER.eos_ids
        assert not set(ids[start : end - 1]) & set(TOKENIZER.eos_ids)
    last_ids, last_mask = TOKENIZER.render_training(messages, TOOLS, mode, last_turn_only=True)
    assert TOKENIZER.decode(last_ids) == TOKENIZER.decode(ids)
    assert len(spans(last_mask)) == 1
    start, end = spans(last_mask)[0]
    assert last_ids[start:end] == ids[found[-1][0] : found[-1][1]]


def test_a_tool_call_is_produced_whole():
    ids, mask = TOKENIZER.render_training(CONVERSATIONS["tool call"])
    start, end = spans(mask)[0]
    text = TOKENIZER.decode(ids[start:end])
    assert text.startswith(f"plan</mm:think>{NS}<tool_call>\n{NS}<invoke")
    assert text.endswith(f"{NS}</invoke>\n{NS}</tool_call>[e~[")


def test_a_template_that_drops_past_reasoning_trains_what_it_shows(tmp_path):
    """With such a template, the server never sees the dropped reasoning behind the prompts that follow it."""
    dropping = load_tokenizer(DIRECTORY)
    dropping.template = TOKENIZER.template.replace(
        "message.reasoning_content", "(loop.last and message.reasoning_content)"
    )
    messages = [user(), assistant("a", "why"), user(), assistant("b", "because")]
    ids, mask = dropping.render_training(messages)
    texts = [dropping.decode(ids[start:end]) for start, end in spans(mask)]
    assert texts == ["a[e~[", "because</mm:think>b[e~["]
    first = spans(mask)[0][0]
    assert ids[:first] == dropping.render_chat(messages[:1], thinking_mode="disabled")


TEXT = st.lists(st.sampled_from([*TOKENIZER.special, "]~", "b]", "[>", "<", "mm:think", "x", " "]), max_size=5).map(
    "".join
)


@settings(max_examples=60, deadline=None)
@given(TEXT, TEXT, TEXT, TEXT, TEXT)
def test_no_text_of_a_conversation_becomes_a_special_token(prompt, answer, reasoning, key, value):
    """The special tokens of a conversation depend on its shape alone."""

    def specials(*texts):
        prompt, answer, reasoning, key, value = texts
        call = {"function": {"name": f"n{key}", "arguments": {f"k{key}": value, "list": [value, {key or "k": 1}]}}}
        tools = [{"type": "function", "function": {"name": prompt, "parameters": {key: {"type": value}}}}]
        messages = [
            user(prompt),
            assistant(f"a{answer}", f"r{reasoning}", [call]),
            tool(value),
            user([_part(answer)] * 2),
        ]
        ids = TOKENIZER.render_chat(messages, tools)
        assert TOKENIZER.decode(ids).count(prompt) >= 1
        return [token for token in ids if token in TOKENIZER.special_ids]

    assert specials(prompt, answer, reasoning, key, value) == specials("p", "a", "r", "k", "v")


def _part(text):
    return {"type": "text", "text": text}


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages: must be a list"),
        ([{"role": "ai", "content": "x"}], r"messages\[0\]\.role: unknown role 'ai'"),
        ([user(None)], r"messages\[0\]\.content: must not be null"),
        ([user(5)], r"messages\[0\]\.content: must be a string"),
        ([user([{"type": "audio"}])], r"messages\[0\]\.content\[0\]\.type: unknown content part 'audio'"),
        ([user(), {"role": "root", "content": "x"}], r"messages\[1\]\.role: only the first"),
        (
            [assistant("a", None, [{"function": {"name": "f", "arguments": "{"}}])],
            r"tool_calls\[0\]\.function\.arguments: is not JSON",
        ),
        ([assistant("a", None, [{"function": {"name": "f", "arguments": "[1]"}}])], r"arguments: must be an object"),
        ([assistant("a", None, [{"function": {}}])], r"tool_calls\[0\]\.function\.name"),
        ([{**assistant("a", "x"), "reasoning": "y"}], "differ"),
    ],
)
def test_a_bad_message_is_named(messages, message):
    with pytest.raises(UserError, match=message):
        TOKENIZER.render_chat(messages)


def test_other_refusals():
    with pytest.raises(UserError, match="thinking_mode"):
        TOKENIZER.render_chat([user()], thinking_mode="on")
    with pytest.raises(UserError, match="no assistant turn"):
        TOKENIZER.render_training([user()])
    shown = user([{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": "x"}}])
    assert "]<]image[>[" in text_of([user(), assistant(), shown])
    with pytest.raises(UserError, match=r"messages\[2\]: shows an image, and training has no features of images"):
        TOKENIZER.render_training([user(), assistant(), shown, assistant("A cat.")])
    with pytest.raises(UserError, match=r"tools\[0\]\.function\.name"):
        TOKENIZER.render_chat([user()], tools=[{"type": "function"}])
