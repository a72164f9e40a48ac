"""From a draft's name to its files, with a sentence that says what was chosen and why.

`eagle3` means: the draft bundled for the target, else the best run trained for it, else the published one. A path or a
hub id also works.
"""

import sys
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from draft_model.config import read_json
from target_model.config import default_taps
from target_model.errors import UserError
from target_model.resolve import ResolvedTarget

PUBLISHED = {"MiniMax-M3": "Inferact/MiniMax-M3-EAGLE3"}
_FIRST_FILES = ("state", "lock")  # what training makes in its folder before the record


@dataclass(frozen=True)
class ResolvedDraft:
    """`default_taps` serve a checkpoint that names no layers: the target's (None below 7 layers)."""

    path: Path
    why: str
    default_taps: tuple[int, ...] | None


@dataclass(frozen=True)
class RunInfo:
    """One training run as its run.json tells it; best_al is None while no judge has measured it."""

    name: str
    path: Path
    target: str
    step: int
    complete: bool
    best_al: float | None


def list_runs(root: str | Path = "runs", *, exported: bool = True) -> list[RunInfo]:
    """Runs under `root`, the best first; those without a measured AL come last. `exported`: with a draft only. A run
    whose record is damaged is left out, with a line on stderr.
    """
    runs = []
    for record in sorted(Path(root).glob("*/run.json")):
        try:
            run = run_info(record)
        except UserError as error:
            print(f"spec: a run is left out: {error}", file=sys.stderr)
            continue
        if not exported or (record.parent / "draft" / "config.json").is_file():
            runs.append(run)
    return sorted(runs, key=lambda run: -1.0 if run.best_al is None else run.best_al, reverse=True)


def without_record(folder: str | Path) -> bool:
    """Whether a folder is that of a training run which has not come as far as its first record."""
    folder = Path(folder)
    return not (folder / "run.json").exists() and any((folder / name).exists() for name in _FIRST_FILES)


def run_info(record: Path) -> RunInfo:
    """What a run's `run.json` says."""
    values = read_json(record)
    try:
        best = values["best"]
        return RunInfo(
            record.parent.name,
            record.parent,
            values["target"],
            values["step"],
            values["complete"],
            None if best is None else float(best["al"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{record} is not the record of a training run: {error!r}") from None


def resolve_draft(
    name: str, target: ResolvedTarget, runs: str | Path = "runs", *, weights: bool = True
) -> ResolvedDraft:
    """Resolves `eagle3`, a directory or a hub id for `target`. Without `weights` they are not fetched from the hub."""
    taps = default_taps(target.config.num_layers) if target.config.num_layers >= 7 else None
    if name == "eagle3":
        path, why = _by_target(target, Path(runs), weights)
    elif (Path(name) / "run.json").is_file():
        path, why = Path(name) / "draft", f"draft {name}: of the run that was named"
    elif Path(name).is_dir():
        path, why = Path(name), f"draft {name}: the directory that was named"
    elif "/" in name and not name.startswith((".", "/", "~")):
        path, why = _from_hub(name, weights), f"draft {name}: the hub repository that was named"
    else:
        raise UserError(f"draft {name} is neither `eagle3`, nor a directory, nor a hub id")
    return ResolvedDraft(path, why, taps)


def _by_target(target: ResolvedTarget, runs: Path, weights: bool) -> tuple[Path, str]:
    # A quantised copy takes the draft of the target that it was made from.
    names = [target.name] if target.origin is None else [target.name, target.origin]
    for name in names:
        bundled = Path(str(resources.files("draft_model"))) / "bundled" / f"{name}-eagle3"
        if bundled.is_dir():
            return bundled, f"draft eagle3: the one bundled for {name}"
    trained = [run for run in list_runs(runs) if run.target in (*names, str(target.path.resolve()))]
    if trained:
        best = trained[0]
        measured = "not yet judged" if best.best_al is None else f"AL {best.best_al:.2f}"
        return (
            best.path / "draft",
            f"draft eagle3: run {best.name} ({measured}), the best of {len(trained)} for {target.name}",
        )
    published = next((name for name in names if name in PUBLISHED), None)
    if published is not None:
        hub = PUBLISHED[published]
        why = f"draft eagle3: {hub}, the published one, as no run was trained for {target.name}"
        return _from_hub(hub, weights), why
    raise UserError(
        f"no draft eagle3 for {target.name}: none is bundled or published, and {runs} holds no run trained for it "
        f"(`spec train --target {target.name}` makes one)"
    )


def _from_hub(name: str, weights: bool) -> Path:
    """The repository's files, from the local cache or the network; nothing but configuration and weights is fetched."""
    patterns = ["*.json", *(["*.safetensors"] if weights else [])]
    try:
        cached = Path(snapshot_download(name, allow_patterns=patterns, local_files_only=True))
        # The configuration may have been fetched alone.
        if not weights or any(cached.glob("*.safetensors")):
            return cached
    except HFValidationError:
        raise UserError(f"draft {name} is neither a directory nor a valid hub id") from None
    except LocalEntryNotFoundError:
        pass
    try:
        return Path(snapshot_download(name, allow_patterns=patterns, etag_timeout=5))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"draft {name} is not in the local hub cache and cannot be fetched: {reason}") from None
