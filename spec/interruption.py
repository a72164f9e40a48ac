"""Ctrl-C and SIGTERM during a training run: the step is finished and a checkpoint written, then a line says how far it
got and how it goes on.
"""

import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING

from train.checkpoints import checkpoints

if TYPE_CHECKING:
    from train.config import TrainConfig

_NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}


class Interruption:
    """`config` is set as soon as it is known; `stop` is asked at every finished step."""

    def __init__(self) -> None:
        self.config: TrainConfig | None = None
        self._step: int | None = None
        self._number: int | None = None

    def stop(self, step: int) -> bool:
        """Whether a signal has come."""
        self._step = step
        return self._number is not None

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Inside, a signal ends the program with exit code 128 + its number: at once while starting up, afterwards when
        `stop` has been heeded. A second one ends it without clean-up.
        """
        # What a shell has set to be ignored, as in a background job, stays ignored.
        before = {number: signal.getsignal(number) for number in _NAMES}
        taken = [number for number, handler in before.items() if handler != signal.SIG_IGN]
        for number in taken:
            signal.signal(number, self._signal)
        try:
            yield
        finally:
            for number in taken:
                signal.signal(number, before[number])

    def end(self) -> None:
        """The run has stopped: another process may have got the signal. Raises SystemExit."""
        number = self._number or signal.SIGTERM
        when = "while starting up" if self._step is None else f"at step {self._step}"
        self._say(f"stopped by {_NAMES[signal.Signals(number)]} {when}; {self._way_on()}")
        raise SystemExit(128 + number)

    def _signal(self, number: int, frame: FrameType | None) -> None:
        for name in _NAMES:
            signal.signal(name, signal.SIG_DFL)
        self._number = number
        if self._step is None:
            self.end()
        self._say("stopping behind this step, with a checkpoint; a second signal stops at once")

    def _say(self, line: str) -> None:
        if os.environ.get("RANK", "0") == "0":
            # Past sys.stderr, in whose middle the signal may have come, and below a progress bar.
            start = "\n" if os.isatty(2) else ""
            os.write(2, f"{start}spec: {line}\n".encode())

    def _way_on(self) -> str:
        if self.config is None:
            return "the same command starts again"
        # Before the first step resume=false has perhaps not yet removed what it replaces.
        replaced = self._step is None and not self.config.resume
        found = [] if replaced else checkpoints(self.config.run_directory / "state")
        if not found:
            return "no checkpoint yet: the same command starts again"
        command = "the same command" if self.config.resume else "the same command without resume=false"
        return f"last checkpoint {found[-1]}: {command} continues from there"
