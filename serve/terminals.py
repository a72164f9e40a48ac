"""Bare texts and numbers by their JSON schema, as terminals of llguidance's Lark."""

import json
import re
from collections.abc import Mapping
from typing import Any

from llguidance import LLMatcher, regex_to_lark

from target_model.errors import UserError

TEXT = "/(?s:.*)/"
# Not longer, so that none is too large to be a number.
NUMBERS = {"integer": r"-?(0|[1-9][0-9]{0,17})"}
NUMBERS["number"] = NUMBERS["integer"] + r"(\.[0-9]{1,17})?([eE][+-]?[0-9]{1,2})?"

_CLOCK = r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,9})?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)"
# Whatever the year, so not the 29th of February.
_DAY = r"((0[13578]|1[02])-(0[1-9]|[12]\d|3[01])|(0[469]|11)-(0[1-9]|[12]\d|30)|02-(0[1-9]|1\d|2[0-8]))"
_DATE = rf"\d{{4}}-{_DAY}"
_BYTE = r"(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_WORD = r"[a-zA-Z0-9_+-]{1,32}"
_FORMATS = {
    "date": _DATE,
    "time": _CLOCK,
    "date-time": f"{_DATE}T{_CLOCK}",
    "uuid": r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    "email": rf"{_WORD}(\.{_WORD}){{0,2}}@[a-zA-Z0-9]{{1,63}}(\.[a-zA-Z]{{2,24}}){{1,3}}",
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
}
# In the library's errors: the regex, a line that points into it, and what is wrong with it.
_BAD_REGEX = re.compile(r"regex parse error:\n +(.*)\n.*\nerror: (.*)")
# That of minLength and maxLength.
_LENGTHS = re.compile(r"\(\?s:\.\{\d*,\d*\}\)")


def string_terminal(schema: Mapping[str, Any], *, strict: bool) -> str:
    """The body of the terminal for strings that fit. What has no support is left out, or with `strict` a UserError."""
    parts = []
    shortest, longest = count_of(schema, "minLength") or 0, count_of(schema, "maxLength")
    if longest is not None and longest < shortest:
        raise UserError(f"maxLength {longest} is below minLength {shortest}")
    if shortest or longest is not None:
        parts.append(f"/(?s:.{{{shortest},{'' if longest is None else longest}}})/")
    if schema.get("pattern") is not None:
        parts += _pattern(str(schema["pattern"]), strict)
    if schema.get("format") is not None:
        known = _FORMATS.get(str(schema["format"]))
        if known is None and strict:
            raise UserError(f"format {json.dumps(schema['format'])} is not supported")
        parts += [f"/{regex_to_lark(known, 'dw')}/"] if known else []
    return " & ".join(parts) or TEXT


def count_of(schema: Mapping[str, Any], keyword: str) -> int | None:
    """A length or number of items."""
    value = schema.get(keyword)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
        raise UserError(f"{keyword} must be a number of at least 0")
    return value


def regex_fault(message: str) -> str | None:
    """The library's error as a sentence, None if it is not about a regex."""
    found = _BAD_REGEX.search(message)
    if found and _LENGTHS.fullmatch(found[1]):
        return "minLength or maxLength is too large"
    return found and f"pattern {json.dumps(found[1])} cannot be compiled: {found[2]}"


def _pattern(text: str, strict: bool) -> list[str]:
    """A pattern holds anywhere in the text, unless its ends are fixed."""
    start, end = text.startswith("^"), text.endswith("$") and not text.endswith("\\$")
    inner = text[start : len(text) - end]
    # By itself: what is put around it below would show in the error, and could close what it leaves open.
    problem = regex_fault(LLMatcher.validate_grammar(LLMatcher.grammar_from_regex(text)))
    if (start or end) and "|" in inner:
        # The ends belong to the outer alternatives only.
        problem = problem or f"pattern {json.dumps(text)}: ^ or $ together with | is not supported"
    if problem and strict:
        raise UserError(problem)
    if problem:
        return []
    return [f"/{'' if start else '(?s:.*)'}({regex_to_lark(inner, 'dw')}){'' if end else '(?s:.*)'}/"]
