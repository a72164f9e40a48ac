"""Weights & Biases, imported only when a run asks for it; offline mode touches no network."""

from typing import Any

import wandb

from train.config import TrainConfig


class WandbTracker:
    """One wandb run in the run's folder."""

    def __init__(self, config: TrainConfig):
        directory = config.run_directory
        directory.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=config.log.project,
            name=config.name,
            dir=str(directory),
            mode=config.log.wandb,
            config=config.model_dump(),
            settings=wandb.Settings(console="off", silent=True),
        )

    def log(self, values: dict[str, Any]) -> None:
        """Lists become one series an entry: step_accuracy/0, step_accuracy/1, ..."""
        flat: dict[str, Any] = {}
        for key, value in values.items():
            flat |= {f"{key}/{i}": entry for i, entry in enumerate(value)} if isinstance(value, list) else {key: value}
        self._run.log(flat)

    def finish(self) -> None:
        self._run.finish()
