"""MSA's indexer: which blocks every row attends to. The kernels are in index_scores.py.

Shapes: T rows, J index heads, D index dim, P pages, B slots, N chosen blocks.
"""

import torch
from torch import Tensor

from target_model.batch import Batch
from target_model.kernels.choose_blocks import choose_kernel
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
from target_model.kernels.index_scores import few_scores_kernel, many_scores_kernel

FEW_COLUMNS = 64  # up to so many (row, head) pairs of a sequence K is the first operand of the product


def select_blocks(
    index_q_TJD: Tensor, index_k_pool_PBD: Tensor, batch: Batch, top_k: int, init_blocks: int, local_blocks: int
) -> Tensor:
    """The blocks each row's index heads choose: int32 [T, J, top_k], ascending, -1 behind the last."""
    check_index(index_q_TJD, index_k_pool_PBD, batch, top_k, init_blocks, local_blocks)
    scores, scratch = score_blocks(index_q_TJD, index_k_pool_PBD, batch, top_k)
    return choose(scores, scratch, batch, top_k, init_blocks, local_blocks)


def check_index(
    index_q_TJD: Tensor, index_k_pool_PBD: Tensor, batch: Batch, top_k: int, init_blocks: int, local_blocks: int
) -> None:
    """The conditions of all index kernels."""
    _, heads, dim = index_q_TJD.shape
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


def score_blocks(index_q_TJD: Tensor, index_k_pool_PBD: Tensor, batch: Batch, top_k: int) -> tuple[Tensor, Tensor]:
    """Scores of all blocks [T, J, blocks] and, in trees, of the scratch keys [T, J, span] from block committed // B
    on."""
    rows, heads, _ = index_q_TJD.shape
    blocks = cdiv(batch.max_context, batch.page_size)
    scores = torch.empty(rows, heads, blocks, dtype=torch.float32, device=index_q_TJD.device)
    scratch = scores
    if batch.ancestors is not None:
        span = 63 // batch.page_size + 2
        scratch = torch.empty(rows, heads, span, dtype=torch.float32, device=index_q_TJD.device)
    if blocks > top_k:  # else choose_kernel reads no score
        if batch.max_rows * heads <= FEW_COLUMNS:
            score_few(index_q_TJD, index_k_pool_PBD, batch, scores, scratch)
        else:
            score_many(index_q_TJD, index_k_pool_PBD, batch, scores, scratch)
    return scores, scratch


def score_few(
    index_q_TJD: Tensor,
    pool: Tensor,
    batch: Batch,
    scores: Tensor,
    scratch: Tensor,
    *,
    pages: int | None = None,
    num_warps: int = 4,
    num_stages: int = 3,
) -> None:
    """Few rows a sequence. `pages` of a program: one while all programs run at the same time, else several, so that the
    next page is under way."""
    _, heads, dim = index_q_TJD.shape
    blocks = scores.shape[2]
    if pages is None:
        pages = 4 if blocks * batch.num_sequences > 768 else 1
    tree = batch.ancestors is not None
    few_scores_kernel[(cdiv(blocks, pages) + tree, batch.num_sequences)](
        index_q_TJD, pool, scores, scratch, batch.row_start, batch.committed,
        batch.slots, batch.positions, batch.ancestors if tree else batch.row_start, batch.block_table,
        index_q_TJD.stride(0), batch.block_table.shape[1], blocks, TREE=tree,
        ONE=batch.max_rows == 1 and batch.num_rows == batch.num_sequences, J=heads, D=dim, PAGE=batch.page_size,
        BLOCK_C=max(16, power_of_two(batch.max_rows * heads)), PAGES=pages, STAGES=num_stages,
        SPAN=scratch.shape[2], UPCAST=INTERPRETED, PDL=PDL, **launch_options(num_warps, 1),
    )  # fmt: skip


def score_many(
    index_q_TJD: Tensor,
    pool: Tensor,
    batch: Batch,
    scores: Tensor,
    scratch: Tensor,
    *,
    block_c: int = 128,
    splits: int | None = None,
    num_warps: int = 8,
    num_stages: int = 2,
    registers: int | None = 128,
) -> None:
    """Many rows a sequence."""
    _, heads, dim = index_q_TJD.shape
    blocks = scores.shape[2]
    tiles = cdiv(batch.max_rows * heads, block_c)
    tree = batch.ancestors is not None
    if splits is None:
        splits = min(
            blocks, max(1, (256 if tree and batch.num_sequences == 1 else 528) // (tiles * batch.num_sequences))
        )
    parts = splits + tree
    many_scores_kernel[(tiles * parts, batch.num_sequences)](
        index_q_TJD, pool, scores, scratch, batch.row_start, batch.committed, batch.slots, batch.positions,
        batch.ancestors if tree else batch.row_start, batch.block_table, index_q_TJD.stride(0),
        batch.block_table.shape[1], blocks, TREE=tree, J=heads, D=dim, PAGE=batch.page_size, BLOCK_C=block_c,
        SPLITS=splits, PARTS=parts, SPAN=scratch.shape[2], UPCAST=INTERPRETED, PDL=PDL,
        **launch_options(num_warps, num_stages, registers),
    )  # fmt: skip


def choose(
    scores_TJC: Tensor, scratch_TJS: Tensor, batch: Batch, top_k: int, init_blocks: int, local_blocks: int
) -> Tensor:
    """The `top_k` best blocks of each row and head, ascending."""
    rows, heads, blocks = scores_TJC.shape
    chosen = torch.empty(rows, heads, top_k, dtype=torch.int32, device=scores_TJC.device)
    groups = max(64, power_of_two(top_k))
    width = max(groups, power_of_two(blocks))
    choose_kernel[(rows * heads,)](
        scores_TJC, scratch_TJS, batch.row_start, batch.committed, batch.positions, chosen, blocks, batch.num_sequences,
        init_blocks, local_blocks, TREE=batch.ancestors is not None, J=heads, PAGE=batch.page_size, N=top_k,
        BLOCKS=width, GROUPS=groups, SPAN=scratch_TJS.shape[2], SEQUENCES=max(32, power_of_two(batch.num_sequences)),
        PDL=PDL,
        **launch_options(1 if rows * heads > 512 and width <= 1024 else 4, 1),
    )  # fmt: skip
    return chosen
