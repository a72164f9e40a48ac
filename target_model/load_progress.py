"""How far the loading of a large checkpoint is, on stderr: a bar with GB/s on a terminal, one line elsewhere."""

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

# Less than this is loaded before anybody could read a bar.
LARGE = 2 * 10**9


class LoadProgress:
    """A context manager around a load of `total` bytes; silent for small ones, and without a name."""

    def __init__(self, name: str | None, total: int):
        self.name, self.total, self.done = name, total, 0
        console = Console(stderr=True)
        self._shown = name is not None and total >= LARGE
        self._progress = Progress(
            TextColumn("loading {task.description}"),
            BarColumn(bar_width=24),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not (self._shown and console.is_terminal),
        )
        self._console = console
        self._task = self._progress.add_task(name or "", total=total)

    def __enter__(self) -> "LoadProgress":
        self._started = time.perf_counter()
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()
        if self._shown and kind is None:
            self._console.print(self.summary(time.perf_counter() - self._started), highlight=False)

    def advance(self, count: int) -> None:
        """`count` more bytes are in place."""
        self.done += count
        self._progress.advance(self._task, count)

    def summary(self, seconds: float) -> str:
        """One line about the whole load."""
        size = self.done / 10**9
        return f"loaded {self.name}: {size:.1f} GB in {seconds:.1f} s ({size / seconds:.2f} GB/s)"
