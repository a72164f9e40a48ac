"""Conversations before the chat template: one shape for all callers, and text that never turns into a special token."""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from target_model.errors import UserError

ROLES = ("root", "system", "developer", "user", "assistant", "tool")
THINKING_MODES = ("enabled", "disabled", "adaptive")
THINK_OPEN, THINK_CLOSE = "<mm:think>", "</mm:think>"
_REASONING_FIELDS = ("reasoning_content", "reasoning")


def normalise_messages(messages: list[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """OpenAI-style messages in the shape the template reads; UserError names the field that is wrong.

    Reasoning comes as `reasoning_content` (or `reasoning`), or as an assistant content that opens with `<mm:think>`
    and closes it. The markers anywhere else are ordinary text. Arguments of tool calls, JSON text on the wire, become
    objects.
    """
    if not isinstance(messages, list) or not messages:
        raise UserError("messages: must be a list with at least one message")
    return [_normalise_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _normalise_message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise UserError(f"{where}: must be an object")
    role = message.get("role")
    if role not in ROLES:
        raise UserError(f"{where}.role: unknown role {role!r}, must be one of {', '.join(ROLES)}")
    if role == "root" and where != "messages[0]":
        raise UserError(f"{where}.role: only the first message can have the role root")
    content = _normalise_content(message.get("content"), f"{where}.content")
    if role != "assistant":
        if content is None:
            raise UserError(f"{where}.content: must not be null for role {role}")
        return {"role": role, "content": content}
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise UserError(f"{where}.tool_calls: must be a list")
    reasoning = _reasoning_of(message, where)
    if not reasoning and isinstance(content, str) and content.startswith(THINK_OPEN) and THINK_CLOSE in content:
        reasoning, content = content.removeprefix(THINK_OPEN).split(THINK_CLOSE, 1)
    return {
        "role": role,
        "content": content,
        "reasoning_content": reasoning,
        "tool_calls": [_normalise_call(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(calls)],
    }


def _reasoning_of(message: Mapping[str, Any], where: str) -> str:
    given = {name: message[name] for name in _REASONING_FIELDS if message.get(name)}
    if any(not isinstance(value, str) for value in given.values()):
        raise UserError(f"{where}.{next(iter(given))}: must be a string")
    if len(set(given.values())) > 1:
        raise UserError(f"{where}: {' and '.join(given)} differ, send one of them")
    return next(iter(given.values()), "")


def _normalise_content(content: Any, where: str) -> str | list[dict[str, Any]] | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise UserError(f"{where}: must be a string, a list of parts or null")
    parts: list[dict[str, Any]] = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text":
            if not isinstance(part.get("text"), str):
                raise UserError(f"{where}[{index}].text: must be a string")
            parts.append({"type": "text", "text": part["text"]})
        elif kind in ("image", "image_url"):
            parts.append({"type": "image"})
        elif kind in ("video", "video_url"):
            parts.append({"type": "video"})
        else:
            known = "text, image, image_url, video or video_url"
            raise UserError(f"{where}[{index}].type: unknown content part {kind!r}, must be {known}")
    return parts


def _normalise_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UserError(f"{where}.function.name: must be a string")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError as error:
            raise UserError(f"{where}.function.arguments: is not JSON ({error})") from None
    if not isinstance(arguments or {}, Mapping):
        raise UserError(f"{where}.function.arguments: must be an object")
    return {"function": {"name": function["name"], "arguments": dict(arguments or {})}}


def normalise_tools(tools: list[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    """Tool definitions as `{"function": {...}}`; UserError names the entry that is wrong."""
    result: list[dict[str, Any]] = []
    for index, tool in enumerate(tools or []):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise UserError(f"tools[{index}].function.name: must be a string")
        result.append({"type": "function", "function": dict(function)})
    return result


class TextGuard:
    """Marks callers' text so that, once rendered, only what the template itself wrote is read as a special token.

    A guard (the noncharacters U+FDD0 U+FDD2) is put inside every special-token string of a text, and at its ends
    where the text could complete one together with what stands beside it. `open` takes the guards out again: the text
    is unchanged.
    """

    _MARK, _ESCAPED, _GUARD = "\ufdd0", "\ufdd0\ufdd1", "\ufdd0\ufdd2"
    _CODE = re.compile("\ufdd0([\ufdd1\ufdd2])")

    def __init__(self, special_tokens: Iterable[str]):
        tokens = list(special_tokens)
        if any(len(token) < 2 for token in tokens):
            raise UserError("the tokenizer has a special token of one character, which no text could be guarded from")
        self._special = tokens
        self._longest = max(map(len, tokens), default=0)
        self._heads = {token[:end] for token in tokens for end in range(1, len(token))}
        self._tails = {token[start:] for token in tokens for start in range(1, len(token))}
        self._inner = {tail[:end] for tail in self._tails for end in range(1, len(tail))}

    def close_messages(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Normalised messages with every text of the caller guarded; the structure is ours and stays."""
        return [self._close_message(message) for message in messages]

    def close_tools(self, tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Tool definitions, guarded inside only: they stand between quotes, and templates look their keys up."""
        return [self._close(tool, ends=False) for tool in tools]

    def _close_message(self, message: dict[str, Any]) -> dict[str, Any]:
        content = message["content"]
        if isinstance(content, list):
            content = [{**part, "text": self._close(part["text"])} if "text" in part else part for part in content]
        result = {"role": message["role"], "content": self._close(content) if isinstance(content, str) else content}
        if message["role"] == "assistant":
            result["reasoning_content"] = self._close(message["reasoning_content"])
            result["tool_calls"] = [
                {"function": self._close_call(**call["function"])} for call in message["tool_calls"]
            ]
        return result

    def _close_call(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        return {"name": self._close(name), "arguments": self._close(arguments)}

    def _close(self, value: Any, ends: bool = True) -> Any:
        """A nested value with every string in it guarded, keys too."""
        if isinstance(value, str):
            return self._close_text(value, ends)
        if isinstance(value, Mapping):
            return {self._close_text(key, ends): self._close(entry, ends) for key, entry in value.items()}
        if isinstance(value, list):
            return [self._close(entry, ends) for entry in value]
        return value

    def _close_text(self, text: str, ends: bool) -> str:
        text = text.replace(self._MARK, self._ESCAPED)
        if not text:
            return text
        sizes = range(1, min(self._longest, len(text)) + 1)
        before = ends and (text in self._inner or any(text[:size] in self._tails for size in sizes))
        after = ends and (text in self._inner or any(text[-size:] in self._heads for size in sizes))
        for token in self._special:
            # Again until none is left: a token may overlap with itself.
            while token in text:
                text = text.replace(token, token[0] + self._GUARD + token[1:])
        return (self._GUARD if before else "") + text + (self._GUARD if after else "")

    def open(self, text: str) -> str:
        """The text without guards."""
        return self._CODE.sub(lambda match: self._MARK if match[1] == "\ufdd1" else "", text)
