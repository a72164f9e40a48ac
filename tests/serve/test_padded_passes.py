"""Padded passes find and leave the same as those of exactly the rows that there are. Here they run operation by
operation; on a GPU they are captured (test_gpu.py).
"""

import random

import pytest
import torch

from draft_model.chosen_blocks import ChosenBlocks, run_target
from serve import padded_passes
from serve.drafter import Drafter
from serve.engine import Engine
from serve.padded_passes import ROWS, Chunk, PaddedRows, Passes, PassSize, TargetPasses
from serve.request import SamplingParams
from serve.tree import TreeConfig
from target_model.batch import Batch
from tests.fixtures import random_target
from tests.serve.drafts import plain, prompts, random_draft

PAGE, PAGES = 8, 200
# Tokens that are there already, and how many come: alone and together, within a page, at its edges and far behind.
CASES = [
    [(0, 1)], [(0, 16)], [(3, 17)], [(8, 100)], [(300, 40)], [(0, 512)], [(1000, 24)],
    [(0, 5), (16, 30)], [(0, 9), (64, 1), (7, 16), (120, 3), (0, 2)],
]  # fmt: skip

# The draft has no row in slot 0.
FOLLOWED = [case for case in CASES if all(start for start, _ in case)] + [[(1, 15), (8, 9)]]


@pytest.fixture(scope="module")
def target():
    return random_target(seed=0, max_position=1024)


def tables(case):
    """Pages of each sequence, one more than it needs by now, none of them twice and in no order."""
    free = list(range(PAGES))
    random.Random(1).shuffle(free)
    return [[free.pop() for _ in range((start + count) // PAGE + 2)] for start, count in case]


def tokens(case):
    chance = random.Random(2)
    return [[chance.randrange(300) for _ in range(start + count)] for start, count in case]


def begun(target, draft, case):
    """A drafter whose cache holds the tokens that are there already, and the chunks that come."""
    cache = target.make_cache(PAGES + 1, draft=draft.kv_shape)
    drafter = Drafter(draft, cache, ChosenBlocks.parse("sparse", target.config, draft.config))
    before = [(ids[:start], pages) for (start, _), ids, pages in zip(case, tokens(case), tables(case), strict=True)]
    before = [(ids, pages) for ids, pages in before if ids]
    if before:
        batch = Batch.causal(PAGE, "cpu", [ids for ids, _ in before], [0] * len(before), [pages for _, pages in before])
        target(batch, cache)
        draft(batch, torch.zeros(batch.num_rows, draft.config.hidden_size), cache.draft())
    return drafter, [
        Chunk(ids[start:], start, pages)
        for (start, _), ids, pages in zip(case, tokens(case), tables(case), strict=True)
    ]


def causal(chunks):
    ids, starts, pages = zip(*((chunk.tokens, chunk.start, chunk.pages) for chunk in chunks), strict=True)
    return Batch.causal(PAGE, "cpu", ids, starts, pages)


def own_slots(pool, chunks):
    """What a pool [layers, pages, slots, ..] holds of these sequences, up to their last token."""
    return [pool[:, chunk.pages].flatten(1, 2)[:, : chunk.start + len(chunk.tokens)] for chunk in chunks]


def check_pools(ours, theirs, chunks):
    """The same rows; and of pages that no sequence has, only the last is written."""
    others = [page for page in range(PAGES) if page not in {page for chunk in chunks for page in chunk.pages}]
    for name in ("k", "v", "index_k", "draft_k", "draft_v"):
        pools = [getattr(cache, name) for cache in (ours, theirs)]
        pools = [pool[None] if pool.shape[0] == PAGES + 1 else pool for pool in pools]
        torch.testing.assert_close(own_slots(pools[0], chunks), own_slots(pools[1], chunks), atol=1e-5, rtol=1e-5)
        assert not pools[0][:, others].any()


@pytest.mark.parametrize("case", CASES, ids=str)
@torch.inference_mode()
def test_the_target_reads_prompts(target, case):
    draft, taps = random_draft(target), (1, 3, 5)
    (ours, chunks), (theirs, _) = begun(target, draft, case), begun(target, draft, case)
    passes = TargetPasses(target, ours.cache, taps, ours.chosen, None)
    for _ in range(2):  # again over what a pass has left
        output, choice = passes.run(chunks)
    expected, chosen = run_target(target, causal(chunks), theirs.cache, taps, theirs.chosen)
    torch.testing.assert_close(output.final_state, expected.final_state, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(output.aux, expected.aux, atol=1e-4, rtol=1e-4)
    assert torch.equal(choice, chosen)
    check_pools(ours.cache, theirs.cache, chunks)


@pytest.mark.parametrize("chosen", [False, True], ids=["full", "sparse"])
@pytest.mark.parametrize("case", FOLLOWED, ids=str)
@torch.inference_mode()
def test_the_draft_follows_prompts(target, case, chosen):
    draft = random_draft(target)
    (ours, chunks), (theirs, _) = begun(target, draft, case), begun(target, draft, case)
    counts = [len(chunk.tokens) for chunk in chunks]
    torch.manual_seed(3)
    taps = torch.randn(sum(counts), ours.page_taps.shape[1]).split(counts)
    choices = []
    if chosen:
        # Of the position before each row: a few blocks, none behind it.
        for chunk in chunks:
            block_N = torch.arange(ours.chosen.top_k, dtype=torch.int32)
            last_T = (torch.arange(len(chunk.tokens)) + chunk.start - 1) // PAGE
            lists_TN = torch.where(block_N <= last_T[:, None], block_N, -1).to(torch.int32)
            choices.append(lists_TN[:, None].expand(-1, ours.chosen.index_heads, -1))
    else:
        ours.chosen = theirs.chosen = None
    ours.stay_on_device(None)
    ours.passes._aux_TA.fill_(9)  # what a longer chunk has left
    for _ in range(2):
        state, blocks = ours.passes.run(chunks, taps, choices)
    expected, lists = theirs._follow_unpadded(chunks, torch.cat(taps), choices)
    torch.testing.assert_close(state, expected, atol=1e-4, rtol=1e-4)
    assert blocks is None and lists is None if not chosen else torch.equal(blocks, lists)
    torch.testing.assert_close(ours.page_taps[:PAGES], theirs.page_taps[:PAGES])
    check_pools(ours.cache, theirs.cache, chunks)


@torch.inference_mode()
def test_what_a_pass_found_is_kept(target):
    """The next one of the same size does not change it."""
    drafter, _ = begun(target, random_draft(target), [(0, 1)])
    drafter.stay_on_device(None)
    passes = TargetPasses(target, drafter.cache, (1, 3, 5), drafter.chosen, None)
    found = []
    for token in (5, 6):
        chunks = [Chunk([token] * 20, 1, list(range(3)))]
        output, choice = passes.run(chunks)
        found.append((output.final_state, output.aux, choice, *drafter.passes.run(chunks, [output.aux], [choice])))
        if token == 5:
            before = [each.clone() for each in found[0]]
    assert all(torch.equal(each, was) for each, was in zip(found[0], before, strict=True))
    assert not any(torch.equal(each, other) for each, other in zip(found[0][:2], found[1][:2], strict=True))


def test_a_size_is_captured_when_it_is_met_again(target):
    did = []

    class Pool:
        def record(self, run, record):
            did.append(f"captured by {record}")
            return run

    passes = Passes(
        target.make_cache(PAGES + 1), lambda rows: did.append(rows.size.rows), Pool(), "make_graph", lambda run: run()
    )
    for count in (3, 20, 4, 5, 40, 20):
        passes.run(passes.loaded([Chunk([0] * count, 0, [0] * 6)]))
    captured = "captured by make_graph"
    assert did == [16, 32, captured, 16, 16, 64, captured, 32]


def test_only_so_many_graphs_are_kept(target, monkeypatch):
    """That which has not been used for longest goes, and is captured again when it is met twice."""
    monkeypatch.setattr(padded_passes, "MOST_GRAPHS", 2)
    captured = []

    class Pool:
        def record(self, run, record):
            captured.append(run.args[0].size.rows)
            return run

    passes = Passes(target.make_cache(PAGES + 1), lambda rows: None, Pool(), None, lambda run: run())
    for count in (16, 16, 32, 32, 16, 64, 64, 16, 32, 16):
        passes.run(passes.loaded([Chunk([0] * count, 0, [0] * 6)]))
    assert captured == [16, 32, 64]
    passes.run(passes.loaded([Chunk([0] * 32, 0, [0] * 6)]))
    assert captured == [16, 32, 64, 32]


def test_sizes():
    def size(*counts, start=0, pages=1):
        return PassSize.of([Chunk([0] * count, start, [0] * pages) for count in counts], PAGE)

    assert size(1) == PassSize(1, 16, 8)
    assert size(16) == PassSize(1, 16, 8) and size(17) == PassSize(1, 32, 8)
    assert size(512) == PassSize(1, 512, 64) and size(513) is None
    assert size(1, start=49).pages == 16 and size(1, start=48).pages == 8  # padded rows have a place, too
    assert size(3, pages=9).pages == 16
    assert size(*[1] * 5) == PassSize(8, 16, 8) and size(*[1] * 33) is None
    assert size(64, 65, 3, 1) == PassSize(4, 96, 16) and size(129, 1, 1, 1) is None
    assert list(ROWS) == sorted(ROWS) and all(rows % 16 == 0 for rows in ROWS)


def test_a_pass_finds_nothing_of_the_one_before(target):
    """A shorter chunk leaves no token and no page of the longer one."""
    rows = PaddedRows(PassSize(2, 16, 8), target.make_cache(PAGES + 1))
    rows.load([Chunk(range(1, 15), 30, range(6)), Chunk(range(1, 9), 5, range(6, 8))])
    rows.load([Chunk([7], 2, [9])])
    batch = rows.batch()
    assert batch.token_ids.tolist() == [7] + 31 * [0]
    assert batch.block_table.tolist() == [[9] + 7 * [PAGES], 8 * [PAGES]]
    assert batch.committed.tolist() == [2, 0] and rows.count_R1.tolist() == [[1], [0]]
    assert batch.positions.tolist() == [*range(2, 18), *range(16)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_same_answers(target, temperature):
    """Prompts around all sizes, alone and together, chunked, and again behind cached pages."""
    params = SamplingParams(temperature=temperature, seed=4, max_tokens=12, ignore_eos=True)
    asked = prompts([1, 2, 15, 16, 17, 33, 64, 65, 97, 130, 193, 260, 390, 511, 512, 513, 600])
    answers = plain(target, params, asked)
    engine = Engine(target, random_draft(target), TreeConfig(3, 2, 6), prefill_tokens=700, device_step=True)
    for prompt in asked:
        (answer,) = engine.generate([prompt], params)
        assert answer.token_ids == answers[tuple(prompt)]
    assert [answer.token_ids for answer in engine.generate(asked, params)] == [answers[tuple(each)] for each in asked]
    assert engine.stats()["cached_prompt_tokens"] > 0
