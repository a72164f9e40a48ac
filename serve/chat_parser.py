"""The parts of an M3 chat answer: reasoning, content and tool calls, told apart by special tokens and not by their
spelling."""

from collections.abc import Mapping
from typing import Any

from serve.tool_calls import NAMESPACE, CallArguments, CallStart, ToolCallParser
from target_model.chat import THINK_CLOSE, THINK_OPEN
from target_model.tokenizer import Tokenizer

Part = tuple[str, str] | CallStart | CallArguments


class ChatParser:
    """Turns the segments of one answer into parts: ("reasoning", text), ("content", text), and pieces of tool calls.

    thinking_mode says how the prompt opened the answer. Without `tools` the tool syntax is ordinary content.
    """

    def __init__(self, tokenizer: Tokenizer, thinking_mode: str, tools: list[Mapping[str, Any]]):
        self._open = tokenizer.special.get(THINK_OPEN)
        self._close = tokenizer.special.get(THINK_CLOSE)
        self._namespace = tokenizer.special.get(NAMESPACE)
        self._channel = "reasoning" if thinking_mode == "enabled" else "content"
        self._counting = thinking_mode == "enabled"
        self._calls = ToolCallParser(tools) if tools else None
        self._piece: str | None = None  # text behind a namespace token, until the next special token

    @property
    def tool_calls(self) -> int:
        """Complete ones: a call that the end of the answer cut does not count."""
        return self._calls.complete_calls if self._calls else 0

    def take(self, segments: list[str | int]) -> list[Part]:
        """Parts that these segments complete."""
        parts: list[Part] = []
        for segment in segments:
            if isinstance(segment, str):
                if self._piece is None:
                    parts.append((self._channel, segment))
                else:
                    self._piece += segment
                continue
            parts += self._end_piece()
            if segment == self._open:
                self._channel = "reasoning"
            elif segment == self._close:
                self._channel = "content"
            elif segment == self._namespace and self._calls and self._channel == "content":
                self._piece = ""
        return parts

    def finish(self, complete: bool) -> list[Part]:
        """What is left at the end, but no half tag; an answer that is `complete` also ends a tool call it left open."""
        if self._calls and self._piece is not None and self._calls.cuts_tag(self._piece):
            self._piece = None
        parts = self._end_piece()
        return parts + self._parts(self._calls.finish()) if self._calls and complete else parts

    def count_reasoning(self, token_ids: list[int]) -> int:
        """How many of the next tokens belong to the reasoning."""
        count = 0
        for token in token_ids:
            if token == self._open:
                self._counting = True
            elif token == self._close:
                self._counting = False
            count += self._counting
        return count

    def _end_piece(self) -> list[Part]:
        if self._piece is None or self._calls is None:
            return []
        piece, self._piece = self._piece, None
        return self._parts(self._calls.take(piece)) if piece else []

    def _parts(self, events: list[CallStart | CallArguments | str]) -> list[Part]:
        return [("content", event) if isinstance(event, str) else event for event in events]
