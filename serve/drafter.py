"""The draft at work: it follows the decided tokens with the target's real features and grows trees of guesses from
them.

R sequences, W nodes of a depth that are expanded, C children considered per node, V the draft's vocabulary, M
candidates in a pool.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from draft_model.chosen_blocks import ChosenBlocks
from draft_model.model import Eagle3Draft
from serve.request import SamplingParams, Sequence
from serve.sampling import Row, Survivors, filtered, follow_grammars
from serve.tree import Tree, TreeConfig
from target_model.batch import Batch
from target_model.cache import PagedCache

# A draft is less sure of what it knows than its target: its logits are scaled before they meet the noise. Sampled
# chains of m3-tiny keep 1 to 2 % more tokens so, its default tree 0.6 %, a tree of 32 nodes 1 to 2 % fewer.
SURENESS = 1 / 0.85


@dataclass(frozen=True)
class Pool:
    """Candidates of a growing tree, depth by depth: their target tokens int64 [R, M], the log of the chance that the
    target chooses the path down to each fp32 [R, M] (-inf: not allowed), and their parents' places int64 [R, M], -1
    under the root.
    """

    token_RM: Tensor
    score_RM: Tensor
    parent_RM: Tensor


class Drafter:
    """Proposes a tree for each sequence. The draft's row of the token at position t lies in slot t, guessed rows behind
    the decided ones.
    """

    def __init__(self, draft: Eagle3Draft, cache: PagedCache, chosen: ChosenBlocks | None = None):
        """With `chosen` the draft attends sparsely."""
        self.draft, self.cache, self.chosen = draft, cache, chosen
        config, device = draft.config, cache.k.device
        self._target_ids = draft.target_ids(torch.arange(config.draft_vocab_size, device=device))
        # Taps of each page's last position: whoever continues behind a cached page needs them for its first row.
        taps = cache.num_pages, config.num_aux * config.target_hidden_size
        self._page_taps = torch.zeros(taps, dtype=draft.dtype, device=device)

    def resume(self, sequence: Sequence) -> None:
        """Picks up behind the cached pages that the sequence starts with."""
        last_page = sequence.pages[sequence.computed // self.cache.page_size - 1]
        sequence.taps = [self._page_taps[last_page][None]]
        if self.chosen is not None:
            # Its keys do not depend on what the row attends to, and as it is never a root nobody reads its state.
            sequence.choices = [self.chosen.nothing(self._page_taps.device)]

    def hear(self, sequence: Sequence, aux_TA: Tensor, choice_TJN: Tensor | None) -> None:
        """Takes what the target left of newly decided positions."""
        sequence.taps.append(aux_TA)
        if choice_TJN is not None:
            sequence.choices.append(choice_TJN)

    def follow(self, sequences: list[Sequence]) -> None:
        """Computes the rows of decided tokens from the taps that the target has left, one row for each that is known.

        Whatever the draft had guessed in these slots is overwritten. The last row of each sequence is where its next
        tree grows from.
        """
        rows = [(s, s.token_ids[s.draft_end : s.computed + 1]) for s in sequences]
        rows = [(sequence, tokens) for sequence, tokens in rows if tokens]
        if not rows:
            return
        size, starts, taps, choices, edges = self.cache.page_size, [], [], [], []
        row = 0
        for sequence, tokens in rows:
            start = sequence.draft_end
            starts.append(start)
            now, sequence.taps = _take(sequence.taps, len(tokens))
            taps.append(now)
            if self.chosen is not None:
                now, sequence.choices = _take(sequence.choices, len(tokens))
                choices.append(now)
            edges += [
                (sequence.pages[slot // size - 1], row + slot - start)
                for slot in range(-(-start // size) * size, start + len(tokens), size)
            ]
            sequence.draft_end += len(tokens)
            row += len(tokens)
        aux_TA = torch.cat(taps)
        if edges:
            pages, kept = zip(*edges, strict=True)
            self._page_taps[list(pages)] = aux_TA[list(kept)].to(self._page_taps.dtype)
        tables = [sequence.pages for sequence, _ in rows]
        batch = Batch.causal(size, self._page_taps.device, [tokens for _, tokens in rows], starts, tables)
        blocks_TKN = None if self.chosen is None else self.chosen.lists(torch.cat(choices), batch.positions)
        state_TH = self.draft(batch, self.draft.project(aux_TA), self.cache.draft(), blocks_TKN)
        end = 0
        for sequence, tokens in rows:
            end += len(tokens)
            sequence.root_state = state_TH[end - 1]
            sequence.root_blocks = None if blocks_TKN is None else blocks_TKN[end - 1]

    def propose(
        self, sequences: list[Sequence], limits: list[int], noise_RDV: Tensor | None, shape: TreeConfig
    ) -> list[Tree]:
        """Trees of at most `limits[r]` levels below each root. noise[r, d] is that of the token behind a node of depth
        d.
        """
        return self._select(sequences, shape, self.grow(sequences, limits, noise_RDV, shape))

    def frontier(self, level: int, candidates: Pool, shape: TreeConfig) -> Tensor:
        """Which candidates of this depth are expanded, int64 [R, W]: the best, or those that a static tree names."""
        count, size = candidates.score_RM.shape
        if shape.paths:
            return torch.tensor(shape.layout[level - 1][1], device=candidates.score_RM.device).expand(count, -1)
        return candidates.score_RM.topk(min(shape.width, size), dim=1).indices

    def grow(self, sequences: list[Sequence], limits: list[int], noise_RDV: Tensor | None, shape: TreeConfig) -> Pool:
        """All candidates that `propose` chooses a tree from."""
        depth = min(shape.depth, max(limits))
        self.follow(sequences)
        count, device = len(sequences), self._page_taps.device
        limit_R1 = torch.tensor(limits, device=device)[:, None]
        state_RWH = torch.stack([sequence.root_state for sequence in sequences])[:, None]
        score_RW = torch.zeros(count, 1, device=device)
        parent_RW = torch.full((count, 1), -1, device=device)  # index in the pool
        mask_RW = torch.zeros(count, 1, dtype=torch.int64, device=device)  # visible guessed rows
        # Guessed tokens down to each expanded node; nobody asks for them without a grammar.
        paths = [[()]] * count if any(sequence.constraint for sequence in sequences) else None
        levels, pooled = [], 0
        for level in range(1, depth + 1):
            noise_RV = None if noise_RDV is None else noise_RDV[:, level - 1]
            token_RWC, chance_RWC = self._children(state_RWH, sequences, noise_RV, shape.width, paths)
            score_RM = (score_RW[:, :, None] + chance_RWC).flatten(1).masked_fill(level > limit_R1, float("-inf"))
            parent_RM = parent_RW[:, :, None].expand_as(token_RWC).flatten(1)
            candidates = Pool(token_RWC.flatten(1), score_RM, parent_RM)
            levels.append(candidates)
            if level < depth:
                best_RW = self.frontier(level, candidates, shape)
                score_RW, token_RW = score_RM.gather(1, best_RW), candidates.token_RM.gather(1, best_RW)
                origin_RW, parent_RW = best_RW // token_RWC.shape[2], pooled + best_RW
                paths = _extended(paths, origin_RW, token_RW) if paths else None
                feature_RWH = self.draft.next_feature(state_RWH).take_along_dim(origin_RW[:, :, None], 1)
                mask_RW = mask_RW.gather(1, origin_RW)
                state_RWH, mask_RW = self._expand(sequences, (level, shape.width), token_RW, feature_RWH, mask_RW)
            pooled += score_RM.shape[1]
        return Pool(
            torch.cat([each.token_RM for each in levels], 1),
            torch.cat([each.score_RM for each in levels], 1),
            torch.cat([each.parent_RM for each in levels], 1),
        )

    def _children(
        self,
        state_RWH: Tensor,
        sequences: list[Sequence],
        noise_RV: Tensor | None,
        width: int,
        paths: list[list[tuple[int, ...]]] | None,
    ) -> tuple[Tensor, Tensor]:
        """The best `width` target tokens behind each node, and the log of their chance to be the target's choice: that
        of a token that the grammar forbids is -inf.
        """
        values_RWK, ids_RWK, dead_RW1 = self.draft.logits(state_RWH), None, None
        logits_RWV = values_RWK
        if paths is not None:
            rows = [Row(sequence, path) for sequence, own in zip(sequences, paths, strict=True) for path in own]
            allowed_RWV = follow_grammars(values_RWK.flatten(0, 1), rows, self._target_ids).view_as(values_RWK)
            # A draft with a smaller vocabulary may know none of the tokens that are allowed.
            dead_RW1 = allowed_RWV.isneginf().all(-1, keepdim=True)
            values_RWK = logits_RWV = torch.where(dead_RW1, values_RWK, allowed_RWV)
        if noise_RV is not None:
            values_RWK, ids_RWK = self._noisy(logits_RWV, sequences, noise_RV, width)
        total_RW1 = values_RWK.logsumexp(-1, keepdim=True)
        greedy = [sequence.params.greedy for sequence in sequences]
        if noise_RV is not None and any(greedy):
            # Of a greedy row only a few of the logits may be at hand.
            total_RW1[greedy] = logits_RWV[greedy].logsumexp(-1, keepdim=True)
        values_RWC, index_RWC = values_RWK.topk(min(width, values_RWK.shape[-1]), dim=-1)
        chance_RWC = values_RWC - total_RW1
        if dead_RW1 is not None:
            chance_RWC = chance_RWC.masked_fill(dead_RW1, float("-inf"))
        index_RWC = index_RWC if ids_RWK is None else ids_RWK.gather(-1, index_RWC)
        return self._target_ids[index_RWC], chance_RWC.clamp(max=0)

    def _noisy(
        self, logits_RWV: Tensor, sequences: list[Sequence], noise_RV: Tensor, width: int
    ) -> tuple[Tensor, Tensor | None]:
        """log q + noise of at least `width` entries of each node, and the draft's ids of these; None: of all in order.

        The target will pick the argmax of log p + noise and the draft knows log q + noise. The larger the gap between
        two of these values, the likelier their order is the same: their softmax serves as the chance.
        """
        nodes, greedy = logits_RWV.shape[1], [sequence.params.greedy for sequence in sequences]
        rows = [Row(sequence, ()) for sequence in sequences for _ in range(nodes)]
        sureness = torch.tensor([1.0 if row.sequence.params.greedy else SURENESS for row in rows])
        logits_NV = logits_RWV.flatten(0, 1) * sureness.to(logits_RWV.device)[:, None]
        # Greedy rows keep their best logits, as they are: a single surviving token would leave nothing to branch to.
        unfiltered = SamplingParams(top_k=width)
        params = [unfiltered if row.sequence.params.greedy else row.sequence.params for row in rows]
        best = Survivors.of(logits_NV, params, split_ties=True)
        if best is not None and best.ids_NK.shape[1] >= width:
            noise_NV = noise_RV.repeat_interleave(nodes, 0)
            noisy_NK = best.values_NK + noise_NV.gather(1, self._target_ids[best.ids_NK])
            return noisy_NK.unflatten(0, (-1, nodes)), best.ids_NK.unflatten(0, (-1, nodes))
        noise_RV = noise_RV[:, self._target_ids] if self.draft.config.pruned else noise_RV
        noisy_RWV = filtered(logits_NV, rows).view_as(logits_RWV) + noise_RV[:, None]
        if any(greedy):
            noisy_RWV[greedy] = logits_RWV[greedy]
        return noisy_RWV, None

    def _expand(
        self, sequences: list[Sequence], place: tuple[int, int], token_RW: Tensor, feature_RWH: Tensor, mask_RW: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Runs the draft on nodes of depth `level`, each depth having `room` slots (`place` is the two); returns their
        states and their masks of visible guessed rows.
        """
        (level, room), width, device = place, token_RW.shape[1], self._page_taps.device
        first = (level - 1) * room
        mask_RW = mask_RW | (1 << torch.arange(first, first + width, device=device))
        starts = [len(sequence.token_ids) for sequence in sequences]
        batch = Batch.build(
            self.cache.page_size,
            device,
            [[0] * width] * len(sequences),
            starts,
            [sequence.pages for sequence in sequences],
            positions=[start - 1 + level for start in starts for _ in range(width)],
            slots=[start + first + i for start in starts for i in range(width)],
            ancestors=[],
        )
        batch = replace(batch, token_ids=token_RW.flatten(), ancestors=mask_RW.flatten())
        blocks_TKN = None
        if self.chosen is not None:
            blocks_TKN = torch.stack([sequence.root_blocks for sequence in sequences]).repeat_interleave(width, 0)
        state_TH = self.draft(batch, feature_RWH.flatten(0, 1), self.cache.draft(), blocks_TKN)
        return state_TH.view_as(feature_RWH), mask_RW

    def _select(self, sequences: list[Sequence], shape: TreeConfig, pool: Pool) -> list[Tree]:
        """The best nodes of each pool, or those of a static tree. A child never scores above its parent and ties go to
        the earlier entry, so parents come along.
        """
        score_RM = pool.score_RM
        if shape.paths:
            place_K = torch.tensor(_places(shape, score_RM.shape[1]), device=score_RM.device)
            order_RK = place_K.expand(len(sequences), -1)
        else:
            keep = min(shape.nodes - 1, score_RM.shape[1])
            order_RK = score_RM.sort(dim=1, descending=True, stable=True).indices[:, :keep].sort(dim=1).values
        chosen = [order_RK, pool.token_RM.gather(1, order_RK), pool.parent_RM.gather(1, order_RK)]
        live = (score_RM.gather(1, order_RK) > float("-inf")).tolist()
        trees = []
        for sequence, order, tokens, parents, alive in zip(sequences, *torch.stack(chosen).tolist(), live, strict=True):
            tree, place = Tree([sequence.token_ids[-1]], [-1]), {-1: 0}
            for index, token, parent, ok in zip(order, tokens, parents, alive, strict=True):
                if ok:
                    place[index] = len(tree)
                    tree.tokens.append(token)
                    tree.parents.append(place[parent])
            trees.append(tree)
        return trees


def _extended(paths: list[list[tuple[int, ...]]], origin_RW: Tensor, token_RW: Tensor) -> list[list[tuple[int, ...]]]:
    """The paths to the nodes of the next depth: each continues that of its origin by its token."""
    return [
        [(*own[origin], token) for origin, token in zip(origins, tokens, strict=True)]
        for own, origins, tokens in zip(paths, origin_RW.tolist(), token_RW.tolist(), strict=True)
    ]


def _places(shape: TreeConfig, size: int) -> list[int]:
    """Where in a pool of `size` candidates the nodes of a static tree are, as far down as it was grown."""
    places, first, expanded = [], 0, 1
    for nodes, inner in shape.layout:
        if first == size:
            break
        places += [first + node for node in nodes]
        first += expanded * shape.width
        expanded = len(inner)
    return places


def _take(waiting: list[Tensor], count: int) -> tuple[Tensor, list[Tensor]]:
    """The first `count` rows, and what is left."""
    rows = torch.cat(waiting)
    return rows[:count], [rows[count:]] if len(rows) > count else []
