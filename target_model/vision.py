"""The vision tower: patches of images and videos to rows that the language model reads in place of embeddings.

Shapes: N patches (all segments together), C values of a patch (channels * frames * height * width), W tower width,
n heads, D head dim, G = merge^2 neighbours that become one row, M = N / G rows, H hidden of the language model.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from target_model.config import VisionConfig
from target_model.layers import empty

# Temporal patches, rows of patches, columns of patches. Patches of one segment attend to each other and to no others.
Grid = tuple[int, int, int]


class VisionTower(nn.Module):
    """Patch embedding, pre-norm, pre-LN layers with 3D RoPE, the projector on every patch, and the 2 x 2 merge.

    Patches come grouped: the `merge_size`^2 patches that become one row stand together (`images.py` orders them so).
    """

    def __init__(self, config: VisionConfig, text_hidden: int, dtype: torch.dtype):
        super().__init__()
        self.config = config
        width, projected = config.hidden_size, config.projector_hidden_size
        self.merged = config.spatial_merge_size**2
        # A convolution whose stride is its kernel is a product with the flattened patch; kept in the stored shape.
        patch = (config.num_channels, config.temporal_patch_size, config.patch_size, config.patch_size)
        self.patch_weight = empty(width, *patch, dtype=dtype)
        self.pre_norm = nn.LayerNorm(width, config.layer_norm_eps, dtype=dtype)
        self.layers = nn.ModuleList(VisionLayer(config, dtype) for _ in range(config.num_layers))
        self.projector = TwoLayers(width, projected, text_hidden, dtype)
        self.merger = TwoLayers(text_hidden * self.merged, projected, text_hidden, dtype)

    @torch.no_grad()
    def forward(self, patches_NC: Tensor, grids: Sequence[Grid]) -> Tensor:
        """Rows [M, H] of the segments `grids`, one after the other, in the order of their patches [N, C]."""
        lengths = [frames * rows * columns for frames, rows, columns in grids]
        if sum(lengths) != patches_NC.shape[0]:
            raise ValueError(f"{patches_NC.shape[0]} patches for grids of {sum(lengths)}")
        weight = self.patch_weight.flatten(1)
        state_NW = self.pre_norm(F.linear(patches_NC.to(weight.device, weight.dtype), weight))
        cos_sin = rotary_tables(patch_positions(grids, self.config.spatial_merge_size, weight.device), self.config)
        for layer in self.layers:
            state_NW = layer(state_NW, cos_sin, lengths)
        return self.merger(self.projector(state_NW).unflatten(0, (-1, self.merged)).flatten(1))


class VisionLayer(nn.Module):
    """Full attention inside a segment and a gelu MLP, each behind a layer norm and added to the stream."""

    def __init__(self, config: VisionConfig, dtype: torch.dtype):
        super().__init__()
        width = config.hidden_size
        self.heads = config.num_heads
        self.layer_norm1 = nn.LayerNorm(width, config.layer_norm_eps, dtype=dtype)
        self.packed = nn.Linear(width, 3 * width, dtype=dtype)  # q | k | v
        self.out = nn.Linear(width, width, dtype=dtype)
        self.layer_norm2 = nn.LayerNorm(width, config.layer_norm_eps, dtype=dtype)
        self.up = nn.Linear(width, config.intermediate_size, dtype=dtype)
        self.down = nn.Linear(config.intermediate_size, width, dtype=dtype)

    def forward(self, state_NW: Tensor, cos_sin: tuple[Tensor, Tensor], lengths: Sequence[int]) -> Tensor:
        packed = self.packed(self.layer_norm1(state_NW)).unflatten(1, (3, self.heads, -1))
        query_NnD, key_NnD = (_rotate(packed[:, place], *cos_sin) for place in (0, 1))
        segments = zip(
            *(x.transpose(0, 1).split(lengths, dim=1) for x in (query_NnD, key_NnD, packed[:, 2])), strict=True
        )
        attended = [F.scaled_dot_product_attention(q[None], k[None], v[None])[0] for q, k, v in segments]
        state_NW = state_NW + self.out(torch.cat(attended, dim=1).transpose(0, 1).flatten(1))
        return state_NW + self.down(F.gelu(self.up(self.layer_norm2(state_NW))))


class TwoLayers(nn.Module):
    """Linear, gelu, linear, with biases: the projector of a patch, and the merger of a group."""

    def __init__(self, inputs: int, inner: int, outputs: int, dtype: torch.dtype):
        super().__init__()
        self.first = nn.Linear(inputs, inner, dtype=dtype)
        self.second = nn.Linear(inner, outputs, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.gelu(self.first(x)))


def patch_positions(grids: Sequence[Grid], merge: int, device: torch.device | str = "cpu") -> Tensor:
    """(frame, row, column) of every patch, int64 [N, 3], in the order of the merge groups; frames count per segment."""
    positions = []
    for frames, rows, columns in grids:
        axes = (torch.arange(extent, device=device) for extent in (frames, rows, columns))
        grid = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1)
        groups = grid.view(frames, rows // merge, merge, columns // merge, merge, 3)
        positions.append(groups.transpose(2, 3).reshape(-1, 3))
    return torch.cat(positions)


def rotary_tables(positions_N3: Tensor, config: VisionConfig) -> tuple[Tensor, Tensor]:
    """cos and sin [N, 1, D] in fp32: a third of the dims for each axis (rounded down to even), the rest pass.

    As full-width tables with the sine of the first half negated, for `_rotate`.
    """
    dim = config.hidden_size // config.num_heads
    axis_dims = 2 * (dim // 3 // 2)
    exponents = torch.arange(0, axis_dims, 2, dtype=torch.float32, device=positions_N3.device) / axis_dims
    angles = (positions_N3[:, :, None].float() / config.rope_theta**exponents).flatten(1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=-1)[:, None], torch.cat((-sin, sin), dim=-1)[:, None]


def _rotate(x_NnD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate-half over the first dims, in fp32."""
    turned, passed = x_NnD.split((cos.shape[-1], x_NnD.shape[-1] - cos.shape[-1]), dim=-1)
    turned = turned.float()
    turned = turned * cos + turned.roll(cos.shape[-1] // 2, dims=-1) * sin
    return torch.cat((turned.to(x_NnD.dtype), passed), dim=-1)
