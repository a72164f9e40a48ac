"""Full and block-sparse (MSA) attention of one layer, over the paged cache.

Shapes: T rows, H hidden, Q query heads, K kv heads, J index heads (J == K), D head dim, n packed heads, N chosen
blocks, P pages, B slots in a page.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from target_model.batch import Batch
from target_model.cache import LayerCache
from target_model.config import M3Config
from target_model.kernels import ops
from target_model.layers import Rotary, empty


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
        # A layer that reuses the previous choice still projects its index heads, and then leaves them.
        self.used_heads = config.num_heads + config.num_kv_heads if self.reuses_blocks else normed
        self.scale = dim**-0.5
        self.packed = empty((normed + config.num_kv_heads) * dim, config.hidden_size, dtype=dtype)
        self.head_scale = empty(normed, dim, dtype=torch.float32)
        self.out = empty(config.hidden_size, config.num_heads * dim, dtype=dtype)

    def forward(
        self,
        x_TH: Tensor,
        batch: Batch,
        cache: LayerCache,
        rotary: Rotary,
        cos_sin: tuple[Tensor, Tensor],
        previous_TJN: Tensor | None,
        need_blocks: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention output [T, H] and the blocks in force behind this layer.

        `previous_TJN` is the choice of the sparse layer before. The choice is None while every block is chosen (then
        MSA is full attention and nothing is scored), unless `need_blocks`.
        """
        config = self.config
        heads_TnD = F.linear(x_TH, self.packed).view(x_TH.shape[0], -1, config.head_dim)
        normed_TnD = F.rms_norm(heads_TnD[:, : self.used_heads].float(), (config.head_dim,), None, config.rms_norm_eps)
        normed_TnD = rotary.rotate(normed_TnD * self.head_scale[: self.used_heads], *cos_sin).to(x_TH.dtype)
        q_TQD = normed_TnD[:, : config.num_heads]
        k_TKD = normed_TnD[:, config.num_heads : config.num_heads + config.num_kv_heads]
        v_TKD = heads_TnD[:, -config.num_kv_heads :]
        ops.write_kv(k_TKD, v_TKD, cache.k, cache.v, batch)

        blocks_TJN = previous_TJN
        if self.sparse and not self.reuses_blocks:
            ops.write_index_k(normed_TnD[:, -1], cache.index_k, batch)
            blocks_TJN = None
            if need_blocks or batch.max_context > config.top_k_blocks * config.block_size:
                index_q_TJD = normed_TnD[:, -1 - config.num_index_heads : -1]
                blocks_TJN = ops.select_blocks(
                    index_q_TJD, cache.index_k, batch, config.top_k_blocks, config.init_blocks, config.local_blocks
                )
        if self.sparse and blocks_TJN is not None:
            attended = ops.sparse_attention(q_TQD, cache.k, cache.v, blocks_TJN, batch, self.scale)
        else:
            attended = ops.paged_attention(q_TQD, cache.k, cache.v, batch, self.scale)
        return F.linear(attended.flatten(1), self.out), blocks_TJN
