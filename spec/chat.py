"""`spec chat`: a conversation in the terminal, every token coloured by its depth in the draft tree."""

import asyncio
import sys
import time
import unicodedata
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from rich.console import Console
from rich.style import Style
from rich.text import Text

from spec.streaming import ServerError, connect, find_model, stream_chat
from target_model.errors import UserError

# Tokens of the target's own, then of depth 1, 2, ... in the tree; the last one also for all that are deeper.
STYLES = ("", "black on #c9f0d8", "black on #a5e3bf", "black on #7fd4a4", "black on #58c389", "black on #33b06e")
HELP = "Ctrl-C stops an answer; /new begins another conversation; /quit or Ctrl-D ends."


@dataclass(frozen=True)
class Piece:
    """A token of an answer, or with depth None a piece of text of which nothing more is known."""

    text: str
    depth: int | None
    reasoning: bool = False


@dataclass
class Turn:
    """What an answer consisted of so far. accepted and drafted: None where nothing is said of them."""

    text: str = ""
    tokens: int = 0
    steps: int = 0
    accepted: int | None = None
    drafted: int | None = None
    times: list[float] = field(default_factory=list)

    def take(self, piece: Piece) -> None:
        """The first token comes from the prompt; each verify step after it ends with one of depth 0."""
        self.text += "" if piece.reasoning else piece.text
        self.tokens += 1
        self.steps += piece.depth == 0 and self.tokens > 1
        self.times.append(time.perf_counter())

    def line(self) -> str:
        """The figures of a finished answer."""
        parts = [f"{self.tokens} tokens" if self.steps else f"{self.tokens} pieces"]
        seconds = self.times[-1] - self.times[0] if self.times else 0.0
        if seconds > 0:
            parts.append(f"{(self.tokens - 1) / seconds:.1f} a second")
        if self.steps:
            parts.append(f"acceptance length {(self.tokens - 1) / self.steps:.2f}")
        if self.drafted:
            parts.append(f"{self.accepted} of {self.drafted} drafted tokens accepted")
        return ", ".join(parts)


@dataclass(frozen=True)
class Sampling:
    """How answers are sampled; None: the model's default. thinking: a mode of M3's chat template."""

    tokens: int = 512
    temperature: float | None = None
    seed: int | None = None
    thinking: str = "disabled"


class Speaker(Protocol):
    """Whoever answers. Pieces as they come; at the end `turn` has the counts of drafted tokens, where known."""

    name: str

    def answer(self, messages: list[dict[str, str]], turn: Turn) -> AsyncIterator[Piece]: ...


class Remote:
    """A server that speaks OpenAI's API. Depths are asked for, and left out for good when it does not know them."""

    def __init__(self, url: str, api_key: str | None, model: str | None, sampling: Sampling, timeout: float = 600.0):
        self._url, self._api_key, self._timeout, self._sampling = url, api_key, timeout, sampling
        self._ours = True
        self.name = asyncio.run(self._find(model))

    async def _find(self, model: str | None) -> str:
        async with connect(self._url, self._api_key, self._timeout) as http:
            return await find_model(http, model)

    async def answer(self, messages: list[dict[str, str]], turn: Turn) -> AsyncIterator[Piece]:
        optional = self._ours and self._sampling.thinking == "disabled"
        async with connect(self._url, self._api_key, self._timeout) as http:
            for ours in (True, False) if optional else (self._ours,):
                try:
                    async for chunk in stream_chat(http, self._body(messages, ours)):
                        for piece in _pieces(chunk, turn):
                            yield piece
                    self._ours = ours
                    return
                except ServerError as error:
                    if not optional or not ours or turn.tokens or not str(error).startswith(("400", "422")):
                        raise
                except (AttributeError, KeyError, TypeError) as error:
                    raise ServerError(f"a chunk of the stream is not OpenAI's: {error!r}") from None

    def _body(self, messages: list[dict[str, str]], ours: bool) -> dict[str, Any]:
        sampling = self._sampling
        given = {"temperature": sampling.temperature, "seed": sampling.seed}
        return {
            "model": self.name,
            "messages": messages,
            "max_tokens": sampling.tokens,
            "stream_options": {"include_usage": True},
            **{name: value for name, value in given.items() if value is not None},
            **({"draft_tokens": True, "thinking_mode": sampling.thinking} if ours else {}),
        }


def _pieces(chunk: dict[str, Any], turn: Turn) -> list[Piece]:
    details = (chunk.get("usage") or {}).get("completion_tokens_details") or {}
    accepted, rejected = (details.get(f"{kind}_prediction_tokens") for kind in ("accepted", "rejected"))
    if accepted is not None and rejected is not None:
        turn.accepted, turn.drafted = accepted, accepted + rejected
    pieces = []
    for choice in chunk.get("choices") or []:
        delta = choice.get("delta") or {}
        reasoning = delta.get("reasoning_content") or delta.get("reasoning")
        if "draft_tokens" in choice:
            pieces += [Piece(token["text"], token["depth"], bool(reasoning)) for token in choice["draft_tokens"]]
        else:
            pieces += [Piece(text, None, text is reasoning) for text in (reasoning, delta.get("content")) if text]
    return pieces


def converse(
    speaker: Speaker,
    console: Console,
    read: Callable[[], str] = input,
    settings: tuple[str, ...] = (),
) -> None:
    """Questions from `read` until it raises EOFError, and their answers. An error ends its answer, not the talk."""
    console.print(_legend(speaker.name))
    for line in (*settings, HELP):
        console.print(line, style="dim", highlight=False, markup=False)
    messages: list[dict[str, str]] = []
    while True:
        if sys.stdin.isatty():
            console.print("\n> ", style="bold", end="")
        try:
            text = read().strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        if text == "/quit":
            return
        if text == "/new":
            messages = []
            console.print("a new conversation", style="dim")
        elif text:
            messages = _ask(speaker, console, [*messages, {"role": "user", "content": text}])


def _ask(speaker: Speaker, console: Console, messages: list[dict[str, str]]) -> list[dict[str, str]]:
    """Prints an answer as it comes. The conversation with it, or without the question when there is none."""
    turn = Turn()

    async def listen() -> None:
        async for piece in speaker.answer(messages, turn):
            turn.take(piece)
            style = Style.parse(STYLES[min(piece.depth or 0, len(STYLES) - 1)])
            console.print(
                Text(printable(piece.text), style + Style(dim=piece.reasoning, italic=piece.reasoning)), end=""
            )

    problem = None
    try:
        asyncio.run(listen())
    except KeyboardInterrupt:
        problem = "stopped"
    except UserError as error:
        problem = str(error)
    console.print()
    if turn.tokens:
        console.print(turn.line(), style="dim", highlight=False)
    if problem is not None:
        console.print(problem, style="red", highlight=False, markup=False)
    return [*messages, {"role": "assistant", "content": turn.text}] if turn.text else messages[:-1]


def printable(text: str) -> str:
    """Without control characters, with which an answer could take over the terminal."""
    return "".join("\ufffd" if unicodedata.category(c) == "Cc" and c not in "\n\t" else c for c in text)


def _legend(name: str) -> Text:
    text = Text.assemble((name, "bold"), "   plain: the target's own; coloured: drafted and accepted, at depth ")
    for depth, style in enumerate(STYLES[1:], 1):
        text.append(f" {depth}{'+' if depth == len(STYLES) - 1 else ''} ", style)
    return text
