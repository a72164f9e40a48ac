"""Weights that stay quantised in memory, and products with them.

Shapes: E experts (absent for a dense weight), N rows (outputs), K columns (inputs), T rows of a batch.
"""

from collections.abc import Iterable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from target_model.quantised_formats import Format, Packed, dequantise

# Rows of a dense weight that are widened at a time: what a product needs beside its operands stays small.
TILE_ROWS = 4096


class QuantisedWeight(nn.Module):
    """A weight [N, K] or [E, N, K] in one of the formats, in the layout it is published in.

    values        e4m3 [.., N, K] or uint8 [.., N, K / 2]
    scale         uint8 (E8M0) or e4m3 [.., N, K / group], or fp32 [.., N, 1]
    tensor_scale  fp32 [.., N] for formats that have one (each stored tensor's number, repeated over its rows: a
                  parameter packs several tensors), else None
    """

    def __init__(self, shape: tuple[int, ...], form: Format):
        super().__init__()
        self.form, self.shape = form, torch.Size(shape)
        self.values = _frozen(torch.empty(form.values_shape(shape), dtype=form.values_dtype, device="meta"))
        self.scale = _frozen(torch.empty(form.scale_shape(shape), dtype=form.scale_dtype, device="meta"))
        self.tensor_scale = _frozen(torch.empty(shape[:-1], device="meta")) if form.tensor_scale else None

    def store(self, packed: Packed, index: tuple[int | slice, ...]) -> None:
        """Puts one stored tensor at `index`: expert and rows."""
        self.values[index].copy_(packed.values)
        self.scale[index].copy_(packed.scale.view(self.scale.dtype))
        if self.tensor_scale is not None:
            self.tensor_scale[index].copy_(packed.tensor_scale)

    def dequantised(self, index: int | slice, dtype: torch.dtype) -> Tensor:
        """Some of the first dimension, as plain numbers."""
        tensor_scale = None if self.tensor_scale is None else self.tensor_scale[index]
        return dequantise(self.form, self.values[index], self.scale[index], tensor_scale, dtype)

    def linear(self, x_TK: Tensor) -> Tensor:
        """x times a dense weight: [T, N]. The weight is widened tile by tile and nothing of it is kept."""
        tiles = range(0, self.shape[0], TILE_ROWS)
        parts = [F.linear(x_TK, self.dequantised(slice(row, row + TILE_ROWS), x_TK.dtype)) for row in tiles]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def linear(x_TK: Tensor, weight: Tensor | QuantisedWeight) -> Tensor:
    """x times a weight [N, K], whichever way it is stored."""
    return weight.linear(x_TK) if isinstance(weight, QuantisedWeight) else F.linear(x_TK, weight)


def expert_weight(weight: Tensor | QuantisedWeight, expert: int, dtype: torch.dtype) -> Tensor:
    """One expert's weight [N, K] of [E, N, K], as plain numbers."""
    return weight.dequantised(expert, dtype) if isinstance(weight, QuantisedWeight) else weight[expert]


def quantise_parameters(model: nn.Module, formats: Mapping[str, Format]) -> None:
    """Replaces the named parameters, which have no storage yet, by quantised weights."""
    for name, form in formats.items():
        owner, _, attribute = name.rpartition(".")
        module = model.get_submodule(owner)
        shape = tuple(getattr(module, attribute).shape)
        delattr(module, attribute)
        setattr(module, attribute, QuantisedWeight(shape, form))


def common_formats(stored: Iterable[tuple[str, Format | None]]) -> dict[str, Format]:
    """By parameter, from (parameter, format of one of the tensors it packs): the format, where all have the same one.

    A parameter that packs tensors of different formats (some of them excluded from quantisation) is left out: it is
    kept as plain numbers.
    """
    found: dict[str, set[Format | None]] = {}
    for parameter, form in stored:
        found.setdefault(parameter, set()).add(form)
    return {name: next(iter(forms)) for name, forms in found.items() if len(forms) == 1 and None not in forms}


def _frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
