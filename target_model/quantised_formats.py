"""The number formats of published checkpoints: their layouts, from numbers to bytes and back.

A weight [N, K] is stored as small numbers with one scale for each group of columns of a row, or for each row. Sources:
the OCP Microscaling specification 1.0 (MXFP8, MXFP4) and NVIDIA's description of NVFP4. Shapes: N rows (outputs), K
columns (inputs); any number of dimensions may stand before them.
"""

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

# The 8 magnitudes of an e2m1 number; bit 3 is its sign.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_MAX, E4M3_MAX = 6.0, 448.0
# Rows that are quantised at a time.
TILE_ROWS = 1024


@dataclass(frozen=True)
class Format:
    """Layout of one weight.

    values_dtype  e4m3 [N, K], or uint8 [N, K / 2]: two e2m1 numbers a byte, the even column in the low nibble
    scale_dtype   uint8 (E8M0: 2 ** (byte - 127)) or e4m3, [N, K / group]; fp32 [N, 1] where the group is a whole row
    group         columns that share a scale; 0: the whole row
    tensor_scale  "" without one; else a weight has one more fp32 scale, by which the group scales are to be
                  multiplied ("multiply") or divided ("divide")
    """

    name: str
    values_dtype: torch.dtype
    scale_dtype: torch.dtype
    group: int
    tensor_scale: str = ""

    @property
    def per_byte(self) -> int:
        """Numbers in a byte of values."""
        return 2 if self.values_dtype == torch.uint8 else 1

    @property
    def largest(self) -> float:
        """The largest stored number."""
        return E2M1_MAX if self.per_byte == 2 else E4M3_MAX

    def values_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the values of a weight of this shape."""
        return (*shape[:-1], shape[-1] // self.per_byte)

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of its group scales."""
        return (*shape[:-1], shape[-1] // self.group if self.group else 1)

    def bytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of such a weight as published, its two fp32 numbers (weight and input scale) included."""
        scales = math.prod(self.scale_shape(shape)) * self.scale_dtype.itemsize
        return math.prod(shape) // self.per_byte + scales + (8 if self.tensor_scale else 0)


MXFP8 = Format("mxfp8", torch.float8_e4m3fn, torch.uint8, 32)
MXFP4 = Format("mxfp4", torch.uint8, torch.uint8, 32)
NVFP4 = Format("nvfp4", torch.uint8, torch.float8_e4m3fn, 16, "multiply")
NVFP4_PACKED = Format("nvfp4-packed", torch.uint8, torch.float8_e4m3fn, 16, "divide")
# Read only: some writers keep attention in it beside MXFP4 experts.
FP8 = Format("fp8", torch.float8_e4m3fn, torch.float32, 0)


@dataclass(frozen=True)
class Packed:
    """One stored weight. tensor_scale fp32 [] or None."""

    form: Format
    values: Tensor
    scale: Tensor
    tensor_scale: Tensor | None = None


def dequantise(
    form: Format, values: Tensor, scale: Tensor, tensor_scale: Tensor | None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The weight [.., N, K], computed in fp32 and rounded once to `dtype`.

    `tensor_scale` is one number, or one for each row: [.., N]. A scale byte of 255 is NaN, as the specification says.
    """
    if not form.group:
        return (unpack(values) * scale).to(dtype)
    if form.scale_dtype == torch.uint8:
        factors = scale.view(torch.float8_e8m0fnu).float()
    else:
        factors = unpack(scale)
        rows = tensor_scale[..., None, None] if tensor_scale.dim() == 0 else tensor_scale[..., None]
        factors = factors * rows if form.tensor_scale == "multiply" else factors / rows
    numbers = unpack(values)
    return (numbers.unflatten(-1, (-1, form.group)) * factors[..., None]).flatten(-2).to(dtype)


def unpack(stored: Tensor) -> Tensor:
    """What e4m3 numbers, or bytes of two e2m1 numbers, mean before scaling: fp32 [.., K]."""
    if stored.dtype == torch.float8_e4m3fn and stored.is_cuda:
        return stored.float()  # the CPU converts several times slower than it looks up
    codes = stored.view(torch.uint8).flatten().int()
    return _numbers_of_bytes(stored.dtype, stored.device).index_select(0, codes).view(*stored.shape[:-1], -1)


@functools.cache
def _numbers_of_bytes(dtype: torch.dtype, device: torch.device) -> Tensor:
    """fp32 [256, numbers in a byte]."""
    byte = torch.arange(256)
    if dtype == torch.float8_e4m3fn:
        return byte.to(torch.uint8).view(torch.float8_e4m3fn).float()[:, None].to(device)
    signed = torch.tensor([*E2M1, *(-number for number in E2M1)])
    return torch.stack((signed[byte & 15], signed[byte >> 4]), dim=-1).to(device)


def quantise(form: Format, weight: Tensor, tensor_scale: Tensor | None = None) -> Packed:
    """The weight [N, K] in this format. `tensor_scale` as `tensor_scale_of` gives it, for the formats that have one.
    Some rows at a time, so the working memory stays small.

    An E8M0 scale is a power of two: of the two beside largest magnitude / largest number, the one that leaves the
    smaller squared error over the group is taken.
    """
    parts = [_quantise_rows(form, rows, tensor_scale) for rows in weight.split(TILE_ROWS)]
    stored = tensor_scale
    if form.tensor_scale == "divide":
        stored = 1 / tensor_scale
    return Packed(form, torch.cat([values for values, _ in parts]), torch.cat([scale for _, scale in parts]), stored)


def _quantise_rows(form: Format, weight: Tensor, tensor_scale: Tensor | None) -> tuple[Tensor, Tensor]:
    groups = weight.float().unflatten(-1, (-1, form.group))
    if form.tensor_scale:
        scale = _e4m3(groups.abs().amax(-1) / form.largest / tensor_scale)
        numbers, _ = _nearest(form, groups, scale.float() * tensor_scale)
        return _bytes(form, numbers), scale
    # With the lower exponent the largest magnitudes of the group may be cut off.
    lower = (groups.abs().amax(-1) / form.largest).clamp(min=2.0**-120).log2().floor()
    numbers, error = _nearest(form, groups, lower.exp2())
    other, other_error = _nearest(form, groups, (lower + 1).exp2())
    raised = other_error < error
    numbers = torch.where(raised[..., None], other, numbers)
    return _bytes(form, numbers), (lower + raised + 127).to(torch.uint8)


def tensor_scale_of(form: Format, largest: Tensor) -> Tensor:
    """The fp32 scale of a weight whose largest magnitude is `largest`: its group scales then use all of e4m3."""
    scale = largest.float() / (form.largest * E4M3_MAX)
    return torch.where(scale > 0, scale, torch.ones_like(scale))


def round_e2m1(x: Tensor) -> Tensor:
    """Codes 0..15 (uint8) of the nearest e2m1 numbers, ties to the even code; larger magnitudes become 6."""
    magnitudes = torch.tensor(E2M1, device=x.device)
    between = (magnitudes[1:] + magnitudes[:-1]) / 2
    # bucketize gives a tie the lower code: where that is odd, the boundary moves below the tie.
    between[1::2] = torch.nextafter(between[1::2], torch.zeros_like(between[1::2]))
    return (torch.bucketize(x.abs(), between) + 8 * torch.signbit(x)).to(torch.uint8)


def _nearest(form: Format, groups: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """(stored numbers nearest to groups / scale: codes or e4m3 as fp32, squared error of each group)."""
    scale = scale[..., None]
    quotient = torch.where(scale > 0, groups / scale, 0.0)
    if form.per_byte == 2:
        codes = round_e2m1(quotient)
        magnitude = torch.tensor(E2M1, device=codes.device)[(codes & 7).int()]
        decoded, numbers = torch.where(codes >= 8, -magnitude, magnitude), codes
    else:
        decoded = numbers = _e4m3(quotient).float()
    return numbers, (decoded * scale - groups).square().sum(-1)


def _bytes(form: Format, numbers: Tensor) -> Tensor:
    flat = numbers.flatten(-2)
    if form.per_byte == 1:
        return flat.to(torch.float8_e4m3fn)
    return flat[..., 0::2] | (flat[..., 1::2] << 4)


def _e4m3(x: Tensor) -> Tensor:
    """Nearest e4m3 numbers; torch turns what exceeds 448 into NaN, here it becomes 448."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
