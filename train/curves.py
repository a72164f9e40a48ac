"""Loss and acceptance of a run as one picture."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from target_model.errors import atomic_write


def draw_curves(log: Path, picture: Path, title: str) -> None:
    """`log` is a run's log.jsonl. Left the loss, right tau_sim and, where it was judged, the served AL, over the tokens
    trained on. Nothing is drawn while the log holds no step.
    """
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    steps = [line for line in lines if "loss" in line]
    if not steps:
        return
    # Tokens of a judgement between two log lines lie between theirs.
    tokens = np.array([[line["step"], line["tokens"] / 1e6] for line in steps])
    figure = Figure(figsize=(9, 3.6), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    loss, acceptance = figure.subplots(1, 2)
    _series(loss, tokens, steps, {"loss": "loss"})
    loss.set_ylabel("loss")
    judged = [line["judge"] for line in lines if "judge" in line]
    _series(acceptance, tokens, judged, {"al": "AL, greedy", "al_sampled": "AL, T = 1"}, marker="o")
    _series(acceptance, tokens, steps, {"tau_sim": "tau_sim, training text"}, color="lightgrey")
    acceptance.set_ylabel("tokens a verify step")
    for axes in (loss, acceptance):
        axes.set_xlabel("million tokens")
        axes.grid(alpha=0.3)
        axes.legend()
    with atomic_write(picture) as file:
        figure.savefig(file, format="png")


def _series(axes: Any, tokens: np.ndarray, lines: list[dict[str, Any]], labels: dict[str, str], **style: Any) -> None:
    for name, label in labels.items():
        points = [(line["step"], line[name]) for line in lines if name in line]
        if points:
            steps, values = zip(*points, strict=True)
            axes.plot(np.interp(steps, *tokens.T), values, label=label, **style)
