"""Floating-point operations of a training step of the draft, and what a device can do: together its MFU.

Counted as usual: a product of [M, K] and [K, N] is 2 M K N forward, and twice that backward where both factors have a
gradient, once where one has. The frozen target's pass is not part of it, nor is what activation checkpointing repeats.
"""

from collections.abc import Sequence

import torch

from draft_model.config import DraftConfig

# Dense bf16 matrix products, operations a second, by a part of the name that CUDA gives the device.
_PEAKS = {
    "H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "H20": 148e12, "A100": 312e12, "B200": 2250e12,
    "B300": 2250e12, "MI300X": 1307e12, "MI355X": 2500e12, "L40S": 362e12, "RTX 4090": 165e12,
}  # fmt: skip


def peak_flops(device: torch.device) -> float | None:
    """Operations a second of a known CUDA device in bf16, else None."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in _PEAKS.items() if part in name), None)


def step_flops(config: DraftConfig, tokens: int, visible: float, rows: Sequence[float], train_head: bool) -> float:
    """Operations of forward and backward over rows of text.

    tokens: all of them, since each has keys and values at step 0. visible: step-0 keys that a query sees, on average.
    rows: queries that count at each TTT step.
    """
    hidden, heads = config.hidden_size, config.num_heads * config.head_dim
    packed = heads + 2 * config.num_kv_heads * config.head_dim
    # Taps have no gradient: the product of fc goes backward once.
    fc = 4 * tokens * config.num_aux * config.target_hidden_size * hidden
    inputs = 6 * (tokens + sum(rows[1:])) * 2 * hidden * packed
    layer = 6 * sum(rows) * (heads * hidden + 3 * hidden * config.intermediate_size)
    # Scores and weighted sum are two products; at step k a row sees its own column of k keys besides.
    attention = 12 * heads * sum(count * (visible + step) for step, count in enumerate(rows))
    head = (6 if train_head else 4) * sum(rows) * hidden * config.draft_vocab_size
    # The teacher's product is made once for all steps that share a label.
    teacher = 2 * (rows[0] if rows else 0) * config.target_hidden_size * config.vocab_size
    return fc + inputs + layer + attention + head + teacher
