"""Passes over a few hundred rows of prompts, padded to few sizes: on CUDA each is a graph, captured when its size is
met again, since so few rows are computed before the host has launched their kernels. On a CPU the same operations run
one by one.

A padded row lies behind its sequence's own rows: in a slot that is written anew before another row reads it, or in the
last page of the cache, which belongs to nobody, and where padded sequences lie as well. What it computes is finite, so
that attention may multiply it by 0.

R sequences, L rows of each, W pages of the longest one, T rows in all, A = taps * target hidden, H hidden of target or
draft, J index heads, N chosen blocks, K heads of the draft.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from draft_model.chosen_blocks import ChosenBlocks, run_target
from draft_model.model import Eagle3Draft
from serve.graph_pool import GraphPool
from target_model.batch import Batch
from target_model.cache import PagedCache
from target_model.model import TargetModel, TargetOutput, record_graph

# Rows that a sequence is padded to; more than the last of them, in all, are computed the general way.
ROWS = (16, 32, 64, 96, 128, 192, 256, 384, 512)
# Of either model. One takes memory for each of its kernels; those that have not been used for longest are dropped.
MOST_GRAPHS = 64

Graph = torch.cuda.CUDAGraph


@dataclass(frozen=True)
class Chunk:
    """Consecutive tokens of a sequence, the slot of the first one, and the sequence's pages."""

    tokens: Sequence[int]
    start: int
    pages: Sequence[int]


@dataclass(frozen=True)
class PassSize:
    """What a graph is made for."""

    sequences: int
    rows: int
    pages: int

    @staticmethod
    def of(chunks: Sequence[Chunk], page_size: int) -> "PassSize | None":
        """The smallest size that these fit in; None where there is none."""
        longest, sequences = max(len(chunk.tokens) for chunk in chunks), padded_sequences(len(chunks))
        rows = next((rows for rows in ROWS if longest <= rows), None)
        if rows is None or sequences * rows > ROWS[-1]:
            return None
        reach = max(chunk.start for chunk in chunks) + rows
        pages = max(-(-reach // page_size), *(len(chunk.pages) for chunk in chunks))
        return PassSize(sequences, rows, padded_pages(pages))


def padded_sequences(count: int) -> int:
    """Graphs are made for so many sequences."""
    step = 1 if count <= 4 else 4 if count <= 32 else 16
    return -(-count // step) * step


def padded_pages(count: int) -> int:
    """Graphs are made for so many pages of the longest sequence."""
    return 1 << max(count - 1, 7).bit_length()


def causal(chunks: Sequence[Chunk], page_size: int, device: torch.device) -> Batch:
    """Exactly their rows, unpadded."""
    tokens, starts, tables = zip(*((chunk.tokens, chunk.start, chunk.pages) for chunk in chunks), strict=True)
    return Batch.causal(page_size, device, tokens, starts, tables)


class PaddedRows:
    """The rows of one size of pass, in memory whose place never changes."""

    def __init__(self, size: PassSize, cache: PagedCache):
        self.size, self._page_size, self._spare = size, cache.page_size, cache.num_pages - 1
        widths = 1, 1, size.rows, size.pages
        self._integers = torch.zeros(size.sequences, sum(widths), dtype=torch.int64, device=cache.k.device)
        self.start_R1, self.count_R1, self.token_RL, self._table_RW = self._integers.split(widths, 1)

    def load(self, chunks: Sequence[Chunk]) -> None:
        """Sends the chunks."""
        missing = [Chunk((), 0, ())] * (self.size.sequences - len(chunks))
        sent = torch.tensor([self._line(chunk) for chunk in (*chunks, *missing)])
        self._integers.copy_(sent.pin_memory() if self._integers.is_cuda else sent, non_blocking=True)

    def _line(self, chunk: Chunk) -> list[int]:
        tokens = [*chunk.tokens, *[0] * (self.size.rows - len(chunk.tokens))]
        pages = [*chunk.pages, *[self._spare] * (self.size.pages - len(chunk.pages))]
        return [chunk.start, len(chunk.tokens), *tokens, *pages]

    def batch(self) -> Batch:
        """What has been sent."""
        slot_RL = self.start_R1 + torch.arange(self.size.rows, device=self.start_R1.device)
        table_RW, most = self._table_RW.to(torch.int32), self.size.pages * self._page_size
        return Batch.grid(self._page_size, self.token_RL, slot_RL, slot_RL, self.start_R1[:, 0], table_RW, None, most)

    def places(self, chunks: Sequence[Chunk]) -> list[slice]:
        """Where the rows of each chunk lie among all."""
        firsts = range(0, self.size.sequences * self.size.rows, self.size.rows)
        return [slice(first, first + len(chunk.tokens)) for first, chunk in zip(firsts, chunks, strict=False)]


class Passes:
    """Passes of one kind. `compute` reads rows and leaves what it finds in buffers of its own."""

    def __init__(
        self,
        cache: PagedCache,
        compute: Callable[[PaddedRows], None],
        pool: GraphPool | None,
        make_graph: Callable[..., Graph] = record_graph,
        replay: Callable[[Graph], None] = Graph.replay,
    ):
        self._cache, self._compute, self._pool = cache, compute, pool
        self._make_graph, self._replay = make_graph, replay
        self.rows: dict[PassSize, PaddedRows] = {}  # of all sizes that have been met
        self._computed: set[PassSize] = set()
        self._graphs: dict[PassSize, Graph] = {}

    def loaded(self, chunks: Sequence[Chunk]) -> PaddedRows | None:
        """The chunks, sent; None where they are too many."""
        size = PassSize.of(chunks, self._cache.page_size)
        if size is None:
            return None
        if size not in self.rows:
            self.rows[size] = PaddedRows(size, self._cache)
        self.rows[size].load(chunks)
        return self.rows[size]

    def run(self, rows: PaddedRows) -> None:
        """Over what has been loaded; the second time as a graph, which many a size is never worth."""
        size = rows.size
        if self._pool is None or size not in self._computed:
            self._compute(rows)
            self._computed.add(size)
            return
        graph = self._graphs.pop(size, None) or self._pool.record(partial(self._compute, rows), self._make_graph)
        self._graphs[size] = graph  # behind those that were used before it
        if len(self._graphs) > MOST_GRAPHS:
            dropped = next(iter(self._graphs))
            del self._graphs[dropped]
            self._computed.discard(dropped)
        self._replay(graph)


class TargetPasses:
    """The target's passes over chunks of prompts. Without `pool` nothing is captured."""

    def __init__(
        self,
        target: TargetModel,
        cache: PagedCache,
        taps: tuple[int, ...],
        chosen: ChosenBlocks | None,
        pool: GraphPool | None,
    ):
        self.target, self.cache, self.taps, self.chosen = target, cache, taps, chosen
        self._left: tuple[Tensor | None, ...] = ()  # states, taps and choices of the last pass
        self.passes = Passes(cache, self._compute, pool, target.make_graph, target.replay)

    def run(self, chunks: Sequence[Chunk]) -> tuple[TargetOutput, Tensor | None] | None:
        """What `run_target` gives for the rows of these chunks; None where they are too many."""
        rows = self.passes.loaded(chunks)
        if rows is None:
            return None
        self.passes.run(rows)
        places = rows.places(chunks)
        # The next pass overwrites them.
        state_TH, aux_TA, choice_TJN = (
            None if each is None else torch.cat([each[place] for place in places]) for each in self._left
        )
        return TargetOutput(state_TH, aux_TA), choice_TJN

    def _compute(self, rows: PaddedRows) -> None:
        output, choice_TJN = run_target(self.target, rows.batch(), self.cache, self.taps, self.chosen)
        found = output.final_state, output.aux, choice_TJN
        if not self._left:
            self._left = tuple(None if each is None else each.new_zeros(ROWS[-1], *each.shape[1:]) for each in found)
        for place, each in zip(self._left, found, strict=True):
            if each is not None:
                place[: each.shape[0]] = each


class DraftPasses:
    """The draft's passes over decided tokens, by `Drafter.follow_grid`. Without `pool` nothing is captured."""

    def __init__(
        self,
        draft: Eagle3Draft,
        cache: PagedCache,
        chosen: ChosenBlocks | None,
        follow: Callable[[Batch, Tensor, Tensor | None, Tensor], tuple[Tensor, Tensor | None]],
        pool: GraphPool | None,
    ):
        config, device = draft.config, cache.k.device
        self._follow = follow

        def zeros(*shape: int, dtype: torch.dtype = draft.dtype) -> Tensor:
            return torch.zeros(ROWS[-1], *shape, dtype=dtype, device=device)

        self._aux_TA = zeros(config.num_aux * config.target_hidden_size)
        self._choice_TJN = None if chosen is None else chosen.nothing(device).repeat(ROWS[-1], 1, 1)
        # Of the last row of each sequence.
        self._state_RH = zeros(config.hidden_size)
        self._blocks_RKN = None if chosen is None else zeros(chosen.kv_heads, chosen.top_k + 1, dtype=torch.int32)
        self.passes = Passes(cache, self._compute, pool)

    def run(
        self, chunks: Sequence[Chunk], taps: Sequence[Tensor], choices: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor | None] | None:
        """The draft's state of each chunk's last row, [R, H], and what it attends to, [R, K, N + 1] (None: all); None
        where the rows are too many. Taps and choices of the rows of each chunk.
        """
        rows = self.passes.loaded(chunks)
        if rows is None:
            return None
        for place, aux_TA in zip(rows.places(chunks), taps, strict=True):
            self._aux_TA[place] = aux_TA
        for place, choice_TJN in zip(rows.places(chunks), choices, strict=False):
            self._choice_TJN[place] = choice_TJN
        self.passes.run(rows)
        count = len(chunks)
        blocks_RKN = None if self._blocks_RKN is None else self._blocks_RKN[:count].clone()
        return self._state_RH[:count].clone(), blocks_RKN

    def _compute(self, rows: PaddedRows) -> None:
        batch, count = rows.batch(), rows.size.sequences
        aux_TA = self._aux_TA[: batch.num_rows]
        choice_TJN = None if self._choice_TJN is None else self._choice_TJN[: batch.num_rows]
        state_RH, blocks_RKN = self._follow(batch, aux_TA, choice_TJN, (rows.count_R1 - 1).clamp(min=0))
        self._state_RH[:count] = state_RH
        if blocks_RKN is not None:
            self._blocks_RKN[:count] = blocks_RKN
