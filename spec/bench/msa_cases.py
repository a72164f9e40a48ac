"""MSA on the shapes of MiniMax-M3: index and sparse attention in decode, tree verification and prefill."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from spec.bench.kernel_timing import Machine, Row, Timer
from target_model.batch import Batch
from target_model.kernels import select_blocks, sparse_attention

HEADS, KV_HEADS, DIM, PAGE, TOP_K = 64, 4, 128, 128, 16
SCALE = DIM**-0.5
# Microseconds for index and attention together of the best public kernels on an H200 (2026-11-29), and for dense
# attention.
PUBLIC = {
    "decode B1 8k": (20.4, 28.9),
    "decode B1 32k": (22.2, 39.9),
    "decode B1 128k": (28.8, 87.7),
    "decode B16 32k": (68.1, 246),
    "decode B64 32k": (204, 939),
    "decode B16 128k": (159, 943),
    "tree B1x8 32k": (30.7, 55),
    "tree B1x64 32k": (92.4, 232),
    "tree B8x8 32k": (88.3, 238),
    "tree B8x16 32k": (141, 435),
    "tree B8x64 32k": (577, 904),
    "tree B32x16 32k": (490, 946),
    "tree B32x64 32k": (1549, 3810),
    "prefill 8k": (4021, 1763),
    "prefill 32k": (18615, 29005),
    "prefill 128k": (97751, 498928),
}


def scattered_tables(sequences: int, pages: int) -> list[list[int]]:
    """Block tables over a shuffled pool."""
    order = torch.randperm(sequences * pages, generator=torch.Generator().manual_seed(0)).tolist()
    return [order[r * pages : (r + 1) * pages] for r in range(sequences)]


def random(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def decode_batch(sequences: int, context: int) -> Batch:
    """One row a sequence, the last of `context` tokens."""
    tables = scattered_tables(sequences, context // PAGE)
    return Batch.causal(PAGE, "cuda", [[0]] * sequences, [context - 1] * sequences, tables)


def prefill_batch(context: int) -> Batch:
    """A whole prompt."""
    return Batch.causal(PAGE, "cuda", [[0] * context], [0], scattered_tables(1, context // PAGE))


def tree_batch(sequences: int, nodes: int, context: int) -> Batch:
    """Trees of width 4: node i hangs on node (i - 1) // 4."""
    depth, mask = [0], [1]
    for node in range(1, nodes):
        parent = (node - 1) // 4
        depth.append(depth[parent] + 1)
        mask.append(mask[parent] | 1 << node)
    tables = scattered_tables(sequences, context // PAGE + 1)
    tokens = [[0] * nodes] * sequences
    return Batch.tree(PAGE, "cuda", tokens, [context - 64] * sequences, tables, [depth] * sequences, [mask] * sequences)


def index_queries(batch: Batch, *, correlation: float, chain: bool) -> Tensor:
    """[T, K, D] whose choices overlap between rows as seen in practice: 8 neighbours choose about 21 (prefill) or 50
    (trees) blocks.

    chain: each row resembles the one before it; else all rows of a sequence resemble one vector.
    """
    fresh = (1 - correlation**2) ** 0.5
    rows = batch.max_rows
    noise = torch.randn(batch.num_sequences, rows, KV_HEADS, DIM, device="cuda")
    if chain:
        # x[t] = c x[t-1] + fresh noise, as a weighted cumulative sum in stretches short enough for fp32.
        state = torch.randn_like(noise[:, 0])
        out = torch.empty_like(noise)
        for begin in range(0, rows, 1024):
            piece = noise[:, begin : begin + 1024]
            power = (
                correlation ** torch.arange(1, piece.shape[1] + 1, device="cuda", dtype=torch.float64)[:, None, None]
            )
            sums = torch.cumsum(piece.double() / power, 1) * fresh + state.double()[:, None]
            out[:, begin : begin + 1024] = (sums * power).float()
            state = out[:, min(begin + 1024, rows) - 1]
        noise = out
    else:
        noise = correlation * torch.randn_like(noise[:, :1]) + fresh * noise
    return noise.reshape(-1, KV_HEADS, DIM).to(torch.bfloat16)


def attention_case(name: str, batch: Batch, timer: Timer, machine: Machine, *, kind: str) -> Row:
    """Index and sparse attention of one layer: each alone, then together."""
    graph = kind != "prefill"
    pages = batch.block_table.numel() + 1
    index_pool, k_pool, v_pool = (
        random(pages, PAGE, DIM),
        random(pages, PAGE, KV_HEADS, DIM),
        random(pages, PAGE, KV_HEADS, DIM),
    )
    index_q = index_queries(batch, correlation=0.998 if kind == "prefill" else 0.95, chain=kind == "prefill")
    q = random(batch.num_rows, HEADS, DIM)

    def index() -> Tensor:
        return select_blocks.select_blocks(index_q, index_pool, batch, TOP_K, 0, 1)

    blocks = index()

    def attend() -> Tensor:
        return sparse_attention.sparse_attention(q, k_pool, v_pool, blocks, batch, SCALE)

    def both() -> Tensor:
        return sparse_attention.sparse_attention(q, k_pool, v_pool, index(), batch, SCALE)

    repeats = 30 if graph else 5
    parts = {
        "index": timer(index, graph=graph, repeats=repeats),
        "attention": timer(attend, graph=graph, repeats=repeats),
    }
    both_time = timer(both, graph=graph, repeats=repeats)
    moved, operations = attention_work(batch, blocks)
    floor = sum(machine.floor(m, o) for m, o in zip(moved, operations, strict=True))
    return Row(name, both_time, floor, sum(moved), sum(operations), parts, *PUBLIC.get(name, (None, None)))


def attention_work(batch: Batch, blocks_TKN: Tensor) -> tuple[tuple[float, float], tuple[float, float]]:
    """((index bytes, attention bytes), (index FLOPs, attention FLOPs)) that cannot be avoided."""
    rows_of = torch.repeat_interleave(torch.arange(batch.num_sequences), torch.tensor(batch.row_counts)).to(
        blocks_TKN.device
    )
    wide = batch.max_context // PAGE + 2
    ids = (
        rows_of[:, None, None] * KV_HEADS + torch.arange(KV_HEADS, device=blocks_TKN.device)[None, :, None]
    ) * wide + blocks_TKN
    distinct = ids[blocks_TKN >= 0].unique().numel()
    ends = (batch.positions + 1).double()
    contexts = batch.committed.double().sum() + (batch.num_rows if batch.ancestors is None else 0)
    own = torch.minimum(ends, torch.full_like(ends, float(TOP_K * PAGE)))
    row_bytes = 2 * batch.num_rows * DIM
    moved = (float(contexts) * DIM * 2 + row_bytes * KV_HEADS, distinct * PAGE * DIM * 4.0 + 2 * row_bytes * HEADS)
    operations = (2.0 * DIM * KV_HEADS * float(ends.sum()), 4.0 * DIM * HEADS * float(own.sum()))
    return moved, operations


def attention_rows(timer: Timer, machine: Machine, wanted: Callable[[str], bool]) -> Iterator[Row]:
    """MSA in decode, tree verification and prefill."""
    cases = [(f"decode B{b} {c}k", "decode", (b, c * 1024)) for b in (1, 16, 64) for c in (8, 32, 128)]
    cases += [(f"tree B{b}x{n} 32k", "tree", (b, n, 32768)) for b in (1, 8, 32) for n in (8, 16, 64)]
    cases += [(f"prefill {c}k", "prefill", (c * 1024,)) for c in (8, 32, 128)]
    make = {"decode": decode_batch, "tree": tree_batch, "prefill": prefill_batch}
    for name, kind, arguments in cases:
        if wanted(name):
            yield attention_case(name, make[kind](*arguments), timer, machine, kind=kind)
            torch.cuda.empty_cache()
