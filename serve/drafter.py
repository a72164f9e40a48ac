"""The draft at work: it follows the decided tokens with the target's real features and grows trees of guesses from
them.

R sequences, W nodes of a depth that are expanded, C children considered per node, V the draft's vocabulary, M
candidates in a pool.
"""

import functools
import itertools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from draft_model.chosen_blocks import ChosenBlocks
from draft_model.model import Eagle3Draft
from serve.graph_pool import GraphPool
from serve.guesses import Guesses, RequestGuesses
from serve.padded_passes import Chunk, DraftPasses, causal
from serve.request import Sequence
from serve.tree import Tree, TreeConfig
from target_model.batch import Batch
from target_model.cache import PagedCache


@dataclass(frozen=True)
class Pool:
    """Candidates of a growing tree, depth by depth: their target tokens int64 [R, M], the log of the chance that the
    target chooses the path down to each fp32 [R, M] (-inf: not allowed), and their parents' places int64 [R, M], -1
    under the root.
    """

    token_RM: Tensor
    score_RM: Tensor
    parent_RM: Tensor


@dataclass(frozen=True)
class Roots:
    """Where trees grow from: the draft's state of each root [R, H], decided tokens int64 [R], levels that may be grown
    int64 [R, 1], block table int32 [R, W], the blocks that the roots attend to int32 [R, K, N + 1] (None: all), and a
    bound for the slots in use, guesses included.
    """

    state_RH: Tensor
    length_R: Tensor
    limit_R1: Tensor
    table_RW: Tensor
    blocks_RKN: Tensor | None
    max_context: int


class Drafter:
    """Proposes a tree for each sequence. The draft's row of the token at position t lies in slot t, guessed rows behind
    the decided ones.
    """

    def __init__(self, draft: Eagle3Draft, cache: PagedCache, chosen: ChosenBlocks | None = None):
        """With `chosen` the draft attends sparsely."""
        self.draft, self.cache, self.chosen = draft, cache, chosen
        config, device = draft.config, cache.k.device
        self.target_ids = draft.target_ids(torch.arange(config.draft_vocab_size, device=device))
        # Taps of each page's last position: whoever continues behind a cached page needs them for its first row. The
        # entry behind those of the pages takes what is not to be kept.
        taps = cache.num_pages + 1, config.num_aux * config.target_hidden_size
        self.page_taps = torch.zeros(taps, dtype=draft.dtype, device=device)
        self.passes: DraftPasses | None = None  # for few rows, where steps stay on the device

    def stay_on_device(self, pool: GraphPool | None) -> None:
        """Few rows are padded and followed as CUDA graphs (without `pool`: operation by operation)."""
        self.passes = DraftPasses(self.draft, self.cache, self.chosen, self.follow_grid, pool)

    def resume(self, sequence: Sequence) -> None:
        """Picks up behind the cached pages that the sequence starts with."""
        last_page = sequence.pages[sequence.computed // self.cache.page_size - 1]
        sequence.taps = [self.page_taps[last_page][None]]
        if self.chosen is not None:
            # Its keys do not depend on what the row attends to, and as it is never a root nobody reads its state.
            sequence.choices = [self.chosen.nothing(self.page_taps.device)]

    def hear(self, sequence: Sequence, aux_TA: Tensor, choice_TJN: Tensor | None) -> None:
        """Takes what the target left of newly decided positions."""
        sequence.taps.append(aux_TA)
        if choice_TJN is not None:
            sequence.choices.append(choice_TJN)

    @torch.inference_mode()
    def follow(self, sequences: list[Sequence]) -> None:
        """Computes the rows of decided tokens from the taps that the target has left, one row for each that is known.

        Whatever the draft had guessed in these slots is overwritten. The last row of each sequence is where its next
        tree grows from.
        """
        behind = [s for s in sequences if s.draft_end < min(s.computed + 1, len(s.token_ids))]
        if not behind:
            return
        chunks, taps, choices = [], [], []
        for sequence in behind:
            tokens = sequence.token_ids[sequence.draft_end : sequence.computed + 1]
            chunks.append(Chunk(tokens, sequence.draft_end, sequence.pages))
            now, sequence.taps = _take(sequence.taps, len(tokens))
            taps.append(now)
            if self.chosen is not None:
                now, sequence.choices = _take(sequence.choices, len(tokens))
                choices.append(now)
        followed = self.passes and self.passes.run(chunks, taps, choices)
        state_RH, blocks_RKN = followed or self._follow_unpadded(chunks, torch.cat(taps), choices)
        for row, (sequence, chunk) in enumerate(zip(behind, chunks, strict=True)):
            sequence.draft_end += len(chunk.tokens)
            sequence.root_state = state_RH[row]
            sequence.root_blocks = None if blocks_RKN is None else blocks_RKN[row]

    def _follow_unpadded(
        self, chunks: list[Chunk], aux_TA: Tensor, choices: list[Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        """The state of each chunk's last row, [R, H], and what it attends to, [R, K, N + 1] (None: all)."""
        size, device, edges, row = self.cache.page_size, self.page_taps.device, [], 0
        for chunk in chunks:
            start, count = chunk.start, len(chunk.tokens)
            edges += [
                (chunk.pages[slot // size - 1], row + slot - start)
                for slot in range(-(-start // size) * size, start + count, size)
            ]
            row += count
        if edges:
            pages, kept = zip(*edges, strict=True)
            self.page_taps[list(pages)] = aux_TA[list(kept)].to(self.page_taps.dtype)
        batch = causal(chunks, size, device)
        blocks_TKN = None if self.chosen is None else self.chosen.lists(torch.cat(choices), batch.positions)
        state_TH = self.draft(batch, self.draft.project(aux_TA), self.cache.draft(), blocks_TKN)
        last = [end - 1 for end in itertools.accumulate(batch.row_counts)]
        return state_TH[last], None if blocks_TKN is None else blocks_TKN[last]

    def follow_grid(
        self, batch: Batch, aux_TA: Tensor, choice_TJN: Tensor | None, last_R1: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """The same of a grid, where nothing waits for the device; sequence r's own rows end with row last_R1[r]."""
        size, sequences = self.cache.page_size, last_R1.shape[0]
        blocks_TKN = None if self.chosen is None else self.chosen.lists(choice_TJN, batch.positions)
        state_TH = self.draft(batch, self.draft.project(aux_TA), self.cache.draft(), blocks_TKN)
        # The taps of a page's last position are the features of the row behind it.
        slot_RL, table_RW = batch.slots.view(sequences, -1), batch.block_table
        rows = slot_RL.shape[1]
        kept_RL = (slot_RL % size == 0) & (torch.arange(rows, device=last_R1.device) <= last_R1)
        page_RL = table_RW.gather(1, (slot_RL // size - 1).clamp(min=0)).long()
        page_RL = torch.where(kept_RL, page_RL, self.cache.num_pages)
        self.page_taps[page_RL.flatten()] = aux_TA.to(self.page_taps.dtype)
        last_R = torch.arange(sequences, device=last_R1.device) * rows + last_R1[:, 0]
        return state_TH[last_R], None if blocks_TKN is None else blocks_TKN[last_R]

    def propose(
        self, sequences: list[Sequence], limits: list[int], noise_RDV: Tensor | None, shape: TreeConfig
    ) -> list[Tree]:
        """Trees of at most `limits[r]` levels below each root. noise[r, d] is that of the token behind a node of depth
        d.
        """
        token_RK, parent_RK, live_RK = self.nodes(self.grow(sequences, limits, noise_RDV, shape), shape)
        below = torch.stack([token_RK, parent_RK, live_RK.long()], 1).tolist()
        return [Tree.of(s.token_ids[-1], *nodes)[0] for s, nodes in zip(sequences, below, strict=True)]

    def grow(self, sequences: list[Sequence], limits: list[int], noise_RDV: Tensor | None, shape: TreeConfig) -> Pool:
        """All candidates that `propose` chooses a tree from."""
        self.follow(sequences)
        guesses = RequestGuesses(self.draft, self.target_ids, sequences, noise_RDV)
        return self.grow_from(self._roots(sequences, limits, shape), guesses, shape, min(shape.depth, max(limits)))

    def _roots(self, sequences: list[Sequence], limits: list[int], shape: TreeConfig) -> Roots:
        device, width = self.page_taps.device, max(len(sequence.pages) for sequence in sequences)
        table = [sequence.pages + [0] * (width - len(sequence.pages)) for sequence in sequences]
        lengths = [len(sequence.token_ids) for sequence in sequences]
        sparse = self.chosen is not None
        return Roots(
            torch.stack([sequence.root_state for sequence in sequences]),
            torch.tensor(lengths, device=device),
            torch.tensor(limits, device=device)[:, None],
            torch.tensor(table, dtype=torch.int32, device=device),
            torch.stack([sequence.root_blocks for sequence in sequences]) if sparse else None,
            max(lengths) + max(shape.draft_rows, 1),
        )

    def frontier(self, level: int, candidates: Pool, shape: TreeConfig) -> Tensor:
        """Which candidates of this depth are expanded, int64 [R, W]: the best, or those that a static tree names."""
        count, size = candidates.score_RM.shape
        if shape.paths:
            return _constant(shape.layout[level - 1][1], candidates.score_RM.device).expand(count, -1)
        if size <= shape.width:
            return _constant(tuple(range(size)), candidates.score_RM.device).expand(count, -1)
        return candidates.score_RM.topk(shape.width, dim=1).indices

    def grow_from(self, roots: Roots, guesses: Guesses, shape: TreeConfig, depth: int) -> Pool:
        """All candidates of trees of `depth` levels. The rows of the roots must have been computed."""
        count, device = roots.state_RH.shape[0], roots.state_RH.device
        guessed = self._guessed_rows(roots, shape, depth) if depth > 1 else None
        state_RWH = roots.state_RH[:, None]
        score_RW = torch.zeros(count, 1, device=device)
        parent_RW = torch.full((count, 1), -1, device=device)  # index in the pool
        mask_RW = torch.zeros(count, 1, dtype=torch.int64, device=device)  # visible guessed rows
        levels, pooled = [], 0
        for level in range(1, depth + 1):
            token_RWC, chance_RWC = guesses.children(level, state_RWH, shape.width)
            score_RM = (score_RW[:, :, None] + chance_RWC).flatten(1).masked_fill(level > roots.limit_R1, float("-inf"))
            parent_RM = parent_RW[:, :, None].expand_as(token_RWC).flatten(1)
            candidates = Pool(token_RWC.flatten(1), score_RM, parent_RM)
            levels.append(candidates)
            if level < depth:
                best_RW = self.frontier(level, candidates, shape)
                score_RW, token_RW = score_RM.gather(1, best_RW), candidates.token_RM.gather(1, best_RW)
                origin_RW, parent_RW = best_RW // token_RWC.shape[2], pooled + best_RW
                guesses.descend(origin_RW, token_RW)
                feature_RWH = self.draft.next_feature(state_RWH).take_along_dim(origin_RW[:, :, None], 1)
                first, width = (level - 1) * shape.width, best_RW.shape[1]
                mask_RW = mask_RW.gather(1, origin_RW) | _bits(first, width, device)
                rows = replace(guessed.columns(first, width), token_ids=token_RW.flatten(), ancestors=mask_RW.flatten())
                blocks_TKN = None if roots.blocks_RKN is None else roots.blocks_RKN.repeat_interleave(width, 0)
                state_TH = self.draft(rows, feature_RWH.flatten(0, 1), self.cache.draft(), blocks_TKN)
                state_RWH = state_TH.view_as(feature_RWH)
            pooled += score_RM.shape[1]
        return Pool(
            torch.cat([each.token_RM for each in levels], 1),
            torch.cat([each.score_RM for each in levels], 1),
            torch.cat([each.parent_RM for each in levels], 1),
        )

    def _guessed_rows(self, roots: Roots, shape: TreeConfig, depth: int) -> Batch:
        """Where the draft's rows of all guessed nodes lie: `width` slots for each depth, behind the decided tokens."""
        row_N = torch.arange(shape.width * (depth - 1), device=roots.length_R.device)
        slot_RN = roots.length_R[:, None] + row_N
        position_RN = roots.length_R[:, None] + row_N // shape.width
        return Batch.grid(
            self.cache.page_size,
            torch.zeros_like(slot_RN),
            position_RN,
            slot_RN,
            roots.length_R,
            roots.table_RW,
            None,
            roots.max_context,
        )

    def nodes(self, pool: Pool, shape: TreeConfig) -> tuple[Tensor, Tensor, Tensor]:
        """The best candidates, or those that a static tree names, as nodes 1, 2, ... below the roots: tokens and
        parents (0: the root) int64 [R, N - 1], and which may be drafted. Parents come before children.
        """
        order_RK = self._select(pool, shape)
        # Which node each candidate is; that of "-1", the root, stands first.
        node_RM = pool.parent_RM.new_zeros(order_RK.shape[0], 1 + pool.parent_RM.shape[1])
        node_K = torch.arange(1, order_RK.shape[1] + 1, device=order_RK.device)
        node_RM.scatter_(1, order_RK + 1, node_K.expand_as(order_RK))
        parent_RK = node_RM.gather(1, pool.parent_RM.gather(1, order_RK) + 1)
        live_RK = pool.score_RM.gather(1, order_RK) > float("-inf")
        return pool.token_RM.gather(1, order_RK), parent_RK, live_RK

    def _select(self, pool: Pool, shape: TreeConfig) -> Tensor:
        """Places in the pool of the nodes, int64 [R, K] in ascending order. A child never scores above its parent and
        ties go to the earlier entry, so parents come along.
        """
        count, size = pool.score_RM.shape
        if shape.paths:
            return _constant(_places(shape, size), pool.score_RM.device).expand(count, -1)
        keep = min(shape.nodes - 1, size)
        return pool.score_RM.sort(dim=1, descending=True, stable=True).indices[:, :keep].sort(dim=1).values


@functools.cache
def _bits(first: int, count: int, device: torch.device) -> Tensor:
    """One bit each, from bit `first` on, int64."""
    with torch.inference_mode(False):  # whoever asks next may be of another mind
        return torch.ones(count, dtype=torch.int64, device=device) << torch.arange(first, first + count, device=device)


@functools.cache
def _constant(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """int64 on the device, sent there once: while a graph is captured nothing can be."""
    with torch.inference_mode(False):
        return torch.tensor(numbers, device=device)


def _places(shape: TreeConfig, size: int) -> tuple[int, ...]:
    """Where in a pool of `size` candidates the nodes of a static tree are, as far down as it was grown."""
    places, first, expanded = [], 0, 1
    for nodes, inner in shape.layout:
        if first == size:
            break
        places += [first + node for node in nodes]
        first += expanded * shape.width
        expanded = len(inner)
    return tuple(places)


def _take(waiting: list[Tensor], count: int) -> tuple[Tensor, list[Tensor]]:
    """The first `count` rows, and what is left."""
    rows = torch.cat(waiting)
    return rows[:count], [rows[count:]] if len(rows) > count else []
