"""M3's tool calls as a grammar, in llguidance's Lark: the syntax that `serve/tool_calls.py` reads, with values that
read back as what the tool's JSON schema allows.

A strict tool's schema is kept to the letter or refused. Of other tools the grammar keeps names and types, and leaves
out what it cannot express. Texts stand bare between tags, so a value of several types follows the reader: where a
string is allowed, any text is a string.
"""

import json
from collections.abc import Mapping
from typing import Any

from serve.terminals import NUMBERS, TEXT, count_of, string_terminal
from serve.tool_calls import reference_target
from target_model.errors import UserError

_ANNOTATIONS = {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"}
_ANNOTATIONS |= {"$defs", "definitions", "$schema", "$id", "$comment"}
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_KEYWORDS = {
    "string": {"pattern", "minLength", "maxLength", "format"},
    "integer": set(_BOUNDS),
    "number": set(_BOUNDS),
    "boolean": set(),
    "null": set(),
    "array": {"items", "minItems", "maxItems"},
    "object": {"properties", "required", "additionalProperties"},
}


class Rules:
    """Rules of one Lark grammar, numbered as they come."""

    def __init__(self):
        self._rules: list[str] = []

    def add(self, body: str, *, terminal: bool = False) -> str:
        """The name of a new rule; a terminal is one regular expression, matched as a whole."""
        name = self.reserve(terminal=terminal)
        self.define(name, body)
        return name

    def reserve(self, *, terminal: bool = False) -> str:
        self._rules.append("")
        return f"{'T' if terminal else 'r'}{len(self._rules)}"

    def define(self, name: str, body: str) -> None:
        self._rules[int(name[1:]) - 1] = f"{name}: {body}"

    def lark(self, start: str) -> str:
        return "\n".join([f"start: {start}", *self._rules])


def tool_calls_rule(rules: Rules, tools: list[dict[str, Any]], namespace: int, *, several: bool) -> str:
    """The rule of a whole answer that calls one of `tools` (definitions as in a request), or `several` times some.
    UserError says what is wrong with a schema.
    """
    calls = [_call(rules, tool["function"], namespace) for tool in tools]
    call = rules.add(" | ".join(calls))
    tag = f"<[{namespace}]>"
    return rules.add(f'{tag} "<tool_call>\\n" {call}{"+" if several else ""} {tag} "</tool_call>"')


def literal(text: str) -> str:
    return json.dumps(text)


def _call(rules: Rules, function: Mapping[str, Any], namespace: int) -> str:
    schema, strict = function.get("parameters") or {}, bool(function.get("strict"))
    values = _Values(rules, schema, namespace, strict=strict)
    name = literal(f'<invoke name="{function["name"]}">')
    arguments = values.arguments()
    return rules.add(f'<[{namespace}]> {name} {arguments} <[{namespace}]> "</invoke>\\n"')


class _Values:
    """Rules for what stands between the tags of one tool's arguments."""

    def __init__(self, rules: Rules, root: Mapping[str, Any], namespace: int, *, strict: bool):
        self._rules, self._root, self._strict = rules, root, strict
        self._tag = f"<[{namespace}]>"
        self._references: dict[str, str] = {}
        self._any: str | None = None
        self._text: str | None = None

    def arguments(self) -> str:
        root = self._resolved(self._root)
        if root.get("type", "object") != "object":
            raise UserError("must describe an object")
        self._check(root, _KEYWORDS["object"] | {"type"})
        return self._object(root)

    def _value(self, schema: Any) -> str:
        if schema is True or schema is None or schema == {}:
            return self._anything()
        if not isinstance(schema, Mapping):
            raise UserError(f"{json.dumps(schema)} is not a schema that a value can have")
        if "$ref" in schema:
            return self._reference(schema)
        for keyword in ("anyOf", "oneOf", "allOf"):
            if keyword in schema:
                return self._union(schema, keyword)
        if "enum" in schema or "const" in schema:
            return self._choice(schema)
        types = schema.get("type")
        if types is None:
            types = next(([kind] for kind in ("object", "array") if _KEYWORDS[kind] & schema.keys()), None)
        if types is None:
            self._check(schema, set())
            return self._anything()
        types = [types] if isinstance(types, str) else types
        if not isinstance(types, list) or not types or not set(map(str, types)) <= _KEYWORDS.keys():
            raise UserError(f"{json.dumps(schema.get('type'))} is not a type")
        self._check(schema, {"type"}.union(*(_KEYWORDS[kind] for kind in types)))
        if len(types) == 1:
            return self._single(types[0], schema)
        return self._alternatives(
            [{"type": kind} | {key: schema[key] for key in _KEYWORDS[kind] & schema.keys()} for kind in types]
        )

    def _single(self, kind: str, schema: Mapping[str, Any]) -> str:
        if kind == "string":
            return self._string(schema)
        if kind == "array":
            return self._array(schema)
        if kind == "object":
            return self._object(schema)
        if kind == "null":
            return '"null"'
        bounds = {key: schema[key] for key in _BOUNDS if key in schema}
        if kind in NUMBERS and not bounds:
            return self._rules.add(f"/{NUMBERS[kind]}/", terminal=True)
        return self._rules.add(f"%json {json.dumps({'type': kind} | bounds)}")

    def _alternatives(self, branches: list[Any]) -> str:
        """One rule for all branches, less what the reader would take for a value of another type."""
        kinds = [_reads_as(self._resolved(branch)) for branch in branches]
        hidden = ({"literal"} if "string" in kinds else set()) | ({"array"} if "object" in kinds else set())
        rules = []
        for kind, branch in zip(kinds, branches, strict=True):
            if kind == "array" and "string" in kinds and kind not in hidden:
                rules.append(self._array(self._resolved(branch), at_least=1))  # without items it is an empty text
            elif kind not in hidden:
                rules.append(self._value(branch))
        return self._rules.add(" | ".join(rules))

    def _string(self, schema: Mapping[str, Any]) -> str:
        body = string_terminal(schema, strict=self._strict)
        if body != TEXT:
            return self._rules.add(body, terminal=True)
        if self._text is None:
            self._text = self._rules.add(TEXT, terminal=True)
        return self._text

    def _array(self, schema: Mapping[str, Any], at_least: int = 0) -> str:
        least, most = max(count_of(schema, "minItems") or 0, at_least), count_of(schema, "maxItems")
        if most is not None and most < least:
            raise UserError(f"maxItems {most} is below minItems {least}")
        item = self._tagged("item", self._value(schema.get("items")))
        return self._rules.add(f"{item}{{{least},{'' if most is None else most}}}")

    def _object(self, schema: Mapping[str, Any]) -> str:
        properties, required = schema.get("properties") or {}, schema.get("required") or []
        if not isinstance(properties, Mapping) or not isinstance(required, list):
            raise UserError("properties must be an object and required a list")
        others = schema.get("additionalProperties", True)
        fields = dict(properties) | {name: others for name in required if name not in properties}
        if not fields and others is not False:
            return self._rules.add(f"{self._tagged_freely(self._value(others))}*")
        tags = [
            self._tagged(name, self._value(value)) + ("" if name in required else "?") for name, value in fields.items()
        ]
        return self._rules.add(" ".join(tags) or '""')

    def _tagged(self, name: Any, value: str) -> str:
        if not isinstance(name, str) or not name or name.startswith("/") or ">" in name:
            raise UserError(f"{json.dumps(name)} cannot be the name of an argument")
        opening, closing = literal(f"<{name}>"), literal(f"</{name}>")
        return self._rules.add(f"{self._tag} {opening} {value} {self._tag} {closing}")

    def _tagged_freely(self, value: str) -> str:
        """A value between tags of any name."""
        name, tag = self._rules.add("/[^<>\\/][^<>]{0,63}/", terminal=True), self._tag
        return self._rules.add(f'{tag} "<" {name} ">" {value} {tag} "</" {name} ">"')

    def _reference(self, schema: Mapping[str, Any]) -> str:
        self._check(schema, {"$ref"})
        reference = str(schema["$ref"])
        if reference not in self._references:
            self._references[reference] = name = self._rules.reserve()
            self._rules.define(name, self._value(self._target(reference)))
        return self._references[reference]

    def _target(self, reference: Any) -> Mapping[str, Any]:
        if not str(reference).strip("#/"):
            raise UserError(
                f"$ref {json.dumps(reference)}, the whole schema, is not supported: name a part, #/$defs/..."
            )
        target = reference_target(reference, self._root)
        if not isinstance(target, Mapping):
            raise UserError(f"$ref {json.dumps(reference)} leads nowhere within the schema")
        return target

    def _union(self, schema: Mapping[str, Any], keyword: str) -> str:
        self._check(schema, {keyword})
        branches = schema[keyword]
        if not isinstance(branches, list) or not branches:
            raise UserError(f"{keyword} must be a list that is not empty")
        if keyword != "anyOf" and len(branches) > 1 and self._strict:
            raise UserError(f"{keyword} is not supported")
        if keyword == "allOf" and len(branches) > 1:
            return self._anything()
        flat = self._flat(branches)
        self._check_shared(flat)
        return self._alternatives(flat)

    def _flat(self, branches: list[Any], depth: int = 0) -> list[Any]:
        """The branches with those of an anyOf among them in its place."""
        flat: list[Any] = []
        for branch in branches:
            inner = self._resolved(branch).get("anyOf")
            flat += self._flat(inner, depth + 1) if isinstance(inner, list) and depth < 8 else [branch]
        return flat

    def _resolved(self, branch: Any) -> Mapping[str, Any]:
        for _ in range(16):
            if branch is True:
                return {}
            if not isinstance(branch, Mapping):
                raise UserError(f"{json.dumps(branch)} is not a schema that a value can have")
            if "$ref" not in branch:
                break
            branch = self._target(branch["$ref"])
        return branch

    def _check_shared(self, branches: list[Any]) -> None:
        """A property that several alternatives have is read by all of its schemas together."""
        seen: dict[str, str] = {}
        for branch in branches:
            for name, value in (self._resolved(branch).get("properties") or {}).items():
                kind = _reads_as(self._resolved(value))
                if seen.setdefault(name, kind) != kind and self._strict:
                    raise UserError(f"{json.dumps(name)} has different types in alternatives of anyOf")

    def _choice(self, schema: Mapping[str, Any]) -> str:
        self._check(schema, {"enum", "const", "type"})
        values = [schema["const"]] if "const" in schema else schema["enum"]
        if not isinstance(values, list) or not values:
            raise UserError("enum must be a list that is not empty")
        plain = [value for value in values if not isinstance(value, list | dict)]
        texts = [value for value in plain if isinstance(value, str)]
        mixed = texts and any(value is not None and not isinstance(value, str) for value in plain)
        if len(plain) < len(values) or (mixed and self._strict):
            raise UserError("enum of values whose types cannot be told apart")
        shown = texts + ["null"] * (None in plain) if texts else [json.dumps(value) for value in plain]
        return self._rules.add(" | ".join(map(literal, shown)), terminal=True)

    def _anything(self) -> str:
        """Any text, or nested tags."""
        if self._any is None:
            self._any = self._rules.reserve()
            text = self._rules.add(TEXT, terminal=True)
            self._rules.define(self._any, f"{text} | {self._tagged_freely(self._any)}+")
        return self._any

    def _check(self, schema: Mapping[str, Any], known: set[str]) -> None:
        unknown = schema.keys() - known - _ANNOTATIONS
        if unknown and self._strict:
            raise UserError(f"{json.dumps(min(unknown))} is not supported here with strict true")


def _reads_as(schema: Mapping[str, Any]) -> str:
    """What the reader makes of a value's text or tags."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        kinds = {"string" if isinstance(value, str) else "null" if value is None else "literal" for value in values}
    else:
        types = schema.get("type")
        kinds = set(map(str, types)) if isinstance(types, list) else {str(types)}
        kinds = {"literal" if kind in ("integer", "number", "boolean") else kind for kind in kinds}
    return next((kind for kind in ("string", "object", "array", "literal", "null") if kind in kinds), "any")
