"""Console progress: one bar with loss, tau_sim, tokens per second, MFU, GPU memory and the time left."""

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from train.config import TrainConfig


class ProgressDisplay:
    """A context manager; silent when not enabled. Without a terminal there are the notes, but no bar."""

    def __init__(self, config: TrainConfig, *, enabled: bool):
        self.enabled = enabled
        console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeElapsedColumn(),
            TextColumn("eta"),
            TimeRemainingColumn(),
            console=console,
            disable=not (enabled and console.is_terminal),
        )
        self._task = self._progress.add_task(config.name, total=None, numbers="")

    def __enter__(self) -> "ProgressDisplay":
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # An error stands alone: the bar of a run that did not get there is taken away.
        self._progress.live.transient = kind is not None
        self._progress.stop()

    def stage(self, text: str) -> None:
        """What happens now, beside the bar."""
        self._progress.update(self._task, numbers=text)

    def note(self, text: str) -> None:
        """A line above the bar."""
        if self.enabled:
            self._progress.console.print(text, highlight=False, soft_wrap=True)

    def start(self, step: int, total: int) -> None:
        self._progress.reset(self._task, completed=step, total=total, numbers="")

    def advance(self, step: int, metrics: dict[str, Any], tokens: int) -> None:
        self._progress.update(self._task, completed=step, numbers=numbers(metrics, tokens))


def numbers(metrics: dict[str, Any], tokens: int) -> str:
    """The last log line in short; MFU and memory are there on a CUDA device only."""
    if "loss" not in metrics:
        return ""
    parts = [
        f"loss {metrics['loss']:.3f}",
        f"tau_sim {metrics['tau_sim']:.2f}",
        f"{metrics['tokens_per_second']:,.0f} tokens/s",
        f"{tokens / 1e6:.2f} M tokens",
    ]
    if "mfu" in metrics:
        parts.append(f"MFU {100 * metrics['mfu']:.0f} %")
    if "gpu_memory" in metrics:
        parts.append(f"{metrics['gpu_memory'] / 2**30:.1f} GiB")
    return "  ".join(parts)
