"""Weights & Biases, imported only when a run asks for it; offline mode touches no network."""

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

    def log(self, values: dict[str, float]) -> None:
        self._run.log(values)

    def finish(self) -> None:
        self._run.finish()
