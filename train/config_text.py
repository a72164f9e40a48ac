"""From a recipe's text and overrides to plain values, and from a validation error to a sentence."""

import difflib
import re
from typing import Any, get_args

import yaml

from target_model.errors import UserError


class _Loader(yaml.SafeLoader):
    """YAML in which 3e-4 is a number (YAML 1.1 wants a dot) and a repeated key is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise UserError(f"configuration key {key} is given twice (line {node.start_mark.line + 1} on)")
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d[\d_]*)(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def parse_yaml(text: str, where: str) -> Any:
    """Plain values; UserError for text that is not YAML."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise UserError(f"{where} is not valid YAML: {' '.join(str(error).split())}") from None


def apply_override(values: dict[str, Any], override: str) -> str:
    """Puts the value of `section.key=value` into nested values, and returns the key."""
    key, equals, text = override.partition("=")
    key = key.strip()
    parts = key.split(".")
    if not equals or not all(parts):
        raise UserError(f"override {override!r} is not of the form section.key=value")
    for part in parts[:-1]:
        values = values.setdefault(part, {})
        if not isinstance(values, dict):
            raise UserError(f"override {key}: {part} is not a section")
    values[parts[-1]] = parse_yaml(text, f"override {key}")
    return key


def _section_of(annotation: Any) -> Any:
    """The section in an annotation: itself, or what a list or an optional one holds."""
    while get_args(annotation):
        annotation = get_args(annotation)[0]
    return annotation


def sentence(error: dict[str, Any], section: Any) -> str:
    """A validation error of pydantic as one line that names the key."""
    # Unions add the branch's type to the location; field names are what the user wrote.
    parts = [str(part) for part in error["loc"] if str(part) not in ("str", "list[str]")]
    key = ".".join(parts)
    if error["type"] == "extra_forbidden":
        for part in (part for part in parts[:-1] if not part.isdigit()):
            section = _section_of(section.model_fields[part].annotation)
        close = difflib.get_close_matches(parts[-1], section.model_fields, n=1)
        return f"unknown key {key}" + (f" (did you mean {close[0]}?)" if close else "")
    if error["type"] == "missing":
        return f"key {key} is missing"
    message = error["msg"].removeprefix("Value error, ")
    return f"{key}: {message[0].lower()}{message[1:]}, not {error['input']!r}" if parts else message
