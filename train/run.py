"""A run's folder: run.json (what it is, how far it got), draft/ (the best export), state/ (checkpoints), log.jsonl."""

import json
import shutil
from pathlib import Path
from typing import Any

from draft_model.checkpoint import save_draft
from draft_model.config import read_json
from draft_model.model import Eagle3Draft
from target_model.errors import UserError, atomic_write
from target_model.resolve import known_targets
from train.checkpoints import checkpoint_path, checkpoints
from train.config import TrainConfig, parse_config
from train.lock import LOCK

# Keys that may differ between the interrupted and the resuming command without changing what is computed.
_FREE_KEYS = ("log", "eval", "checkpoint", "output", "name", "resume", "features")


class RunFolder:
    """Files of one run; written by rank 0 only."""

    def __init__(self, config: TrainConfig):
        self._target = _target_identity(config.target)
        self.path = config.run_directory
        self.state, self.draft = self.path / "state", self.path / "draft"
        self._config, self._processes = config, 1

    def began_with(self, world: int) -> int:
        """How many processes the run began with; `world`, those of now, if it begins."""
        record = self.path / "run.json"
        if not self._config.resume or not record.exists():
            self._processes = world
        else:
            self._processes = read_json(record).get("processes", world)
        return self._processes

    def prepare(self, total_steps: int) -> Path | None:
        """Makes the folder, or finds the checkpoint to continue from. A run with other settings is refused."""
        record = self.path / "run.json"
        if not self._config.resume and self.path.exists():
            # The lock stays: it is held.
            found = [path for path in self.path.iterdir() if path.name != LOCK]
            if found and not record.exists():
                raise UserError(f"{self.path} is not a training run, so it is not replaced")
            for path in found:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        if record.exists():
            _check_same(read_json(record), self._config, total_steps, self.path)
        try:
            self.state.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"run folder {self.path} cannot be made: {error}") from None
        for leftover in self.state.glob("*.partial"):
            shutil.rmtree(leftover)
        found = checkpoints(self.state)
        return found[-1] if found else None

    def cut_log(self, step: int) -> None:
        """Drops log lines of steps after `step`, which a resumed run will write again."""
        log = self.path / "log.jsonl"
        if log.exists():
            kept = [line for line in log.read_text().splitlines() if line and json.loads(line)["step"] <= step]
            with atomic_write(log, "w") as file:
                file.write("".join(line + "\n" for line in kept))

    def log(self, values: dict[str, Any]) -> None:
        with open(self.path / "log.jsonl", "a") as file:
            file.write(json.dumps(values) + "\n")

    def write_record(self, *, step: int, total_steps: int, best: dict[str, Any] | None, ended: bool = False) -> None:
        """run.json, which `draft_model.resolve` reads to find the best run of a target. `ended`: early, on purpose."""
        record = {
            "name": self._config.name,
            "target": self._target,
            "step": step,
            "total_steps": total_steps,
            "complete": ended or step >= total_steps,
            "processes": self._processes,
            "best": best,
            "draft": "draft",
            "config": self._config.model_dump(),
        }
        with atomic_write(self.path / "run.json", "w") as file:
            json.dump(record, file, indent=1)
            file.write("\n")

    def export(self, draft: Eagle3Draft, metadata: dict[str, Any]) -> None:
        """The draft in the published layout, with the recipe beside it. `draft` already has the export's precision."""
        try:
            save_draft(draft, self.draft, metadata, dtype=self.export_dtype)
        except OSError as error:
            raise UserError(f"draft {self.draft} could not be written: {error}") from None

    @property
    def export_dtype(self):
        import torch

        return getattr(torch, self._config.checkpoint.export_dtype)

    def check_disk(self, checkpoints: int, size: int) -> None:
        """UserError unless so many more checkpoints of `size` bytes fit."""
        absolute = self.path.absolute()
        place = next(path for path in (absolute, *absolute.parents) if path.exists())
        free, needed = shutil.disk_usage(place).free, checkpoints * size
        if free < needed:
            raise UserError(
                f"{place} has {free / 1e9:.2f} GB free, but checkpoints of this run need {needed / 1e9:.2f} GB"
            )

    def prune(self, best: int | None) -> None:
        """Keeps the last `checkpoint.keep` checkpoints, and the one of the step that was judged best."""
        for old in checkpoints(self.state)[: -self._config.checkpoint.keep]:
            if best is None or old != checkpoint_path(self.state, best):
                shutil.rmtree(old)


def _target_identity(name: str) -> str:
    """A target's name, or the absolute path of a directory: by it `draft_model.resolve` finds the run."""
    path = Path(name).expanduser()
    return str(path.resolve()) if name not in known_targets() and path.is_dir() else name.removeprefix("MiniMaxAI/")


def _check_same(record: dict[str, Any], config: TrainConfig, total_steps: int, where: Path) -> None:
    # Read again, so that settings which are younger than the run have their defaults.
    theirs = _flatten(parse_config(record["config"], str(where / "run.json")).model_dump())
    ours = _flatten(config.model_dump())
    for key in sorted(ours.keys() | theirs.keys()):
        if key.split(".")[0] not in _FREE_KEYS and ours.get(key) != theirs.get(key):
            raise UserError(
                f"{where} was trained with {key}={theirs.get(key)!r}, now {ours.get(key)!r}: "
                "choose another name, or resume=false to start over"
            )
    if record.get("total_steps") != total_steps:
        raise UserError(
            f"{where} was planned for {record.get('total_steps')} steps, now {total_steps}: has the data changed?"
        )


def _flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat
