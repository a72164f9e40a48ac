"""Which tokens of an answer were drafted, and how deep in the tree: the field `draft_tokens` of stream chunks."""

from collections import deque
from typing import Any

from serve.answer import Delta


class DraftTokens:
    """Cuts the text of one answer into its tokens: {"text", "depth"}, depth 0 for the target's own.

    All their texts joined are the answer's text. A token comes when its text is complete, perhaps a chunk after the
    first part of it; one without text of its own (a special token, part of a character) has "".
    """

    def __init__(self):
        self._open: deque[tuple[int, int]] = deque()  # of tokens not taken yet: where their text begins, and depth
        self._text = ""  # not taken yet
        self._taken = 0  # characters taken

    def add(self, delta: Delta) -> None:
        self._open += zip(delta.starts, delta.depths, strict=True)

    def take(self, text: str, last: bool) -> list[dict[str, Any]]:
        """The tokens that `text`, the next of the answer, completes; with `last` all that are left."""
        self._text += text
        end = self._taken + len(self._text)
        pieces = []
        while self._open and (self._open[0][0] < end or last):
            _, depth = self._open.popleft()
            stop = min(self._open[0][0], end) if self._open else end
            size = max(stop - self._taken, 0)
            pieces.append({"text": self._text[:size], "depth": depth})
            self._text, self._taken = self._text[size:], self._taken + size
        return pieces
