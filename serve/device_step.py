"""A verify step that stays on the device: draft, verify, accept, commit and follow, and only then does the host read
what was decided. On CUDA its two halves are CUDA graphs, captured when a size is first met; on a CPU the same
operations run one by one.

It takes requests whose choices depend on tensors alone; grammars, penalties, biases and log-probabilities go the
general way (runner.py). Sequences, pages and node numbers are padded to a few sizes: a padded sequence reads and writes
the last page of the cache, which belongs to nobody; a node that may not be drafted is not live and never accepted.

R sequences, W pages of the longest one, N nodes of a tree, D its depth, F = D + 1 tokens that a step decides at most,
A = taps * target hidden, H draft hidden, J index heads, K heads of the draft, V vocabulary.
"""

import weakref
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from draft_model.chosen_blocks import run_target
from serve.budget import OFF
from serve.drafter import Drafter, Roots
from serve.guesses import DeviceGuesses, Noise
from serve.request import Sequence
from serve.sampling import RowSettings
from serve.step_buffers import Decided, Marks, PlainAhead, Size, StepBuffers
from serve.synthetic import SyntheticAcceptance
from serve.tree import TreeConfig
from serve.tree_tensors import accepted, ancestry, longest
from target_model.batch import Batch
from target_model.cache import PagedCache
from target_model.kernels import ops
from target_model.model import TargetModel, record_graph

Halves = tuple[Callable[[], None], Callable[[], None]]  # draft and verify


class DeviceStep:
    """Steps of all sizes over one cache, whose last page must belong to nobody.

    `graphs`: capture them; else every step runs operation by operation.
    """

    def __init__(
        self,
        target: TargetModel,
        drafter: Drafter | None,
        cache: PagedCache,
        *,
        graphs: bool,
        synthetic: SyntheticAcceptance | None = None,
    ):
        self.target, self.drafter, self.cache = target, drafter, cache
        self.graphs, self.synthetic = graphs, synthetic
        self.taps = drafter.draft.config.taps if drafter else ()
        self.seconds = (0.0, 0.0)  # that the last step took to draft and to verify
        # What the last step was of; a request that has ended is not kept for it.
        self._size: Size | None = None
        self._last: list[weakref.ref[Sequence]] = []
        self._ahead: Marks | None = None  # when the trees of the next step were drafted, if they have been
        self._plain: PlainAhead | None = None
        self._buffers: dict[tuple[int, int], StepBuffers] = {}
        self._halves: dict[Size, Halves] = {}
        self._pool: tuple[int, int] | None = None

    def takes(self, sequences: list[Sequence]) -> bool:
        """Whether tensors say all about how these sequences' next tokens are chosen."""
        return all(
            sequence.constraint is None
            and sequence.params.logprobs is None
            and not sequence.params.logit_bias
            and not sequence.params.uses_history
            and sequence.output_length >= sequence.params.min_tokens
            for sequence in sequences
        )

    def run(self, sequences: list[Sequence], limits: list[int], shape: TreeConfig) -> list[Decided]:
        """One step of trees of this shape, at most `limits[r]` levels deep below the root of sequence r. A drafter
        follows up to the bonus token, after a tree; without one the sequences have heard what the target left.

        When a step is of the same size and sequences as the one before, the device goes on before the host reads its
        result: it drafts the next trees or, without a draft, makes the next step. That counts if the next step is so,
        too, else it is done anew: it lies behind all decided tokens and does no harm.
        """
        shape = shape if self.drafter and max(limits) else OFF
        if shape != OFF:
            self.drafter.follow(sequences)
        noise = Noise.of(sequence.params for sequence in sequences)
        widest = max(len(sequence.pages) for sequence in sequences)
        size = Size.of(len(sequences), widest, shape, noise, padded=self.graphs)
        buffers = self._buffers_of(size)
        wanted = [self.synthetic.wanted() for _ in sequences] if self.synthetic else None
        steady = size == self._size and [each() for each in self._last] == sequences
        self._size, self._last = size, [weakref.ref(sequence) for sequence in sequences]
        if self.drafter:
            moved = buffers.load(sequences, limits, wanted, drafting=shape != OFF)
            rows = self._run_halves(size, buffers, self._ahead if steady and not moved else None, go_on=steady)
        else:
            rows = self._run_plain(size, buffers, sequences, go_on=steady)
        decided = [Decided.read(row, size.depth, size.nodes) for row in rows[: len(sequences)]]
        for r, (sequence, each) in enumerate(zip(sequences, decided, strict=True)):
            if wanted:
                self.synthetic.settle(wanted[r] - len(each.path))
            sequence.computed += len(each.tokens)
        if shape != OFF:
            buffers.hand_over(sequences)
        elif self.drafter:
            self._tell(sequences, buffers)
        return decided

    def _tell(self, sequences: list[Sequence], buffers: StepBuffers) -> None:
        aux_RA, choice_RJN = buffers.left_RA.clone(), None
        if self.drafter.chosen is not None:
            choice_RJN = buffers.choice_RJN.clone()
        for r, sequence in enumerate(sequences):
            self.drafter.hear(sequence, aux_RA[r : r + 1], None if choice_RJN is None else choice_RJN[r : r + 1])

    def _buffers_of(self, size: Size) -> StepBuffers:
        key = size.sequences, size.pages
        if key not in self._buffers:
            self._buffers[key] = StepBuffers(*key, self.cache, self.drafter)
        return self._buffers[key]

    def _run_halves(self, size: Size, buffers: StepBuffers, ahead: Marks | None, *, go_on: bool) -> list[list[int]]:
        """The result, row by row. `ahead`: when these trees were drafted, if they have been. `go_on`: draft the next
        ones.
        """
        draft, verify = self._halves_of(size, buffers)
        drafted = ahead or buffers.timed(draft)
        verified = buffers.timed(verify)
        sent = buffers.send_result()
        draft, verify = self._kept(size, draft, verify)
        self._ahead = buffers.timed(draft) if go_on and size.shape != OFF else None
        result = buffers.result(sent)
        self.seconds = buffers.between(*drafted), buffers.between(*verified)
        return result

    def _run_plain(
        self, size: Size, buffers: StepBuffers, sequences: list[Sequence], *, go_on: bool
    ) -> list[list[int]]:
        """The result of a step without a draft, row by row. `go_on`: make the next step, too."""
        draft, verify = self._halves_of(size, buffers)
        ready, self._plain = self._plain, None
        if ready is not None and ready.is_of(size, sequences):
            buffers.load_table(sequences)
            marks, sent = ready.marks, ready.sent
        else:
            buffers.load(sequences, [0] * len(sequences), None, drafting=False)
            marks = buffers.timed(verify)
            sent = buffers.send_result()
        _, verify = self._kept(size, draft, verify)
        if go_on:
            # Every sequence gains one token.
            places = [(weakref.ref(sequence), sequence.pages, len(sequence.token_ids) + 1) for sequence in sequences]
            self._plain = PlainAhead(size, places, buffers.timed(verify), buffers.send_result())
        result = buffers.result(sent)
        self.seconds = 0.0, buffers.between(*marks)
        return result

    def _halves_of(self, size: Size, buffers: StepBuffers) -> Halves:
        if size in self._halves:
            return self._halves[size]
        return (
            partial(self._draft, size, buffers) if size.shape != OFF else _nothing,
            partial(self._verify, size, buffers),
        )

    def _kept(self, size: Size, draft: Callable[[], None], verify: Callable[[], None]) -> Halves:
        """The halves of the next step of this size: captured, once they have run."""
        if size not in self._halves:
            if self.graphs:
                draft = draft if size.shape == OFF else self._captured(draft, record_graph).replay
                verify = partial(self.target.replay, self._captured(verify, self.target.make_graph))
            self._halves[size] = draft, verify
        return self._halves[size]

    def _captured(self, run: Callable[[], None], record: Callable[..., torch.cuda.CUDAGraph]) -> torch.cuda.CUDAGraph:
        """A graph of what has just run for the first time. All graphs take turns in one pool of memory: what outlives a
        half lies in buffers outside of it.
        """
        graph = record(run, self._pool)
        self._pool = graph.pool()
        return graph

    def _draft(self, size: Size, buffers: StepBuffers) -> None:
        """Grows the trees."""
        drafter, shape = self.drafter, size.shape
        rows = buffers.settings()
        roots = Roots(
            buffers.state_RH,
            rows.position,
            buffers.limit_R[:, None],
            buffers.table_RW,
            buffers.blocks_RKN,
            size.pages * self.cache.page_size,
        )
        guesses = DeviceGuesses(drafter.draft, drafter.target_ids, rows, size.noise)
        pool = drafter.grow_from(roots, guesses, shape, shape.depth)
        order_RK = drafter.select(pool, shape)
        # Where in the tree each entry of the pool is; that of "-1", the root, stands first.
        place_RM = torch.zeros_like(pool.token_RM[:, :1]).repeat(1, pool.token_RM.shape[1] + 1)
        node_K = torch.arange(1, order_RK.shape[1] + 1, device=order_RK.device)
        place_RM.scatter_(1, order_RK + 1, node_K.expand_as(order_RK))
        buffers.token_RN[:, : size.nodes] = torch.cat([buffers.root_R[:, None], pool.token_RM.gather(1, order_RK)], 1)
        buffers.parent_RN[:, 1 : size.nodes] = place_RM.gather(1, pool.parent_RM.gather(1, order_RK) + 1)
        buffers.live_RN[:, 1 : size.nodes] = pool.score_RM.gather(1, order_RK) > float("-inf")

    def _verify(self, size: Size, buffers: StepBuffers) -> None:
        """Scores the trees, accepts, commits, and lets the draft follow."""
        nodes, depth = size.nodes, size.depth
        length_R1 = buffers.length_R[:, None]
        token_RN, parent_RN = buffers.token_RN[:, :nodes].contiguous(), buffers.parent_RN[:, :nodes].contiguous()
        if nodes == 1:
            token_RN = buffers.root_R[:, None].contiguous()
        index_N = torch.arange(nodes, device=token_RN.device)
        depth_RN, mask_RN = ancestry(parent_RN, depth)
        batch = Batch.grid(
            self.cache.page_size,
            token_RN,
            length_R1 - 1 + depth_RN,
            length_R1 - 1 + index_N,
            length_R1[:, 0] - 1,
            buffers.table_RW,
            mask_RN if nodes > 1 else None,
            size.pages * self.cache.page_size,
        )
        chosen = self.drafter.chosen if self.drafter else None
        output, choice_TJN = run_target(self.target, batch, self.cache, self.taps, chosen)
        choice_RN = self._choose(output.final_state, buffers.settings(), depth_RN, size)
        hit_RN = (token_RN == choice_RN.gather(1, parent_RN)) & buffers.live_RN[:, :nodes]
        if self.synthetic:
            hit_RN = longest(depth_RN, mask_RN, buffers.live_RN[:, :nodes], buffers.wanted_R)
        path_RF = accepted(hit_RN, parent_RN, depth_RN, depth)
        kept_R1 = (path_RF >= 0).sum(1, keepdim=True) - 1
        decided_RF = choice_RN.gather(1, path_RF.clamp(min=0))
        if self.synthetic:
            # What is kept is not what the target chose.
            tokens_RF = token_RN.gather(1, path_RF.clamp(min=0)).roll(-1, 1)
            decided_RF = torch.where(torch.arange(depth + 1, device=kept_R1.device) < kept_R1, tokens_RF, decided_RF)
        if depth:
            self.cache.commit(batch, path_RF[:, 1:].contiguous())
            self._follow(buffers, output.aux, choice_TJN, path_RF, decided_RF, kept_R1)
        elif self.drafter:
            buffers.leave(output.aux, choice_TJN)
        live_RN = buffers.live_RN[:, :nodes].long()
        buffers.keep([kept_R1, decided_RF, path_RF[:, 1:], token_RN, parent_RN, live_RN])
        buffers.advance(decided_RF.gather(1, kept_R1)[:, 0], kept_R1[:, 0] + 1)

    def _choose(self, state_TH: Tensor, rows: RowSettings, depth_RN: Tensor, size: Size) -> Tensor:
        """The target's token behind every node, int64 [R, N]."""
        logits_TV = self.target.scores(state_TH)
        if size.noise is Noise.NONE:
            return logits_TV.argmax(-1).view_as(depth_RN)

        place = rows._replace(position=(rows.position[:, None] + depth_RN).flatten())
        return ops.sample_tokens(logits_TV, *place).view_as(depth_RN)

    def _follow(
        self,
        buffers: StepBuffers,
        aux_TA: Tensor,
        choice_TJN: Tensor | None,
        path_RF: Tensor,
        decided_RF: Tensor,
        kept_R1: Tensor,
    ) -> None:
        """The draft's rows of the decided tokens from the target's real features, as `Drafter.follow` computes them.
        Rows behind the last decided token hold anything, in slots that the next step writes anew.
        """
        drafter, size = self.drafter, self.cache.page_size
        (sequences, rows), nodes = path_RF.shape, aux_TA.shape[0] // path_RF.shape[0]
        from_T = (torch.arange(sequences, device=path_RF.device)[:, None] * nodes + path_RF.clamp(min=0)).flatten()
        index_F = torch.arange(rows, device=path_RF.device)
        length_R = buffers.length_R
        slot_RF = length_R[:, None] + index_F
        table_RW = buffers.table_RW
        batch = Batch.grid(size, decided_RF, slot_RF, slot_RF, length_R, table_RW, None, table_RW.shape[1] * size)
        blocks_TKN = None
        if drafter.chosen is not None:
            blocks_TKN = drafter.chosen.lists(choice_TJN[from_T], batch.positions)
        aux_TA = aux_TA[from_T]
        state_TH = drafter.draft(batch, drafter.draft.project(aux_TA), self.cache.draft(), blocks_TKN)
        last_R = torch.arange(sequences, device=path_RF.device) * rows + kept_R1[:, 0]
        buffers.state_RH.copy_(state_TH[last_R])
        if blocks_TKN is not None:
            buffers.blocks_RKN.copy_(blocks_TKN[last_R])
        # The taps of a page's last position are the features of the row behind it.
        kept_RF = (slot_RF % size == 0) & (index_F <= kept_R1)
        page_RF = table_RW.gather(1, (slot_RF // size - 1).clamp(min=0)).long()
        page_RF = torch.where(kept_RF, page_RF, self.cache.num_pages)
        drafter.page_taps[page_RF.flatten()] = aux_TA.to(drafter.page_taps.dtype)


def _nothing() -> None:
    """What a step without drafts has to draft."""
