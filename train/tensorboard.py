"""TensorBoard event files, written only when a run asks for them; `tensorboard --logdir runs` shows them."""

from tensorboardX import SummaryWriter

from train.config import TrainConfig


class TensorBoardTracker:
    """Event files under tensorboard/ in the run's folder. A resumed run writes steps behind its checkpoint again."""

    def __init__(self, config: TrainConfig):
        self._writer = SummaryWriter(str(config.run_directory / "tensorboard"))

    def log(self, values: dict[str, float]) -> None:
        """One scalar a name, at the step among the values."""
        step = int(values["step"])
        for name, value in values.items():
            if name != "step":
                self._writer.add_scalar(name, value, step)

    def finish(self) -> None:
        self._writer.close()
