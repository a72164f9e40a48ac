"""MSA's indexer: which blocks every row attends to. The kernels are in index_scores.py.

Shapes: T rows, J index heads, D index dim, P pages, B slots, N chosen blocks.
"""

import torch
from torch import Tensor

from target_model.batch import Batch
from target_model.kernels.common import (
    FLOATS,
    INTERPRETED,
    PDL,
    POOL_FLOATS,
    cdiv,
    launch_options,
    power_of_two,
    require,
    require_tensor,
)
from target_model.kernels.index_scores import (
    choose_kernel,
    few_scores_kernel,
    many_scores_kernel,
    scratch_scores_kernel,
)

FEW_COLUMNS = 64  # up to so many (row, head) pairs of a sequence K is the first operand of the product


def select_blocks(
    index_q_TJD: Tensor, index_k_pool_PBD: Tensor, batch: Batch, top_k: int, init_blocks: int, local_blocks: int
) -> Tensor:
    """The blocks each row's index heads choose: int32 [T, J, top_k], ascending, -1 behind the last."""
    rows, heads, dim = index_q_TJD.shape
    require_tensor("index_q", index_q_TJD, (batch.num_rows, None, None), FLOATS, contiguous=False)
    require(index_q_TJD.stride(1) == dim, "heads of index_q must be adjacent")
    require_tensor("index_k_pool", index_k_pool_PBD, (None, batch.page_size, dim), POOL_FLOATS)
    require(dim in (32, 64, 128), f"index dim {dim} is not supported: 32, 64 or 128")
    require(
        heads == power_of_two(heads) and heads <= 16, f"{heads} index heads are not supported: a power of two up to 16"
    )
    require(batch.page_size in (16, 32, 64, 128), f"page size {batch.page_size} is not supported: 16, 32, 64 or 128")
    require(batch.ancestors is None or batch.max_rows <= 64, "a tree has at most 64 rows")
    require(init_blocks + local_blocks <= top_k, "more forced blocks than top_k")
    blocks = cdiv(batch.max_context, batch.page_size)
    scores = torch.empty(rows, heads, blocks, dtype=torch.float32, device=index_q_TJD.device)
    scratch, span = scores, 1
    if blocks > top_k:  # else choose_kernel reads no score
        if batch.max_rows * heads <= FEW_COLUMNS:
            score_few(index_q_TJD, index_k_pool_PBD, batch, scores)
        else:
            score_many(index_q_TJD, index_k_pool_PBD, batch, scores)
        if batch.ancestors is not None:
            scratch, span = score_scratch(index_q_TJD, index_k_pool_PBD, batch)
    return choose(scores, scratch, span, batch, top_k, init_blocks, local_blocks)


def score_few(
    index_q_TJD: Tensor,
    pool: Tensor,
    batch: Batch,
    scores: Tensor,
    *,
    pages: int = 2,
    num_warps: int = 4,
    num_stages: int = 1,
) -> None:
    """Scores of the committed keys, few rows a sequence."""
    _, heads, dim = index_q_TJD.shape
    blocks = scores.shape[2]
    columns = max(16, power_of_two(batch.max_rows * heads))
    few_scores_kernel[(cdiv(blocks, pages), batch.num_sequences, 1)](
        index_q_TJD, pool, scores, batch.row_start, batch.committed, batch.slots, batch.block_table,
        index_q_TJD.stride(0),
        batch.block_table.shape[1], blocks, TREE=batch.ancestors is not None, J=heads, D=dim, PAGE=batch.page_size,
        BLOCK_C=columns, PAGES=pages, UPCAST=INTERPRETED, PDL=PDL,
        **launch_options(num_warps, num_stages),
    )  # fmt: skip


def score_many(
    index_q_TJD: Tensor,
    pool: Tensor,
    batch: Batch,
    scores: Tensor,
    *,
    block_c: int = 128,
    splits: int | None = None,
    num_warps: int = 8,
    num_stages: int = 2,
    registers: int | None = 128,
) -> None:
    """Scores of the committed keys, many rows a sequence."""
    _, heads, dim = index_q_TJD.shape
    blocks = scores.shape[2]
    tiles = cdiv(batch.max_rows * heads, block_c)
    if splits is None:
        splits = min(blocks, max(1, 528 // (tiles * batch.num_sequences)))
    many_scores_kernel[(tiles * splits, batch.num_sequences)](
        index_q_TJD, pool, scores, batch.row_start, batch.committed, batch.slots, batch.block_table,
        index_q_TJD.stride(0),
        batch.block_table.shape[1], blocks, TREE=batch.ancestors is not None, J=heads, D=dim, PAGE=batch.page_size,
        BLOCK_C=block_c, SPLITS=splits, UPCAST=INTERPRETED, PDL=PDL,
        **launch_options(num_warps, num_stages, registers),
    )  # fmt: skip


def score_scratch(index_q_TJD: Tensor, pool: Tensor, batch: Batch) -> tuple[Tensor, int]:
    """Scores of a tree's nodes: [T, J, span] from block committed // B on, and span."""
    rows, heads, dim = index_q_TJD.shape
    span = 63 // batch.page_size + 2
    scratch = torch.empty(rows, heads, span, dtype=torch.float32, device=index_q_TJD.device)
    columns = min(64, max(16, power_of_two(batch.max_rows * heads)))
    scratch_scores_kernel[(cdiv(batch.max_rows * heads, columns), batch.num_sequences)](
        index_q_TJD, pool, scratch, batch.row_start, batch.committed, batch.positions, batch.ancestors,
        batch.block_table,
        index_q_TJD.stride(0), batch.block_table.shape[1], J=heads, D=dim, PAGE=batch.page_size, BLOCK_C=columns,
        SPAN=span,
        UPCAST=INTERPRETED, PDL=PDL, **launch_options(4, 1),
    )  # fmt: skip
    return scratch, span


def choose(
    scores_TJC: Tensor, scratch_TJS: Tensor, span: int, batch: Batch, top_k: int, init_blocks: int, local_blocks: int
) -> Tensor:
    """The `top_k` best blocks of each row and head, ascending."""
    rows, heads, blocks = scores_TJC.shape
    chosen = torch.empty(rows, heads, top_k, dtype=torch.int32, device=scores_TJC.device)
    width = max(power_of_two(top_k), power_of_two(blocks))
    choose_kernel[(rows * heads,)](
        scores_TJC, scratch_TJS, batch.row_start, batch.committed, batch.positions, chosen, blocks, batch.num_sequences,
        init_blocks, local_blocks, TREE=batch.ancestors is not None, J=heads, PAGE=batch.page_size, N=top_k,
        BLOCKS=width,
        SPAN=span, SEQUENCES=power_of_two(batch.num_sequences), PDL=PDL,
        **launch_options(1 if width <= 1024 and rows * heads > 512 else 4, 1),
    )  # fmt: skip
    return chosen
