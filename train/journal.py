"""What a run tells: log.jsonl, Weights & Biases, TensorBoard, the progress display and curves.png. Rank 0 only."""

import itertools
import math
from typing import Any, Protocol

from train.config import TrainConfig
from train.progress import ProgressDisplay
from train.run import RunFolder


class Tracker(Protocol):
    """Another place that gets what log.jsonl gets: `values` are numbers by name, among them "step"."""

    def log(self, values: dict[str, float]) -> None: ...

    def finish(self) -> None: ...


class Journal:
    """Passes measurements on to wherever the configuration wants them."""

    def __init__(self, config: TrainConfig, folder: RunFolder, display: ProgressDisplay):
        self._config, self._folder, self._display = config, folder, display
        self._trackers = _trackers(config)

    def metrics(self, values: dict[str, Any]) -> None:
        """A log line of training."""
        self._folder.log(values)
        self._track(values)

    def judgement(self, step: int, result: dict[str, Any]) -> None:
        """A judgement, after which the curves are drawn anew."""
        self._folder.log({"step": step, "judge": result})
        self._track({"step": step} | {f"judge/{key}": value for key, value in result.items() if key != "step"})
        simulated = f", tau_sim {result['tau_sim']:.3f}" if "tau_sim" in result else ""
        self._display.note(f"step {step}: AL {result['al']:.3f}{simulated}")
        self.draw()

    def note(self, text: str) -> None:
        """A line for people."""
        self._display.note(text)

    def draw(self) -> None:
        """Loss and acceptance so far as curves.png."""
        if self._config.log.curves:
            from train.curves import draw_curves

            draw_curves(self._folder.path / "log.jsonl", self._folder.path / "curves.png", self._config.name)

    def finish(self) -> None:
        """Ends the trackers and draws the last curves."""
        self.draw()
        for tracker in self._trackers:
            tracker.finish()

    def _track(self, values: dict[str, Any]) -> None:
        """Lists become one series an entry: step_accuracy/0, step_accuracy/1, ..."""
        flat: dict[str, float] = {}
        for key, value in values.items():
            parts = {f"{key}/{i}": entry for i, entry in enumerate(value)} if isinstance(value, list) else {key: value}
            flat |= {name: part for name, part in parts.items() if isinstance(part, int | float)}
        for tracker in self._trackers:
            tracker.log(flat)


def simulated_length(step_accuracy: list[float], chain: int) -> float:
    """tau_sim of a chain of that length, from the accuracy of each step given that all earlier ones hit."""
    return 1 + math.fsum(itertools.accumulate(step_accuracy[:chain], lambda a, b: a * b))


def _trackers(config: TrainConfig) -> list[Tracker]:
    found: list[Tracker] = []
    if config.log.wandb != "disabled":
        from train.tracking import WandbTracker

        found.append(WandbTracker(config))
    if config.log.tensorboard:
        from train.tensorboard import TensorBoardTracker

        found.append(TensorBoardTracker(config))
    return found
