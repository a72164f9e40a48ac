"""Loss and acceptance of a run as one picture."""

import json
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from target_model.errors import atomic_write


def draw_curves(log: Path, picture: Path, title: str) -> None:
    """`log` is a run's log.jsonl. Left the loss, right tau_sim and, where it was judged, the served AL. None of it is
    drawn while the log holds no step.
    """
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    steps = [line for line in lines if "loss" in line]
    judged = [line["judge"] for line in lines if "judge" in line]
    if not steps:
        return
    figure = Figure(figsize=(9, 3.6), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    loss, acceptance = figure.subplots(1, 2)
    _series(loss, steps, ("loss",))
    loss.set_ylabel("loss")
    _series(acceptance, steps, ("tau_sim",))
    _series(acceptance, judged, ("al", "al_sampled"), marker="o")
    acceptance.set_ylabel("tokens a verify step")
    for axes in (loss, acceptance):
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        axes.legend()
    with atomic_write(picture) as file:
        figure.savefig(file, format="png")


def _series(axes: Any, lines: list[dict[str, Any]], names: tuple[str, ...], marker: str | None = None) -> None:
    labels = {"loss": "loss", "tau_sim": "tau_sim", "al": "AL, greedy", "al_sampled": "AL, T = 1"}
    for name in names:
        points = [(line["step"], line[name]) for line in lines if name in line]
        if points:
            axes.plot(*zip(*points, strict=True), label=labels[name], marker=marker)
