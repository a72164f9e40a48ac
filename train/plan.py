"""What a run would be, how much memory and disk it needs: printed by `--plan` without loading anything."""

import torch
import yaml

from draft_model.config import DraftConfig
from draft_model.model import Eagle3Draft
from target_model.resolve import ResolvedTarget
from target_model.sizes import weight_bytes
from train.config import TrainConfig
from train.initialise import run_draft_config, set_trainable

GIB = 1 << 30


def state_bytes(draft: Eagle3Draft) -> int:
    """Bytes of one checkpoint: weights as trained plus fp32 master, two fp32 moments of what is trained."""
    total = sum(p.numel() for p in draft.parameters())
    trained = sum(p.numel() for p in draft.parameters() if p.requires_grad)
    return 4 * total + 12 * trained


def feature_bytes_per_token(config: DraftConfig, element: int) -> int:
    """Taps and final state of one token."""
    return (config.num_aux + 1) * config.target_hidden_size * element


def plan(config: TrainConfig, target: ResolvedTarget, world: int = 1) -> str:
    """The resolved configuration and its needs, for a target known by its config alone."""
    sizes = run_draft_config(config, target, weights=False)
    with torch.device("meta"):
        draft = Eagle3Draft(sizes)
    set_trainable(draft, config.draft)
    total = sum(p.numel() for p in draft.parameters())
    trained = sum(p.numel() for p in draft.parameters() if p.requires_grad)
    cuda = config.engine.device == "cuda" or (config.engine.device == "auto" and torch.cuda.is_available())
    half = config.engine.dtype == "bfloat16" or (config.engine.dtype == "auto" and cuda)
    element = 2 if half else 4
    rows = config.engine.micro_batch * config.data.sequence_length
    lines = [
        yaml.safe_dump(config.model_dump(), sort_keys=False).rstrip(),
        "",
        f"target            {config.target}: {_gib(weight_bytes(target.config, element))} of weights"
        + (f", spread over teams of {config.features.stages} processes" if config.features.stages > 1 else ""),
        f"draft             {total:,} parameters, {trained:,} trained; taps entering layers {list(sizes.taps)}",
        f"global batch      {config.engine.micro_batch} x {config.engine.accumulate} x {world} processes = "
        f"{config.engine.micro_batch * config.engine.accumulate * world} rows of {config.data.sequence_length} tokens",
        "memory of a process, target not counted:",
        *(f"  {name:<16}{_gib(size)}" for name, size in _memory(config, sizes, total, trained, rows, element, world)),
        f"disk              {_gib(state_bytes(draft))} a checkpoint, {config.checkpoint.keep + 2} at most; "
        f"{_gib(total * (2 if config.checkpoint.export_dtype == 'bfloat16' else 4))} the exported draft",
        f"features          {feature_bytes_per_token(sizes, element):,} bytes a token"
        + (", kept in host memory for every row" if config.features.cache else ", not kept"),
        f"run folder        {config.run_directory}",
    ]
    return "\n".join(lines)


def _memory(
    config: TrainConfig, sizes: DraftConfig, total: int, trained: int, rows: int, element: int, world: int
) -> list[tuple[str, int]]:
    stage = config.engine.zero_stage
    optimizer = (12 if element == 2 else 8) * trained // (world if stage >= 1 else 1)
    gradients = element * trained // (world if stage >= 2 else 1)
    # Of a step attention keeps q, k, v, its output and the rows of it that count; the layer its two inputs side by
    # side, eight states between norms and sums, gate and up, the gate's activation, their product. Of these only
    # attention's and three states stay where the rest is worked out again.
    hidden, heads = sizes.hidden_size, sizes.num_heads * sizes.head_dim
    attention = 3 * heads + 2 * sizes.num_kv_heads * sizes.head_dim
    per_row = 10 * hidden + attention + 4 * sizes.intermediate_size
    if config.engine.activation_checkpointing:
        per_row = 3 * hidden + attention
    # All micro batches of an optimizer step are captured first; the last stage holds those of its whole team.
    held = rows * config.engine.accumulate * config.features.stages
    return [
        ("weights", element * total // (world if stage == 3 else 1)),
        ("gradients", gradients),
        ("head gradient", 4 * sizes.draft_vocab_size * hidden if config.draft.train_head else 0),
        ("optimizer, host" if config.engine.offload_optimizer else "optimizer", optimizer),
        ("activations", config.ttt.steps * rows * per_row * element),
        # Half of it where the fused kernel serves; elsewhere `chunk_elements` counts the copies in fp32.
        ("logits", 4 * config.loss.chunk_elements),
        ("features", held * feature_bytes_per_token(sizes, element)),
    ]


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"
