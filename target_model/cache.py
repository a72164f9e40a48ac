"""One paged pool for everything a sequence keeps: the target's K and V, the sparse layers' index K, and the draft's K
and V.

A page holds one sparse block of `page_size` slots, in every tensor under the same page id: whatever shares, moves or
frees a page does it for all of them. Shapes: L layers, P pages, B slots in a page, K kv heads, D head dim.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from target_model.batch import Batch
from target_model.config import M3Config
from target_model.kernels import ops


@dataclass(frozen=True)
class DraftKVShape:
    """What a draft layer keeps for one token; without a dtype, in that of the target."""

    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype | None = None


@dataclass(frozen=True)
class LayerCache:
    """One layer's view of the pool: k and v [P, B, K, D]; index_k [P, B, D] on sparse layers, else None."""

    k: Tensor
    v: Tensor
    index_k: Tensor | None


class PagedCache:
    """The pool behind all layers of a target and, when asked, of its draft.

    k, v [L, P, B, K, D]; index_k [sparse layers, P, B, D]; draft_k, draft_v [P, B, draft K, draft D] or None.
    `kv_dtype` is that of k and v, `index_dtype` that of index_k; float8_e4m3fn is possible, without scales. Both
    default to `dtype`.
    """

    def __init__(
        self,
        config: M3Config,
        pages: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        draft: DraftKVShape | None = None,
        kv_dtype: torch.dtype | None = None,
        index_dtype: torch.dtype | None = None,
    ):
        def pool(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        kv_dtype, index_dtype = kv_dtype or dtype, index_dtype or dtype
        block, heads, dim = config.block_size, config.num_kv_heads, config.head_dim
        self.page_size, self.num_pages = block, pages
        self._sparse_ordinal = {layer: n for n, layer in enumerate(i for i, s in enumerate(config.sparse_layers) if s)}
        self.k = pool(config.num_layers, pages, block, heads, dim, dtype=kv_dtype)
        self.v = pool(config.num_layers, pages, block, heads, dim, dtype=kv_dtype)
        self.index_k = pool(len(self._sparse_ordinal), pages, block, config.index_dim, dtype=index_dtype)
        self.draft_k = self.draft_v = None
        if draft is not None:
            shape, draft_dtype = (pages, block, draft.num_kv_heads, draft.head_dim), draft.dtype or dtype
            self.draft_k, self.draft_v = pool(*shape, dtype=draft_dtype), pool(*shape, dtype=draft_dtype)

    def layer(self, layer: int) -> LayerCache:
        """The target's 0-based layer `layer`."""
        ordinal = self._sparse_ordinal.get(layer)
        return LayerCache(self.k[layer], self.v[layer], None if ordinal is None else self.index_k[ordinal])

    def draft(self) -> LayerCache:
        """The draft's one layer. The row of the token at position t lies in slot t; slot 0 holds nothing."""
        return LayerCache(self.draft_k, self.draft_v, None)

    def commit(self, batch: Batch, path_RM: Tensor) -> None:
        """Moves the target's rows of accepted nodes behind the root: node path[r, m] goes to slot committed[r] + 1 + m.

        `path_RM` int64 holds node numbers, root excluded, in order of depth, padded with -1. Source and destination
        overlap: every row is read before any is written. The draft's guessed rows are not moved.
        """
        ops.commit_rows(self.k, self.v, self.index_k, path_RM, batch)

    def bytes_per_token(self) -> int:
        """Bytes one token takes over all layers, draft included."""
        pools = [self.k, self.v, self.index_k] + ([self.draft_k, self.draft_v] if self.draft_k is not None else [])
        return sum(pool.numel() * pool.element_size() for pool in pools) // (self.num_pages * self.page_size)


class TransientCache:
    """Storage of one layer that every layer uses in turn: a prefill from position 0 reads no other layer's keys."""

    def __init__(self, config: M3Config, pages: int, *, dtype: torch.dtype, device: torch.device | str):
        block, heads, dim = config.block_size, config.num_kv_heads, config.head_dim
        self.page_size, self.num_pages = block, pages
        self._sparse = config.sparse_layers
        self._k = torch.zeros(pages, block, heads, dim, dtype=dtype, device=device)
        self._v = torch.zeros_like(self._k)
        self._index_k = torch.zeros(pages, block, config.index_dim, dtype=dtype, device=device)

    def layer(self, layer: int) -> LayerCache:
        return LayerCache(self._k, self._v, self._index_k if self._sparse[layer] else None)
