"""Token ids to text while they arrive: never half a character, never the beginning of a stop string.

Tokens are looked at one by one, so the result does not depend on how many of them a step accepted.
"""

import codecs
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from target_model.tokenizer import Tokenizer


@dataclass
class Released:
    """What a call hands on.

    segments: visible text and, as ints, the special tokens between it, in order. starts: for each token whose text is
    now within everything released, oldest first, where that text begins in the answer, in characters. stopped: the
    stop string that ended the answer, which is not in the text.
    """

    segments: list[str | int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    stopped: str | None = None


class Detokenizer:
    """Text of one answer. After a stop string is complete, it takes in nothing more.

    A stop string counts from the first place where it is complete, and only when that is after `min_tokens` tokens;
    where two are complete at the same character the longer one counts. A special token is not part of the text
    (unless `show_special`), so no character and no stop string reaches across one.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Iterable[str] = (), min_tokens: int = 0, show_special: bool = False):
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._min_tokens = min_tokens
        self._hidden = frozenset() if show_special else tokenizer.special_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""  # decoded, but perhaps the beginning of a stop string
        self._decoded_length = 0
        self._waiting: deque[tuple[int, int]] = deque()  # per unreleased token, where its text begins and ends
        self.tokens_in = 0
        self.stopped: str | None = None

    def push(self, token_ids: Iterable[int]) -> Released:
        """Takes in the next tokens, up to and with the one that completes a stop string."""
        released = Released()
        for token_id in token_ids:
            if self.stopped is not None:
                break
            self.tokens_in += 1
            start = self._decoded_length
            if token_id in self._hidden:
                self._end_run(released)
                if self.stopped is None:
                    released.segments.append(token_id)
                self._waiting.append((start, self._decoded_length))
            else:
                self._take(self._decoder.decode(self._tokenizer.token_bytes(token_id)), released)
                unfinished = bool(self._decoder.getstate()[0])
                self._waiting.append((start, self._decoded_length + unfinished))
        return self._close(released)

    def finish(self) -> Released:
        """Everything still held, at the end of an answer. Bytes of a cut character become one U+FFFD."""
        released = Released()
        if self.stopped is None:
            self._end_run(released)
        return self._close(released)

    def _take(self, text: str, released: Released) -> None:
        window = self._held + text
        self._decoded_length += len(text)
        found = self._first_stop(window) if self.tokens_in > self._min_tokens else None
        if found is not None:
            start, self.stopped = found
            self._held = ""
            _append(released.segments, window[:start])
            return
        keep = self._possible_stop(window)
        self._held = window[len(window) - keep :]
        _append(released.segments, window[: len(window) - keep])

    def _first_stop(self, window: str) -> tuple[int, str] | None:
        """Start and text of the stop string that is complete first."""
        found = [(window.find(stop), stop) for stop in self._stop]
        ends = [(start + len(stop), start, stop) for start, stop in found if start >= 0]
        return min(ends)[1:] if ends else None

    def _possible_stop(self, window: str) -> int:
        """Length of the longest end of `window` with which a stop string begins."""
        longest = 0
        for stop in self._stop:
            start = window.find(stop[0], max(0, len(window) - len(stop) + 1))
            while start >= 0 and not stop.startswith(window[start:]):
                start = window.find(stop[0], start + 1)
            longest = max(longest, len(window) - start if start >= 0 else 0)
        return longest

    def _end_run(self, released: Released) -> None:
        self._take(self._decoder.decode(b"", final=True), released)
        self._decoder.reset()
        if self.stopped is None:
            _append(released.segments, self._held)
            self._held = ""

    def _close(self, released: Released) -> Released:
        released.stopped = self.stopped
        reached = self._decoded_length - len(self._held)
        while self._waiting and (self.stopped is not None or self._waiting[0][1] <= reached):
            released.starts.append(self._waiting.popleft()[0])
        return released


def _append(segments: list[str | int], text: str) -> None:
    if not text:
        return
    if segments and isinstance(segments[-1], str):
        segments[-1] += text
    else:
        segments.append(text)
