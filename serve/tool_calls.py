"""M3's tool calls, read while they arrive.

Each tag stands behind the namespace token: <tool_call>, <invoke name="f">, <argument>value</argument> ..., </invoke>,
</tool_call>. Objects are nested tags, list entries <item> tags. An argument is passed on, as JSON, when its tag
closes.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

NAMESPACE = "]<]minimax[>["
_TAG = re.compile(r"<(/?)([^>]*)>(.*)", re.DOTALL)
_INVOKE = re.compile(r'invoke\s+name="(.*)"\s*', re.DOTALL)
_MIXED = "$text"  # the key of text that stands between the tags of an object


@dataclass(frozen=True)
class CallStart:
    index: int
    name: str


@dataclass(frozen=True)
class CallArguments:
    """A piece of a call's arguments; all pieces joined are one JSON object."""

    index: int
    json: str


@dataclass
class _Node:
    """An open tag: its text so far, and the closed tags inside it."""

    name: str
    text: str
    children: list[tuple[str, Any]] = field(default_factory=list)


class ToolCallParser:
    """Takes the text behind each namespace token and returns what it completes.

    `tools` are the definitions offered; their schemas say which type a value has. Text behind a namespace token that
    is no tag of the syntax comes back as ordinary text.
    """

    def __init__(self, tools: list[Mapping[str, Any]]):
        functions = [tool["function"] for tool in tools]
        self._schemas = {function["name"]: function.get("parameters") or {} for function in functions}
        self._inside = False  # of <tool_call>
        self._function: str | None = None  # of the open <invoke>
        self._open: list[_Node] = []
        self._arguments = 0  # passed on for the open <invoke>
        self.calls = 0

    @property
    def complete_calls(self) -> int:
        """Calls whose arguments are whole: all but one that is still open."""
        return self.calls - (self._function is not None)

    def cuts_tag(self, piece: str) -> bool:
        """Whether an answer that ends with this piece ends within a tag: no text, then."""
        return ">" not in piece and piece.startswith("<") if self._inside else "<tool_call>".startswith(piece)

    def take(self, piece: str) -> list[CallStart | CallArguments | str]:
        """`piece`: all text between one namespace token and the next special token."""
        match = _TAG.match(piece)
        if match is None:
            return self._text(piece)
        closing, name, text = bool(match[1]), match[2], match[3]
        if not self._inside:
            if closing or name != "tool_call":
                return [piece]
            self._inside = True
            return self._text(text)
        if self._function is None:
            return self._between_calls(closing, name, text, piece)
        if closing and name == "invoke":
            return [*self._end_call(), *self._text(text)]
        if closing:
            return self._close_tag(text)
        self._open.append(_Node(name, text))
        return []

    def finish(self) -> list[CallStart | CallArguments | str]:
        """Completes an open call when the model ended its turn inside one."""
        return self._end_call() if self._function is not None else []

    def _between_calls(self, closing: bool, name: str, text: str, piece: str) -> list[CallStart | CallArguments | str]:
        if closing and name == "tool_call":
            self._inside = False
            return [text] if text.strip() else []
        invoke = None if closing else _INVOKE.fullmatch(name)
        if invoke is None:
            return [piece]
        self._function = invoke[1]
        self._arguments = 0
        self.calls += 1
        return [CallStart(self.calls - 1, invoke[1]), *self._text(text)]

    def _close_tag(self, text: str) -> list[CallStart | CallArguments | str]:
        """Closes the innermost tag, whatever name the closing tag has."""
        if not self._open:
            return self._text(text)
        node = self._open.pop()
        if self._open:
            self._open[-1].children.append((node.name, node))
            self._open[-1].text += text
            return []
        root = self._schemas.get(self._function or "", {})
        try:
            value = json.dumps(_value(node, _Schema.of(root, root).property(node.name), root), ensure_ascii=False)
        except RecursionError:  # tags or brackets nested by the hundred: no value that anybody meant
            value = json.dumps(node.text, ensure_ascii=False)
        start = "{" if self._arguments == 0 else ", "
        self._arguments += 1
        fragment = f"{start}{json.dumps(node.name, ensure_ascii=False)}: {value}"
        return [CallArguments(self.calls - 1, fragment), *self._text(text)]

    def _end_call(self) -> list[CallStart | CallArguments | str]:
        events: list[CallStart | CallArguments | str] = []
        while self._open:
            events += self._close_tag("")
        events.append(CallArguments(self.calls - 1, "{}" if self._arguments == 0 else "}"))
        self._function = None
        return events

    def _text(self, text: str) -> list[CallStart | CallArguments | str]:
        """Text where only tags should stand: white space is layout, anything else is the model's text."""
        if self._open:
            self._open[-1].text += text
            return []
        return [text] if text.strip() or not self._inside else []


@dataclass(frozen=True)
class _Schema:
    """What a JSON schema says about one value, with references followed and alternatives put together."""

    types: frozenset[str]
    properties: Mapping[str, Any]
    items: Any
    others: Any  # of properties that are not named

    @staticmethod
    def of(schema: Any, root: Mapping[str, Any], depth: int = 0) -> "_Schema":
        if not isinstance(schema, Mapping) or depth > 16:
            return _Schema(frozenset(), {}, None, None)
        parts = [_Schema.of(reference_target(schema["$ref"], root), root, depth + 1)] if "$ref" in schema else []
        for key in ("anyOf", "oneOf", "allOf"):
            branches = schema.get(key)
            parts += [_Schema.of(branch, root, depth + 1) for branch in branches] if isinstance(branches, list) else []
        given = schema.get("type", [])
        types = {given} if isinstance(given, str) else set(given)
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        for value in values if isinstance(values, list) and "type" not in schema else []:
            types |= _types_of(value)
        properties: dict[str, Any] = {}
        for part in parts:
            types |= part.types
            for name, value in part.properties.items():
                properties[name] = {"anyOf": [properties[name], value]} if name in properties else value
        own = schema.get("properties")
        properties.update(own if isinstance(own, Mapping) else {})
        items = schema.get("items", next((part.items for part in parts if part.items is not None), None))
        others = next((part.others for part in parts if part.others is not None), None)
        return _Schema(frozenset(types), properties, items, schema.get("additionalProperties", others))

    def property(self, name: str) -> Any:
        """The schema of a property, also of one that is not named."""
        return self.properties.get(name, self.others)


def reference_target(reference: Any, root: Mapping[str, Any]) -> Any:
    """The schema a local reference (#/$defs/Name) points to, or None."""
    found: Any = root
    for step in str(reference).removeprefix("#").strip("/").split("/"):
        found = found.get(step) if isinstance(found, Mapping) else None
    return found


def _value(node: _Node, schema: Any, root: Mapping[str, Any]) -> Any:
    """The JSON value of a closed tag. The schema's type decides; where it says nothing, tags and JSON literals do."""
    known = _Schema.of(schema, root)
    if node.children:
        if all(name == "item" for name, _ in node.children) and "object" not in known.types:
            return [_value(child, known.items, root) for _, child in node.children]
        value = {name: _value(child, known.property(name), root) for name, child in node.children}
        return {**value, _MIXED: node.text} if node.text.strip() else value
    if node.text == "null" and "null" in known.types:
        return None
    if "string" in known.types:
        return node.text
    if not node.text:
        return [] if "array" in known.types else {} if "object" in known.types else ""
    try:
        value = json.loads(node.text, parse_constant=_refuse, parse_float=_finite)
    except ValueError:
        return node.text
    return value if not known.types or _types_of(value) & known.types else node.text


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        _refuse(text)
    return value


def _types_of(value: Any) -> set[str]:
    """JSON schema types that a value is of."""
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int | float):
        return {"number", "integer"} if isinstance(value, int) or value.is_integer() else {"number"}
    return {{str: "string", list: "array", dict: "object", type(None): "null"}[type(value)]}
