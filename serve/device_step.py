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
from serve.graph_pool import GraphPool
from serve.guesses import DeviceGuesses, Noise
from serve.request import Sequence
from serve.sampling import RowSettings
from serve.step_buffers import Ahead, Launched, StepBuffers
from serve.step_size import Decided, Size
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

    Without `pool` nothing is captured: every step runs operation by operation.
    """

    def __init__(
        self,
        target: TargetModel,
        drafter: Drafter | None,
        cache: PagedCache,
        *,
        pool: GraphPool | None,
        synthetic: SyntheticAcceptance | None = None,
    ):
        self.target, self.drafter, self.cache = target, drafter, cache
        self._pool, self.synthetic = pool, synthetic
        self.taps = drafter.draft.config.taps if drafter else ()
        self.seconds = (0.0, 0.0)  # that the last step took to draft and to verify
        # What the last step was of; a request that has ended is not kept for it.
        self._size: Size | None = None
        self._last: list[weakref.ref[Sequence]] = []
        self._ahead: Ahead | None = None  # the next step, where it has been begun
        self._buffers: dict[tuple[int, int], StepBuffers] = {}
        self._halves: dict[Size, Halves] = {}

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

    def run(
        self, sequences: list[Sequence], limits: list[int], shape: TreeConfig, *, lasting: bool = True
    ) -> list[Decided]:
        """One step of trees of this shape, at most `limits[r]` levels deep below the root of sequence r. A drafter
        follows up to the bonus token, after a tree; without one the sequences have heard what the target left.

        When a step is of the same sequences as the one before, the device begins the next one before the host reads
        its result, unless others are known to join them (not `lasting`). Then the next call returns what that step
        decided, whatever shape it asks for; of sequences that have gone nothing is taken, and what it wrote lies
        behind all decided tokens and does no harm.
        """
        shape = shape if self.drafter and max(limits) else OFF
        ready, self._ahead = self._ahead, None
        rows = ready.rows(sequences) if ready else None
        if ready is not None and rows is None:
            self._take_back(ready.step)
        noise = Noise.of(sequence.params for sequence in sequences)
        widest = max(len(sequence.pages) for sequence in sequences)
        size = Size.of(len(sequences), widest, shape, noise, padded=self._pool is not None)
        # Behind a plain step that is on its way the draft cannot have followed.
        drafting = shape != OFF and (rows is None or ready.step.size.shape != OFF)
        if drafting:
            self.drafter.follow(sequences)
        if rows is None:
            step, rows = self._begin(size, sequences, limits), list(range(len(sequences)))
            steady = size == self._size and [each() for each in self._last] == sequences
        else:
            step = ready.step
            steady = rows == list(range(len(ready.places))) and size.place == step.size.place
        self._size, self._last = size, [weakref.ref(sequence) for sequence in sequences]
        following = None
        if lasting and steady and (drafting or shape == OFF):
            if ready is not None:
                step.buffers.load_table(sequences)
            following = self._launch(size, step.buffers, self._wanted(sequences, step.buffers))
        decided = self._read(step, sequences, rows)
        if following is not None:
            self._ahead = Ahead.of(following, sequences)
        return decided

    @torch.inference_mode()
    def give_up_ahead(self) -> None:
        """The sequences go another way: a step that was begun for them does not count."""
        if self._ahead is not None:
            self._take_back(self._ahead.step)
            self._ahead = None

    def _begin(self, size: Size, sequences: list[Sequence], limits: list[int]) -> Launched:
        key = size.place
        if key not in self._buffers:
            self._buffers[key] = StepBuffers(*key, self.cache, self.drafter)
        buffers = self._buffers[key]
        buffers.load(sequences, limits, drafting=size.shape != OFF)
        return self._launch(size, buffers, self._wanted(sequences, buffers))

    def _wanted(self, sequences: list[Sequence], buffers: StepBuffers) -> list[int]:
        """How many nodes the next step is to keep of each sequence, where that is decreed; else nothing."""
        if self.synthetic is None:
            return []
        wanted = [self.synthetic.wanted() for _ in sequences]
        buffers.load_wanted(wanted)
        return wanted

    def _launch(self, size: Size, buffers: StepBuffers, wanted: list[int]) -> Launched:
        """Puts a step on its way, and makes graphs of its halves when it is the first of its size."""
        kept = self._halves.get(size)
        draft, verify = kept or (partial(self._draft, size, buffers), partial(self._verify, size, buffers))
        begun = drafted = buffers.mark()
        if size.shape != OFF:
            draft()
            drafted = buffers.mark()
        verify()
        sent = buffers.send_result()
        left = buffers.left() if self.drafter and size.shape == OFF else None
        launched = Launched(size, buffers, wanted, begun, drafted, sent, left)
        if kept is None:
            self._halves[size] = self._kept(size, draft, verify)
        return launched

    def _read(self, step: Launched, sequences: list[Sequence], rows: list[int]) -> list[Decided]:
        """Waits for what a step has decided; sequence r has its row rows[r]."""
        buffers, size = step.buffers, step.size
        result = buffers.result(step.sent)
        decided = [Decided.read(result[row], size.depth, size.nodes) for row in rows]
        owed = sum(step.wanted)
        for sequence, each in zip(sequences, decided, strict=True):
            owed -= len(each.path)
            sequence.computed += len(each.tokens)
        if self.synthetic:
            self.synthetic.settle(owed)
        if step.left is not None:
            aux_R, choice_R = (None if each is None else each.split(1) for each in step.left)
            for sequence, row in zip(sequences, rows, strict=True):
                self.drafter.hear(sequence, aux_R[row], choice_R and choice_R[row])
        elif self.drafter:
            buffers.hand_over(sequences, rows)
        self.seconds = buffers.between(step.begun, step.drafted), buffers.between(step.drafted, step.sent[1])
        return decided

    def _take_back(self, step: Launched) -> None:
        if step.size.shape != OFF:
            step.buffers.take_back()
        if self.synthetic:
            self.synthetic.settle(sum(step.wanted))

    def _kept(self, size: Size, draft: Callable[[], None], verify: Callable[[], None]) -> Halves:
        """The halves of all further steps of this size, when they have run once."""
        if self._pool is not None:
            if size.shape != OFF:
                draft = self._pool.record(draft, record_graph).replay
            verify = partial(self.target.replay, self._pool.record(verify, self.target.make_graph))
        return draft, verify

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
        buffers.plant(*drafter.nodes(pool, shape))

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
            buffers.remember()
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
        choice_TJN = None if drafter.chosen is None else choice_TJN[from_T]
        state_RH, blocks_RKN = drafter.follow_grid(batch, aux_TA[from_T], choice_TJN, kept_R1)
        buffers.state_RH.copy_(state_RH)
        if blocks_RKN is not None:
            buffers.blocks_RKN.copy_(blocks_RKN)
