"""A target that says what a script tells it: reasoning, tool calls and JSON reach the client whole, with speculation
and without. A grammar never changes an answer that keeps to its form.
"""

import itertools
import json
import random

import pytest
import torch

from serve.description import SamplingDefaults
from serve.tree import TreeConfig
from target_model.model import TargetModel, TargetOutput
from tests.fixtures import random_target
from tests.serve.comparison import CHAT, Pair, Way
from tests.serve.fake_engine import tokenizer

TOKENIZER = tokenizer()
USER = [{"role": "user", "content": "How is the weather in São Paulo?"}]
PARAMETERS = {
    "type": "object",
    "$defs": {
        "Day": {
            "type": "object",
            "properties": {"on": {"type": "string", "format": "date"}, "hot": {"type": "boolean"}},
        }
    },
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 0},
        "plan": {"type": "array", "items": {"$ref": "#/$defs/Day"}},
        "unit": {"anyOf": [{"enum": ["°C", "°F"]}, {"type": "null"}]},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION = {"name": "weather", "description": "Looks it up.", "parameters": PARAMETERS}
STRICT = [{"type": "function", "function": FUNCTION | {"strict": True}}]
LOOSE = [{"type": "function", "function": FUNCTION}]
NAMED = {"type": "function", "function": {"name": "weather"}}
CALLS = [
    {"city": "São Paulo\n</city>", "days": 3, "plan": [{"on": "2026-01-31", "hot": True}]},
    {"city": "", "unit": "°C", "tags": ["ünï", "b <c>", "🎉"]},
]
PERSON = {"name": 'Zoë "Z" 🎉\n', "age": 7, "nested": {"list": [1, 2.5, None, True, "]"], "empty": {}}}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "nested": {"type": "object"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
JSON = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}


def rendered(mode, tools=(), **answer):
    """Prompt and answer of a turn as the chat template writes it, which is how the model was taught to answer."""
    message = {"role": "assistant", "content": None, **answer}
    shown = LOOSE if tools else []
    prompt = TOKENIZER.render_chat(USER, shown, mode)
    whole = TOKENIZER.render_chat([*USER, message], shown, mode, add_generation_prompt=False)
    assert whole[: len(prompt)] == prompt
    end = whole.index(TOKENIZER.eos_ids[0], len(prompt))
    return prompt, whole[len(prompt) : end + 1]


def calls(arguments):
    return [{"function": {"name": "weather", "arguments": json.dumps(each)}} for each in arguments]


def scripted_target(prompt: list[int], answer: list[int]) -> TargetModel:
    """Three layers of T0, the bundled vocabulary; it puts `answer` behind `prompt` whatever was said in between."""
    target = random_target(
        vocab_size=TOKENIZER.vocab_size, eos_token_ids=TOKENIZER.eos_ids, max_position=1024, num_layers=3
    )
    forward, logits = target.forward, target.logits

    def scripted_forward(batch, *rest):
        output = forward(batch, *rest)
        state = output.final_state.clone()
        place = (batch.positions + 1 - len(prompt)).clamp(0, len(answer) - 1)
        state[:, 0] = torch.tensor(answer)[place].float()  # the token to come, as a number
        return TargetOutput(state, output.aux)

    def scripted_logits(state):
        scores = logits(state * (torch.arange(state.shape[-1]) > 0)).tanh()
        return scores.scatter(-1, state[..., :1].long(), 25.0)

    target.forward, target.logits = scripted_forward, scripted_logits
    return target


def pair(prompt, answer):
    def script(sequence):
        return answer[sequence.output_length :]

    return Pair(scripted_target(prompt, answer), script, SamplingDefaults())


WAYS = [
    Way(TreeConfig.chain(5), 1.0, crowded=True, stream=True),
    Way(TreeConfig(4, 3, 14), 0.67, crowded=True, stream=False),
    Way(TreeConfig.chain(3), 0.67, crowded=False, stream=True),
]
FORMS = {
    "calls": [{"tools": LOOSE}, {"tools": STRICT, "tool_choice": "required"}],
    "one call": [{"tools": LOOSE, "tool_choice": NAMED}, {"tools": STRICT, "parallel_tool_calls": False}],
    "text and calls": [{"tools": STRICT}],
    "json": [{}, {"response_format": JSON}, {"response_format": {"type": "json_object"}}],
    "json beside tools": [{"tools": STRICT, "response_format": JSON}, {"tools": STRICT}],
}
ANSWERS = {
    "calls": {"tool_calls": calls(CALLS)},
    "one call": {"tool_calls": calls(CALLS[:1])},
    "text and calls": {"content": "Let me look: <b>", "tool_calls": calls(CALLS)},
    "json": {"content": json.dumps(PERSON, ensure_ascii=False)},
    "json beside tools": {"content": json.dumps(PERSON, ensure_ascii=False)},
}


@pytest.mark.parametrize(
    ("name", "mode"),
    [("calls", "disabled"), ("one call", "enabled"), ("text and calls", "enabled")]
    + [("json", "enabled"), ("json beside tools", "disabled")],
)
def test_what_the_target_says_arrives(name, mode):
    answer = ANSWERS[name] | ({"reasoning_content": 'Hm, {"a": <tool_call>'} if mode == "enabled" else {})
    tools = FORMS[name][0].get("tools", [])
    prompt, ids = rendered(mode, tools, **answer)
    made = pair(prompt, ids)
    requests = [
        (CHAT, {"messages": USER, "thinking_mode": mode, "max_tokens": 400, **sampling, **form})
        for form, sampling in zip(FORMS[name], itertools.cycle([{"temperature": 0}, {"seed": 3}]), strict=False)
    ]
    expected = made.plain(requests, pages=256)
    for answered in expected:
        (choice,) = answered["choices"]
        message = choice["message"]
        assert choice["finish_reason"] == ("tool_calls" if "tool_calls" in answer else "stop")
        assert message["content"] == answer.get("content")
        assert message.get("reasoning_content") == answer.get("reasoning_content")
        found = [call["function"] for call in message.get("tool_calls", [])]
        wanted = [call["function"] for call in answer.get("tool_calls", [])]
        assert [(call["name"], json.loads(call["arguments"])) for call in found] == [
            (call["name"], json.loads(call["arguments"])) for call in wanted
        ]
        assert answered["usage"]["completion_tokens"] == len(ids)
    way = random.Random(name + mode).choice(WAYS)
    made.check(way, requests, expected, pages=256, draft={"taps": (0, 1, 2)})
