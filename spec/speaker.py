"""Who answers in `spec chat`: a server that speaks OpenAI's API, and what its answers consist of."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from spec.streaming import ServerError, connect, find_model, stream_chat

Message = dict[str, Any]


@dataclass(frozen=True)
class Piece:
    """A token of an answer, or with depth None a piece of text of which nothing more is known."""

    text: str
    depth: int | None = None
    reasoning: bool = False


@dataclass
class Turn:
    """What an answer consists of so far. steps, accepted, drafted and `tree`, the last one verified: None where the
    server says nothing of them. cut: the length ended it.
    """

    text: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    pieces: int = 0
    tokens: int | None = None
    steps: int | None = None
    accepted: int | None = None
    drafted: int | None = None
    tree: dict[str, Any] | None = None
    times: list[float] = field(default_factory=list)
    cut: bool = False

    def take(self, chunk: dict[str, Any]) -> list[Piece]:
        """The text of a chunk in pieces; everything else is counted."""
        pieces = []
        for choice in chunk.get("choices") or []:
            delta = choice.get("delta") or {}
            reasoning = delta.get("reasoning_content") or delta.get("reasoning")
            for tree in choice.get("draft_trees", []):
                self.steps = (self.steps or 0) + 1
                self.accepted = (self.accepted or 0) + len(tree["accepted"])
                self.drafted = (self.drafted or 0) + len(tree["tokens"]) - 1
                self.tree = tree
            if "draft_tokens" in choice:
                pieces += [Piece(token["text"], token["depth"], bool(reasoning)) for token in choice["draft_tokens"]]
            else:
                pieces += [Piece(text, None, text is reasoning) for text in (reasoning, delta.get("content")) if text]
            for call in delta.get("tool_calls") or []:
                self._take_call(call)
            self.cut |= choice.get("finish_reason") == "length"
        for piece in pieces:
            self.text += "" if piece.reasoning else piece.text
            self.reasoning += piece.text if piece.reasoning else ""
            self.pieces += 1
            self.times.append(time.perf_counter())
        self._take_usage(chunk.get("usage") or {})
        return pieces

    def _take_call(self, call: dict[str, Any]) -> None:
        """A call comes in parts: its name first, then its arguments."""
        self.times.append(time.perf_counter())
        function = call.get("function") or {}
        if call["index"] == len(self.calls):
            empty = {"name": "", "arguments": ""}
            self.calls.append({"id": call["id"], "type": "function", "function": empty})
        known = self.calls[call["index"]]["function"]
        for name in known:
            known[name] += function.get(name) or ""

    def _take_usage(self, usage: dict[str, Any]) -> None:
        self.tokens = usage.get("completion_tokens", self.tokens)
        details = usage.get("completion_tokens_details") or {}
        accepted, rejected = (details.get(f"{kind}_prediction_tokens") for kind in ("accepted", "rejected"))
        if self.steps is None and accepted is not None and rejected is not None:
            self.accepted, self.drafted = accepted, accepted + rejected

    def line(self) -> str:
        """The figures of a finished answer."""
        count = self.pieces if self.tokens is None else self.tokens
        parts = [f"{count} pieces" if self.tokens is None else f"{count} tokens"]
        seconds = self.times[-1] - self.times[0] if self.times else 0.0
        if seconds > 0 and count > 1:
            parts.append(f"{(count - 1) / seconds:.1f} a second")
        if self.steps:
            parts.append(f"acceptance length {self.accepted / self.steps + 1:.2f}")
        if self.drafted:
            parts.append(f"{self.accepted} of {self.drafted} drafted tokens accepted")
        else:
            parts.append("acceptance n/a")
        return ", ".join(parts)

    def message(self) -> Message:
        """The answer as the next request has to repeat it."""
        said: Message = {"role": "assistant", "content": self.text}
        if self.calls:
            # The model thinks on from here.
            said |= {"tool_calls": self.calls, **({"reasoning_content": self.reasoning} if self.reasoning else {})}
        return said


@dataclass(frozen=True)
class Sampling:
    """How answers are sampled; None: the model's default. thinking: a mode of M3's chat template."""

    tokens: int = 512
    temperature: float | None = None
    seed: int | None = None
    thinking: str = "disabled"


class Speaker(Protocol):
    """Whoever answers: pieces as they come, everything into `turn`."""

    name: str

    def answer(self, messages: list[Message], turn: Turn) -> AsyncIterator[Piece]: ...


class Remote:
    """A server. It is asked what was drafted, and not again when it does not know such fields."""

    def __init__(
        self,
        url: str,
        api_key: str | None,
        model: str | None,
        sampling: Sampling,
        tools: list[dict[str, Any]] | None = None,
        timeout: float = 600.0,
    ):
        self._url, self._api_key, self._timeout = url, api_key, timeout
        self._sampling, self._tools = sampling, tools or []
        self._ours = True
        self.name = asyncio.run(self._find(model))

    async def _find(self, model: str | None) -> str:
        async with connect(self._url, self._api_key, self._timeout) as http:
            return await find_model(http, model)

    async def answer(self, messages: list[Message], turn: Turn) -> AsyncIterator[Piece]:
        optional = self._ours and self._sampling.thinking == "disabled"
        async with connect(self._url, self._api_key, self._timeout) as http:
            for ours in (True, False) if optional else (self._ours,):
                try:
                    async for chunk in stream_chat(http, self._body(messages, ours)):
                        for piece in turn.take(chunk):
                            yield piece
                    self._ours = ours
                    return
                except ServerError as error:
                    if not optional or not ours or turn.times or not str(error).startswith(("400", "422")):
                        raise
                except (AttributeError, IndexError, KeyError, TypeError) as error:
                    raise ServerError(f"a chunk of the stream is not OpenAI's: {error!r}") from None

    def _body(self, messages: list[Message], ours: bool) -> dict[str, Any]:
        sampling = self._sampling
        given = {"temperature": sampling.temperature, "seed": sampling.seed}
        # Calls are not the model's own text, so tokens cannot be told apart where there are tools.
        drafts = {"draft_trees": True, **({} if self._tools else {"draft_tokens": True})}
        return {
            "model": self.name,
            "messages": messages,
            "max_tokens": sampling.tokens,
            "stream_options": {"include_usage": True},
            **{name: value for name, value in given.items() if value is not None},
            **({"tools": self._tools} if self._tools else {}),
            **({**drafts, "thinking_mode": sampling.thinking} if ours else {}),
        }
