"""What the client tests ask for, and servers of the bundled target with its draft and without."""

import contextlib
from collections.abc import Iterator
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from serve.load import EngineOptions, load_engine
from serve.server import make_service
from tests.serve.http_client import serving

QUESTION = "Describe a person as JSON."


class Address(BaseModel):
    model_config = ConfigDict(extra="forbid")
    street: str = Field(max_length=12)
    number: int = Field(ge=1, le=999)


class Person(BaseModel):
    """A person."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=12)
    mood: Literal["happy", "sad"]
    address: Address
    nicknames: list[Literal["Al", "Bo"]] = Field(max_length=2)
    age: int | None = Field(ge=0, le=150)


class Weather(BaseModel):
    """Looks up the weather."""

    model_config = ConfigDict(extra="forbid")
    city: str = Field(max_length=12)
    days: int = Field(ge=1, le=9)


@contextlib.contextmanager
def both_servers() -> Iterator[tuple[str, str]]:
    """URLs of a server that speculates and of one that does not."""
    with contextlib.ExitStack() as stack:
        urls = [
            stack.enter_context(serving(make_service(*load_engine(EngineOptions(draft=draft, device="cpu", pages=64)))))
            for draft in ("eagle3", None)
        ]
        yield urls[0], urls[1]
