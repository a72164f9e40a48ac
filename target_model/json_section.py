"""Typed, strict access to one object of a JSON configuration: every error names the field and where it stands."""

from collections.abc import Iterable
from typing import Any

from target_model.errors import UserError

_NUMBERS = {int: "an integer", float: "a number"}


class Section:
    """One JSON object and the path that leads to it. A section that is absent reads as empty."""

    def __init__(self, values: dict[str, Any], where: str):
        self._values = values
        self._where = where

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def get(self, name: str) -> Any:
        """The value as it stands, None when absent."""
        return self._values.get(name)

    def name(self, field: str) -> str:
        """The field with its path, for messages."""
        return f"{self._where}: {field}" if ": " not in self._where else f"{self._where}.{field}"

    def section(self, name: str) -> "Section":
        """The object `name`, empty when absent or null."""
        values = self._values.get(name) or {}
        if not isinstance(values, dict):
            raise UserError(f"{self.name(name)} must be an object")
        return Section(values, self.name(name))

    def value(self, name: str) -> Any:
        """The value of a required field."""
        if name not in self._values:
            raise UserError(f"{self.name(name)} is missing")
        return self._values[name]

    def integer(self, name: str, *, default: int | None = None, least: int = 1) -> int:
        """An integer of at least `least`."""
        return self._number(name, int, default, least)

    def number(self, name: str, *, default: float | None = None) -> float:
        """A positive number."""
        value = self._number(name, float, default, 0)
        if value == 0:
            raise UserError(f"{self.name(name)} must be above 0")
        return value

    def boolean(self, name: str, *, default: bool) -> bool:
        """A JSON true or false."""
        value = self._values.get(name, default)
        if not isinstance(value, bool):
            raise UserError(f"{self.name(name)} must be true or false, not {value!r}")
        return value

    def text(self, name: str) -> str:
        """A string."""
        value = self.value(name)
        if not isinstance(value, str):
            raise UserError(f"{self.name(name)} must be a string, not {value!r}")
        return value

    def found(self, name: str, kind: type) -> tuple[str, Any]:
        """(name with path, value) of a present numeric field, for `agreed`."""
        return self.name(name), self._number(name, kind, None, 0)

    def flags(self, name: str, length: int) -> tuple[str, tuple[bool, ...]]:
        """(name with path, flags) of a list of `length` zeros and ones."""
        value = self.value(name)
        if not isinstance(value, list) or any(entry not in (0, 1) for entry in value):
            raise UserError(f"{self.name(name)} must be a list of 0 and 1")
        if len(value) != length:
            raise UserError(f"{self.name(name)} has {len(value)} entries, num_hidden_layers is {length}")
        return self.name(name), tuple(bool(entry) for entry in value)

    def kinds(self, name: str, meaning: dict[str, bool]) -> tuple[str, tuple[bool, ...]]:
        """(name with path, flags) of a list of layer kinds."""
        value = self.value(name)
        if not isinstance(value, list) or any(entry not in meaning for entry in value):
            raise UserError(f"{self.name(name)} must be a list of {' and '.join(meaning)}")
        return self.name(name), tuple(meaning[entry] for entry in value)

    def agreed(self, name: str, found: Iterable[tuple[str, Any]]) -> Any:
        """The one value among several spellings: none is an error, and so are two that differ."""
        found = list(found)
        if not found:
            raise UserError(f"{self.name(name)} is missing")
        for other_name, value in found[1:]:
            if value != found[0][1]:
                raise UserError(f"{found[0][0]} and {other_name} disagree")
        return found[0][1]

    def require(self, name: str, allowed: tuple) -> None:
        """An optional field that, when present, must hold one of the supported values."""
        if name in self._values and self._values[name] not in allowed:
            choices = " or ".join(repr(choice) for choice in allowed)
            raise UserError(f"{self.name(name)} is {self._values[name]!r}: only {choices} is supported")

    def _number(self, name: str, kind: type, default: float | None, least: float) -> Any:
        value = self.value(name) if default is None else self._values.get(name, default)
        good = isinstance(value, int) or (kind is float and isinstance(value, float))
        if not good or isinstance(value, bool) or not value >= least:
            raise UserError(f"{self.name(name)} must be {_NUMBERS[kind]} of at least {least}, not {value!r}")
        return kind(value)
