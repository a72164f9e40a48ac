"""Full and block-sparse (MSA) attention of one layer, over the paged cache.

Shapes: T rows, H hidden, Q query heads, K kv heads, J index heads (J == K), D head dim, n packed heads, N chosen
blocks, P pages, B slots in a page.
"""

import torch
from torch import Tensor, nn

from target_model.batch import Batch
from target_model.cache import LayerCache
from target_model.config import M3Config
from target_model.kernels import ops
from target_model.layers import empty


class Attention(nn.Module):
    """Per-head Gemma norms, partial RoPE, grouped-query attention; sparse layers attend to the blocks their index
    heads choose.

    One packed projection makes the heads q | k | index q | index k | v (no index heads on full-attention layers):
    those to be normalised and rotated stand together, so one norm and one rotation serve them all. `head_scale` is 1 +
    w of each of those heads.
    """

    def __init__(self, config: M3Config, layer: int, dtype: torch.dtype):
        super().__init__()
        self.config = config
        self.sparse = config.sparse_layers[layer]
        self.reuses_blocks = config.reuses_blocks[layer]
        dim = config.head_dim
        normed = config.num_heads + config.num_kv_heads + (config.num_index_heads + 1 if self.sparse else 0)
        self.scale = dim**-0.5
        self.packed = empty((normed + config.num_kv_heads) * dim, config.hidden_size, dtype=dtype)
        self.head_scale = empty(normed, dim, dtype=torch.float32)
        self.out = empty(config.hidden_size, config.num_heads * dim, dtype=dtype)

    def forward(
        self,
        x_TH: Tensor,
        batch: Batch,
        cache: LayerCache,
        cos_sin: tuple[Tensor, Tensor],
        previous_TJN: Tensor | None,
        need_blocks: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention output [T, H] and the blocks in force behind this layer.

        `previous_TJN` is the choice of the sparse layer before. The choice is None while every block is chosen (then
        MSA is full attention and nothing is scored), unless `need_blocks`.
        """
        config = self.config
        # A layer that reuses the previous choice still projects its index heads, and then leaves them.
        chooses = self.sparse and not self.reuses_blocks
        q_TQD, index_q_TJD = ops.norm_rope_write(
            ops.linear(x_TH, self.packed).view(x_TH.shape[0], -1, config.head_dim),
            self.head_scale,
            *cos_sin,
            config.rotary_dim,
            config.rms_norm_eps,
            config.num_heads,
            cache.k,
            cache.v,
            cache.index_k if chooses else None,
            config.num_index_heads,
            batch,
        )
        blocks_TJN = previous_TJN
        if chooses and (need_blocks or batch.max_context > config.top_k_blocks * config.block_size):
            blocks_TJN = ops.select_blocks(
                index_q_TJD, cache.index_k, batch, config.top_k_blocks, config.init_blocks, config.local_blocks
            )
        if self.sparse and blocks_TJN is not None:
            attended = ops.sparse_attention(q_TQD, cache.k, cache.v, blocks_TJN, batch, self.scale)
        else:
            attended = ops.paged_attention(q_TQD, cache.k, cache.v, batch, self.scale)
        return ops.linear(attended.flatten(1), self.out), blocks_TJN
