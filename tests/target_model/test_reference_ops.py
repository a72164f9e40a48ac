"""The reference operations against their definitions, written as loops over rows in fp64."""

import random

import pytest
import torch
from torch import Tensor

from target_model.batch import Batch
from target_model.kernels import ops

BLOCK, KV_HEADS, HEADS, DIM, PAGES = 4, 2, 6, 8, 48


def trees_batch(seed: int) -> Batch:
    """Three sequences with trees of different sizes behind prefixes around block edges."""
    rng = random.Random(seed)
    committed, sizes = [15, 0, 32], [7, 1, 12]
    depths, ancestors = [], []
    for size in sizes:
        depth, mask = [0], [1]
        for node in range(1, size):
            parent = rng.randrange(max(0, node - 3), node)
            depth.append(depth[parent] + 1)
            mask.append(mask[parent] | 1 << node)
        depths.append(depth)
        ancestors.append(mask)
    return Batch.tree(BLOCK, "cpu", [[0] * size for size in sizes], committed, page_tables(), depths, ancestors)


def causal_batch() -> Batch:
    return Batch.causal(BLOCK, "cpu", [[0] * 9, [0] * 4, [0] * 1], [7, 0, 30], page_tables())


def page_tables() -> list[list[int]]:
    order = list(range(PAGES))
    random.Random(0).shuffle(order)
    return [order[:12], order[12:24], order[24:36]]


@pytest.fixture(params=["causal", "tree-1", "tree-2"])
def batch(request) -> Batch:
    return causal_batch() if request.param == "causal" else trees_batch(int(request.param[-1]))


def visible(batch: Batch, row: int) -> list[tuple[int, int]]:
    """(physical slot, position) of every key the row sees."""
    sequence = int((batch.row_start[1:] <= row).sum())
    start, committed = int(batch.row_start[sequence]), int(batch.committed[sequence])
    table = batch.block_table[sequence].tolist()
    keys = [(slot, slot) for slot in range(committed)]
    for other in range(start, start + batch.row_counts[sequence]):
        slot = int(batch.slots[other])
        seen = other <= row if batch.ancestors is None else int(batch.ancestors[row]) >> (slot - committed) & 1
        if seen:
            keys.append((slot, int(batch.positions[other])))
    return [(table[slot // BLOCK] * BLOCK + slot % BLOCK, position) for slot, position in keys]


def softmax_attention(q_QD: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """keys and values [S, K, D] of what is attended to."""
    group = q_QD.shape[0] // keys.shape[1]
    out = []
    for head, q in enumerate(q_QD.double()):
        k, v = keys[:, head // group].double(), values[:, head // group].double()
        out.append((torch.softmax(scale * (k @ q), 0)[:, None] * v).sum(0))
    return torch.stack(out)


def pools(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return torch.randn(2, PAGES, BLOCK, KV_HEADS, DIM).to(dtype).unbind(0)


@pytest.mark.parametrize("first_slot", [0, 1])
def test_paged_attention(batch: Batch, first_slot: int):
    q, (k_pool, v_pool) = torch.randn(batch.num_rows, HEADS, DIM), pools()
    out = ops.paged_attention(q, k_pool, v_pool, batch, 0.3, first_slot)
    tables = page_tables()
    for row in range(batch.num_rows):
        sequence = int((batch.row_start[1:] <= row).sum())
        excluded = {tables[sequence][0] * BLOCK} if first_slot else set()
        slots = [slot for slot, _ in visible(batch, row) if slot not in excluded]
        if slots:
            expected = softmax_attention(q[row], k_pool.flatten(0, 1)[slots], v_pool.flatten(0, 1)[slots], 0.3)
            assert (out[row] - expected).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("top_k", "init_blocks", "local_blocks"), [(3, 0, 1), (4, 1, 2), (1, 0, 1), (20, 0, 1), (2, 0, 0)]
)
def test_select_blocks(batch: Batch, top_k: int, init_blocks: int, local_blocks: int):
    """Whole-number keys and queries, so that many blocks tie: the lower one must win."""
    index_q = torch.randint(-1, 2, (batch.num_rows, KV_HEADS, DIM)).float()
    index_k = torch.randint(-1, 2, (PAGES, BLOCK, DIM)).float()
    chosen = ops.select_blocks(index_q, index_k, batch, top_k, init_blocks, local_blocks)
    assert chosen.shape == (batch.num_rows, KV_HEADS, top_k) and chosen.dtype == torch.int32
    ties = 0
    for row in range(batch.num_rows):
        own = int(batch.positions[row]) // BLOCK
        for head in range(KV_HEADS):
            scores: dict[int, float] = {}
            for slot, position in visible(batch, row):
                score = float(index_q[row, head] @ index_k.flatten(0, 1)[slot])
                scores[position // BLOCK] = max(scores.get(position // BLOCK, -1e9), score)
            ties += len(set(scores.values())) < len(scores)
            for block in scores:
                if own - local_blocks < block <= own:
                    scores[block] = 1e29
                if block < init_blocks:
                    scores[block] = 1e30
            best = sorted(sorted(scores, key=lambda block: (-scores[block], block))[:top_k])
            assert chosen[row, head].tolist() == best + [-1] * (top_k - len(best))
    assert ties > 10


@pytest.mark.parametrize(("first_slot", "scratch_chosen"), [(0, True), (1, False)])
def test_sparse_attention(batch: Batch, first_slot: int, scratch_chosen: bool):
    """Any choice that includes the row's own block, the two kv heads choosing differently; as the target and as a draft
    attend.
    """
    q, (k_pool, v_pool) = torch.randn(batch.num_rows, HEADS, DIM), pools()
    rng = random.Random(5)
    choices = []
    for row in range(batch.num_rows):
        own = int(batch.positions[row]) // BLOCK
        heads = [sorted({own, *rng.sample(range(own + 1), min(2, own + 1))}) for _ in range(KV_HEADS)]
        choices.append([blocks + [-1] * (4 - len(blocks)) for blocks in heads])
    blocks_TKN = torch.tensor(choices, dtype=torch.int32)
    out = ops.sparse_attention(q, k_pool, v_pool, blocks_TKN, batch, 0.3, first_slot, scratch_chosen)
    sequence_of = [r for r, count in enumerate(batch.row_counts) for _ in range(count)]
    group = HEADS // KV_HEADS
    for row, heads in enumerate(choices):
        for head, blocks in enumerate(heads):
            # Scratch of a prefill chunk is a row like any other; that of a tree may be free of the choice.
            free = batch.committed[sequence_of[row]] if batch.ancestors is not None and not scratch_chosen else 10**6
            slots = [s for s, p in visible(batch, row) if p >= first_slot and (p // BLOCK in blocks or p >= free)]
            mine = slice(head * group, (head + 1) * group)
            keys, values = (pool.flatten(0, 1)[slots][:, head : head + 1] for pool in (k_pool, v_pool))
            assert (out[row, mine] - softmax_attention(q[row, mine], keys, values, 0.3)).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_writes_touch_their_slots_only_and_round(batch: Batch, dtype: torch.dtype):
    (k_pool, v_pool), index_pool = pools(dtype), torch.randn(PAGES, BLOCK, DIM).to(dtype)
    before = [pool.float().flatten(0, 1).clone() for pool in (k_pool, v_pool, index_pool)]
    heads = torch.randn(batch.num_rows, 5, DIM)
    ops.write_kv(heads[:, :2], heads[:, 2:4], k_pool, v_pool, batch)
    ops.write_index_k(heads[:, 4], index_pool, batch)
    for pool, old, new in zip(
        (k_pool, v_pool, index_pool), before, (heads[:, :2], heads[:, 2:4], heads[:, 4]), strict=True
    ):
        old[batch.physical_slots] = new.to(dtype).float()
        assert torch.equal(pool.float().flatten(0, 1), old)


def test_route():
    """The bias only selects; weights are the chosen scores over their sum, times the scale."""
    x, gate, bias = torch.randn(50, 16), torch.randn(8, 16) / 4, torch.randn(8)
    weights, experts = ops.route(x, gate, bias, 3, 2.0)
    assert weights.dtype == torch.float32 and experts.dtype == torch.int64
    changed = 0
    for row in range(50):
        scores = torch.sigmoid(gate.double() @ x[row].double())
        best = sorted(range(8), key=lambda e: -(scores[e] + bias[e]))[:3]
        changed += set(best) != set(scores.topk(3).indices.tolist())
        assert set(experts[row].tolist()) == set(best)
        for weight, expert in zip(weights[row], experts[row], strict=True):
            assert abs(weight - 2.0 * scores[expert] / scores[best].sum()) < 1e-5
    assert changed > 10


@pytest.mark.parametrize("rows", [1, 5, 40])
def test_grouped_experts(rows: int):
    """Gate clamped from above only, up on both sides, beta added to up; unused experts are skipped."""
    x, w13, w2 = torch.randn(rows, 16), torch.randn(6, 24, 16), torch.randn(6, 16, 12)
    experts = torch.stack([torch.randperm(4)[:2] + 1 for _ in range(rows)])
    weights = torch.rand(rows, 2)
    out = ops.grouped_experts(x, w13, w2, weights, experts, 1.7, 3.0, 1.25)
    clamped = 0
    for row in range(rows):
        expected = torch.zeros(16, dtype=torch.float64)
        for weight, expert in zip(weights[row], experts[row], strict=True):
            gate, up = (w13[expert].double() @ x[row].double()).chunk(2)
            clamped += int((gate > 3).any()) + int((gate < -3).any()) + int((up.abs() > 3).any())
            gate, up = gate.clamp(max=3.0), up.clamp(-3.0, 3.0)
            expected += weight * (w2[expert].double() @ (gate * torch.sigmoid(1.7 * gate) * (up + 1.25)))
        assert (out[row] - expected).abs().max() < 1e-3
    assert clamped > 0
