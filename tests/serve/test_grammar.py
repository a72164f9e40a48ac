"""Answers that follow a grammar: the same with speculation and without, valid by their schema, ended by it."""

import json
import random

import jsonschema
import pytest
import torch

from serve.engine import Engine
from serve.grammar import Constraint, GrammarCompiler
from serve.load import EngineOptions, load_engine
from serve.request import Completion, Request, SamplingParams
from serve.tool_calls import NAMESPACE
from serve.tree import TreeConfig
from target_model.errors import UserError
from tests.serve.drafts import random_draft
from tests.serve.fake_engine import tokenizer
from tests.serve.test_chat_parser import parse

TOKENIZER = tokenizer()
VOCABULARY = 4100  # a model may have more ids than its tokenizer
COMPILER = GrammarCompiler(TOKENIZER, VOCABULARY)
NAMESPACE_ID, CLOSE = TOKENIZER.special[NAMESPACE], TOKENIZER.special["</mm:think>"]
(EOS,) = TOKENIZER.eos_ids

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
        "ok": {"type": "boolean"},
    },
    "required": ["name", "age", "tags", "ok"],
    "additionalProperties": False,
}
POINT = {
    "type": "object",
    "properties": {
        "x": {"type": "number"},
        "next": {"anyOf": [{"$ref": "#/$defs/Point"}, {"type": "null"}]},
    },
    "required": ["x", "next"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 15},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}


def tool(parameters, strict=True, name="f"):
    return {"type": "function", "function": {"name": name, "parameters": parameters, "strict": strict}}


def field(schema, **rest):
    """A tool with one argument."""
    return tool(
        {"type": "object", "properties": {"v": schema}, "required": ["v"], "additionalProperties": False} | rest
    )


def allowed(constraint, decided, path=()):
    (words,) = constraint.masks(decided, [path])
    bits = ((words[:, None] >> torch.arange(32)) & 1).flatten()
    assert bits.all() or not bits[TOKENIZER.vocab_size :].any()
    return bits[: TOKENIZER.vocab_size].nonzero()[:, 0].tolist()


def walk(grammar, chance, limit=300):
    """A random answer; None when it did not end in time. Whoever may close a tag often does."""
    constraint, answer = Constraint(grammar), []
    while len(answer) < limit:
        choices = allowed(constraint, answer)
        if EOS in choices:
            return answer
        token = chance.choice(choices)
        if NAMESPACE_ID in choices and chance.random() < 0.4:
            token = NAMESPACE_ID
        answer.append(token)
    return None


GRAMMARS = {
    "person": COMPILER.compile(PERSON, [], "disabled"),
    "thoughtful": COMPILER.compile(PERSON, [], "enabled"),
    "calls": COMPILER.compile(None, [tool(WEATHER)], "adaptive"),
    "either": COMPILER.compile(PERSON, [tool(WEATHER), tool({}, strict=False, name="g")], "disabled"),
    "waiting": COMPILER.compile(None, [tool(WEATHER)], "enabled", waits=True),
}


@pytest.mark.parametrize("name", GRAMMARS)
def test_masks_along_a_tree_are_those_of_a_walk(name):
    """Random trees of allowed and forbidden tokens, again and again behind a growing answer."""
    chance, constraint, answer = random.Random(name), Constraint(GRAMMARS[name]), []
    for _ in range(12):
        paths = [()]
        for _ in range(7):
            parent = chance.choice(paths)
            choices = allowed(Constraint(GRAMMARS[name]), answer + list(parent))
            right = chance.choice(choices + [token for token in choices if token < 13] * 9)
            paths.append((*parent, right if chance.random() < 0.8 else chance.randrange(VOCABULARY)))
        masks = constraint.masks(answer, paths)
        for path, mask in zip(paths, masks, strict=True):
            walked = Constraint(GRAMMARS[name])
            legal = all(
                token in allowed(walked, answer + list(path[:place])) and token != EOS
                for place, token in enumerate(path)
            )
            assert torch.equal(mask, walked.masks(answer + list(path), [()])[0]) if legal else bool((mask == -1).all())
        answer.append(chance.choice([token for token in allowed(constraint, answer) if token != EOS] or [EOS]))
        if answer[-1] == EOS:
            break


def test_the_end_is_allowed_only_where_the_grammar_accepts():
    constraint, ids = (
        Constraint(GRAMMARS["person"]),
        TOKENIZER.encode('{"name": "A", "age": 7, "tags": [], "ok": true}'),
    )
    for place in range(len(ids)):
        assert EOS not in allowed(constraint, ids[:place])
        assert ids[place] in allowed(constraint, ids[:place])
    assert allowed(constraint, ids) == [EOS]


def test_a_schema_that_leads_nowhere(bundled):
    """Where no value can follow the answer ends as one that was cut, and a guess that leads there does no harm."""
    hopeless = {"type": "object", "properties": {"a": {"$ref": "#/$defs/x"}}, "required": ["a"]}
    endless = {"$defs": {"x": {"$ref": "#/$defs/x"}}}
    lost, right = TOKENIZER.encode('{"a": '), TOKENIZER.encode('{"name": "')
    mixed = COMPILER.compile(endless | {"anyOf": [hopeless, PERSON]}, [], "disabled")
    constraint = Constraint(mixed)
    alone = [Constraint(mixed).masks(ids, [()]) for ids in (lost, right)]
    assert torch.equal(constraint.masks([], [tuple(lost), tuple(right)]), torch.cat(alone))
    assert allowed(constraint, lost) == [EOS] and not constraint.finished(lost)
    hopeless |= endless
    grammar = GrammarCompiler(TOKENIZER, TOKENIZER.vocab_size).compile(hopeless, [], "disabled")
    request = Request("hopeless", render("?"), SamplingParams(temperature=0), grammar=grammar)
    for engine in (Engine(bundled[0], pages=32), Engine(*bundled, pages=32)):
        answer = run(engine, [request])["hopeless"]
        assert TOKENIZER.decode(answer.token_ids).rstrip() == '{"a":' and answer.finish_reason == "length"


def test_what_is_too_complex():
    """Refused where that shows at once; an answer for which it shows later ends as one that was cut."""
    wide = {"type": "object", "properties": {f"p{place}": {"type": "string"} for place in range(1500)}}
    with pytest.raises(UserError, match="items"):
        COMPILER.compile(wide, [], "disabled")
    constraint = Constraint(GRAMMARS["person"])
    for answer in ([NAMESPACE_ID], [NAMESPACE_ID, 50]):
        assert allowed(constraint, answer) == [EOS] and not constraint.finished(answer)


def test_reasoning_is_free_and_has_to_end():
    constraint = Constraint(GRAMMARS["thoughtful"])
    thought = TOKENIZER.encode("Any } text {")
    for place in range(len(thought) + 1):
        choices = allowed(constraint, thought[:place])
        assert CLOSE in choices and not {EOS, NAMESPACE_ID} & set(choices)
        assert len(choices) == TOKENIZER.vocab_size - len(TOKENIZER.special) + 1
    assert [TOKENIZER.decode([token]) for token in allowed(constraint, [*thought, CLOSE])] == ["{"]


def test_a_waiting_grammar_leaves_text_alone():
    constraint = Constraint(GRAMMARS["waiting"])
    free = TOKENIZER.encode("why</mm:think>so <b>x</b>", allow_special=True)
    for place in range(len(free) + 1):
        assert bool((constraint.masks(free[:place], [()]) == -1).all())
    assert {TOKENIZER.decode([token])[0] for token in allowed(constraint, [*free, NAMESPACE_ID])} == {"<"}


STRICT = {
    "recursive": field({"$ref": "#/$defs/Point"}, **{"$defs": {"Point": POINT}}),
    "nullable": field({"type": ["string", "null"], "maxLength": 4}),
    "optional": tool({"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"type": "null"}}}),
    "string or number": field({"anyOf": [{"type": "string", "maxLength": 3}, {"type": "number"}]}),
    "string or list": field({"anyOf": [{"type": "string", "maxLength": 3}, {"type": "array", "items": {"enum": [1]}}]}),
    "object or list": field({"anyOf": [POINT | {"properties": {}, "required": []}, {"type": "array"}, {"const": 5}]}),
    "alternatives": field(
        {
            "anyOf": [
                {"type": "object", "properties": {"k": {"const": kind}, kind: {"type": of}}, "required": ["k", kind]}
                for kind, of in (("a", "integer"), ("b", "string"))
            ]
        }
    ),
    "mapping": field({"type": "object", "additionalProperties": {"type": "string", "maxLength": 2}}),
    "anything": field({}),
    "enum": field({"enum": ["null", "a b", "</v>", 'q"\\']}),
    "numbers": field({"enum": [1, 2.5, None, True]}),
    "lengths": field({"type": "array", "items": {"type": "integer", "minimum": -3}, "minItems": 2, "maxItems": 3}),
    "pattern": field({"type": "string", "pattern": "^[a-c]{2}/\\d$"}),
    "inner pattern": field({"type": "string", "pattern": "ab|cd", "maxLength": 6}),
    "date": field({"type": "string", "format": "date"}),
    "moment": field({"type": "string", "format": "date-time"}),
    "uuid": field({"type": "string", "format": "uuid"}),
    "email": field({"type": "string", "format": "email"}),
    "number": field({"type": "number"}),
    "described": field({"type": "boolean", "title": "T", "description": "D", "default": True}),
    "nothing": tool({"type": "object", "properties": {}, "additionalProperties": False}),
}


@pytest.mark.parametrize("name", STRICT)
def test_strict_arguments_read_back_as_the_schema_says(name):
    chance, definition, ended = random.Random(name), STRICT[name], 0
    grammar = COMPILER.compile(None, [definition], "disabled")
    schema = definition["function"]["parameters"]
    for _ in range(12):
        answer = walk(grammar, chance)
        if answer is None:
            continue
        _, content, calls = parse(TOKENIZER.decode(answer), tools=[definition], size=1000)
        assert content == "" and calls
        for called, arguments in calls:
            assert called == "f"
            jsonschema.validate(json.loads(arguments), schema, format_checker=jsonschema.FormatChecker())
        ended += 1
    assert ended


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "string", "format": "nope"}, "format"),
        ({"type": "string", "pattern": "^a|b$"}, "pattern"),
        ({"type": "string", "pattern": "a)(b"}, r'pattern "a\)\(b" cannot be compiled: unopened group$'),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"oneOf": [{"type": "string"}, {"type": "null"}]}, "oneOf"),
        ({"type": "text"}, "type"),
        ({"$ref": "#/$defs/Lost"}, "nowhere"),
        ({"$ref": "#"}, "the whole schema, is not supported"),
        ({"type": "string", "minLength": 5, "maxLength": 2}, "maxLength 2 is below minLength 5"),
        ({"type": "array", "minItems": 5, "maxItems": 1}, "maxItems 1 is below minItems 5"),
        ({"enum": ["a", 1]}, "told apart"),
        ({"enum": []}, "enum"),
        ({"type": "string", "minLength": -1}, "minLength"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "minimum"),
        ({"type": "object", "properties": {"a>b": {}}}, "name of an argument"),
        ({"type": "string", "pattern": 1}, "string for 'pattern'"),
        ({"type": "object", "properties": None}, "properties"),
        ({"type": "string", "pattern": "^abc$", "maxLength": 2}, "unsatisfiable"),
        ({"type": "string", "maxLength": 10**12}, "^minLength or maxLength is too large$"),
    ],
)
def test_a_strict_schema_that_cannot_be_kept_is_refused(schema, words):
    with pytest.raises(UserError, match=words):
        COMPILER.compile(None, [field(schema)], "disabled")


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "string", "pattern": 1}, "string for 'pattern'"),
        ({"type": "string", "pattern": "^abc$", "maxLength": 2}, "unsatisfiable"),
        ({"type": "string", "minLength": 10**12}, "^minLength or maxLength is too large$"),
    ],
)
def test_an_answers_schema_that_cannot_be_kept_is_refused(schema, words):
    with pytest.raises(UserError, match=words):
        COMPILER.compile({"type": "object", "properties": {"v": schema}, "required": ["v"]}, [], "disabled")


@pytest.mark.parametrize(
    ("pattern", "shown", "fault"),
    [
        ("(", "(", "unclosed group"),
        (r"^\p{L}(?=a)", r"^\\p{L}(?=a)", "look-around, including look-ahead and look-behind, is not supported"),
    ],
)
def test_what_is_wrong_with_a_pattern_is_a_whole_sentence(pattern, shown, fault):
    """Of the client's own pattern, wherever it stands."""
    schema = {"type": "string", "pattern": pattern}
    for form, tools in (({"type": "array", "items": schema}, []), (None, [field(schema)])):
        with pytest.raises(UserError) as caught:
            COMPILER.compile(form, tools, "disabled")
        assert str(caught.value) == f'pattern "{shown}" cannot be compiled: {fault}'


def test_what_is_not_strict_is_loosened_instead():
    schema = {"type": "string", "format": "nope", "pattern": "^a|b$"}
    grammar = COMPILER.compile(None, [tool({"properties": {"v": schema}, "required": ["v"]}, strict=False)], "disabled")
    _, _, calls = parse(TOKENIZER.decode(walk(grammar, random.Random(3))), size=1000)
    assert isinstance(json.loads(calls[0][1])["v"], str)


@pytest.fixture(scope="module")
def bundled():
    engine, _, _ = load_engine(EngineOptions(device="cpu", pages=32))
    return engine.runner.target, engine.runner.drafter.draft


def render(question, tools=None, mode="disabled"):
    return TOKENIZER.render_chat([{"role": "user", "content": question}], tools, mode)


def requests():
    compiler = GrammarCompiler(TOKENIZER, TOKENIZER.vocab_size)
    person = compiler.compile(PERSON, [], "disabled")
    thoughtful = compiler.compile(PERSON, [], "enabled")
    calls = compiler.compile(None, [tool(WEATHER)], "disabled", several=False)
    greedy = SamplingParams(temperature=0, max_tokens=120)
    sampled = SamplingParams(seed=5, top_k=40, top_p=0.95, max_tokens=120)
    thinking = SamplingParams(seed=6, max_tokens=120, logit_bias={CLOSE: 14.0}, repetition_penalty=1.1)
    ask = render("Describe a person as JSON.")
    return [
        Request("greedy", ask, greedy, grammar=person),
        Request("sampled", ask, sampled, grammar=person),
        Request("another", ask, sampled, choice_index=1, grammar=person),
        Request("thinking", render("Who?", mode="enabled"), thinking, grammar=thoughtful),
        Request("call", render("How is it?", [tool(WEATHER)]), greedy, grammar=calls),
        Request("sampled call", render("How is it?", [tool(WEATHER)]), sampled, grammar=calls),
        Request("free", ask, sampled),
    ]


def run(engine, batch):
    updates = {request.id: [] for request in batch}
    for request in batch:
        engine.add(request)
    while engine.has_work():
        for update in engine.step():
            updates[update.id].append(update)
    return {name: Completion.of(each) for name, each in updates.items()}


@pytest.fixture(scope="module")
def solo(bundled):
    """Every answer alone and without a draft."""
    return {request.id: run(Engine(bundled[0], pages=32), [request])[request.id] for request in requests()}


def test_the_bundled_target_keeps_to_its_schemas(solo):
    for name in ("greedy", "sampled", "another", "thinking"):
        text = TOKENIZER.decode(solo[name].token_ids)
        assert solo[name].finish_reason == "stop"
        jsonschema.validate(json.loads(text.rpartition("</mm:think>")[2]), PERSON)
    assert solo["another"].token_ids != solo["sampled"].token_ids
    for name in ("call", "sampled call"):
        _, content, calls = parse(TOKENIZER.decode(solo[name].token_ids), tools=[tool(WEATHER)], size=1000)
        assert content == "" and len(calls) == 1
        jsonschema.validate(json.loads(calls[0][1]), WEATHER)


STATIC = TreeConfig.static([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 0, 0)])


@pytest.mark.parametrize("tree", [TreeConfig.chain(3), TreeConfig(4, 3, 14), STATIC], ids=str)
def test_speculation_changes_nothing_and_pays(bundled, solo, tree):
    crowd = run(Engine(*bundled, tree, pages=64), requests())
    for name, answer in crowd.items():
        assert answer.token_ids == solo[name].token_ids, name
        steps = answer.steps
        assert sum(step.emitted for step in steps) / len(steps) > (1.0 if name == "free" else 1.5), name


@pytest.mark.slow
def test_a_request_that_gave_its_pages_up_goes_on_where_it_was(bundled, solo):
    engine = Engine(*bundled, pages=26)
    crowd = run(engine, requests())
    assert engine.scheduler.preemptions > 0
    assert {name: answer.token_ids for name, answer in crowd.items()} == {
        name: answer.token_ids for name, answer in solo.items()
    }


def test_a_draft_that_knows_none_of_the_allowed_tokens(bundled, solo):
    """It proposes nothing there, and the answers are the same."""
    draft = random_draft(bundled[0], taps=bundled[1].config.taps, draft_vocab_size=64)
    draft.d2t.copy_(torch.arange(64) * 0 + 3000)
    crowd = run(Engine(bundled[0], draft, TreeConfig(3, 2, 6), pages=64), requests())
    assert {name: answer.token_ids for name, answer in crowd.items()} == {
        name: answer.token_ids for name, answer in solo.items()
    }


def test_rejection_sampling_keeps_to_the_grammar(bundled, solo):
    crowd = run(Engine(*bundled, pages=64, sampling="rejection"), requests())
    for name in ("greedy", "call"):
        assert crowd[name].token_ids == solo[name].token_ids
    jsonschema.validate(json.loads(TOKENIZER.decode(crowd["sampled"].token_ids)), PERSON)


def test_drafts_keep_to_the_grammar(bundled):
    """No forbidden token is ever verified, up to the end of the answer."""
    engine = Engine(*bundled, TreeConfig(4, 3, 16), pages=32)
    request = requests()[1]
    verify, checked = engine.runner._verify, 0

    def checking(sequences, trees):
        nonlocal checked
        answer = sequences[0].token_ids[sequences[0].prompt_length :]
        for path in trees[0].paths():
            *before, token = path or (None,)
            if path and EOS not in before:
                assert token in allowed(Constraint(request.grammar), answer + before)
                checked += 1
        return verify(sequences, trees)

    engine.runner._verify = checking
    run(engine, [request])
    assert checked > 20
