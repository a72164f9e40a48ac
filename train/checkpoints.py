"""Where a run's checkpoints lie. Without torch, as who asks may be in a hurry."""

from pathlib import Path

PARTIAL = ".partial"


def checkpoint_path(directory: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return directory / f"step-{step:08d}"


def checkpoints(directory: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(path for path in directory.glob("step-*") if not path.name.endswith(PARTIAL))
