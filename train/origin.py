"""Where a run's features come from: a whole target in this process, one spread over several, or a store on disk."""

from dataclasses import dataclass

import torch

from draft_model.chosen_blocks import ChosenBlocks
from target_model.checkpoint import load_target
from target_model.model import TargetModel
from target_model.resolve import ResolvedTarget
from target_model.tokenizer import load_tokenizer
from train.config import TrainConfig
from train.data import TrainingRows, load_rows
from train.ends import load_ends
from train.features import OnlineCapture
from train.initialise import run_draft_config
from train.pipelined import PipelinedCapture, load_stage
from train.progress import ProgressDisplay
from train.store import FeatureStore, identity


@dataclass(frozen=True)
class Origin:
    """capture   hands out the features of `rows`
    ends      the target's embedding, final norm and head, whatever else of it is there
    target    the whole target, None where no process holds it
    """

    rows: TrainingRows
    capture: OnlineCapture | FeatureStore
    ends: TargetModel
    target: TargetModel | None


def open_origin(
    config: TrainConfig,
    resolved: ResolvedTarget,
    rank: int,
    world: int,
    device: torch.device,
    dtype: torch.dtype,
    display: ProgressDisplay,
) -> Origin:
    """Reads the data and loads what this process needs of the target. All processes call it together."""
    settings, steps = config.features, config.ttt.steps
    tokenizer, sizes = load_tokenizer(resolved.path), run_draft_config(config, resolved)
    taps = sizes.taps
    display.stage("reading data")
    if settings.store is not None:
        store = FeatureStore(settings.store)
        store.prepare(identity(resolved, tokenizer, taps, config.data), steps, device, dtype)
        display.note(store.rows.summary())
        return Origin(store.rows, store, load_ends(resolved, dtype=dtype, device=device), None)
    rows = load_rows(config.data, tokenizer, config.seed)
    display.note(rows.summary())
    display.stage("loading target")
    if settings.stages > 1:
        stage = load_stage(resolved, settings.stages, rank, world, dtype=dtype, device=device)
        capture = PipelinedCapture(
            stage,
            rows,
            taps,
            steps,
            stages=settings.stages,
            rank=rank,
            world=world,
            capture_rows=settings.capture_rows,
        )
        return Origin(rows, capture, load_ends(resolved, dtype=dtype, device=device), None)
    target = load_target(config.target, dtype=dtype, device=device)
    chosen = ChosenBlocks.parse(config.ttt.draft_attention, target.config, sizes)
    capture = OnlineCapture(
        target, rows, taps, steps, capture_rows=settings.capture_rows, cache=settings.cache, chosen=chosen
    )
    return Origin(rows, capture, target, target)
