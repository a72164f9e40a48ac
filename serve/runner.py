"""One step on the models: prefill chunks, or draft, verify and commit one tree per sequence. It owns the cache, not the
schedule.
"""

import time
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from draft_model.chosen_blocks import run_target
from serve.device_step import DeviceStep
from serve.drafter import Drafter
from serve.graph_pool import GraphPool
from serve.image_rows import ImageRows
from serve.noise import gumbel, uniform, upcoming
from serve.padded_passes import ROWS, Chunk, TargetPasses, causal
from serve.request import Sequence, TokenLogprob
from serve.sampling import Row, choose, choose_by_rejection
from serve.synthetic import SyntheticAcceptance
from serve.tree import Tree, TreeConfig
from target_model.batch import Batch
from target_model.cache import PagedCache
from target_model.kernels import ops
from target_model.model import TargetModel, TargetOutput

PLAIN_STEPS = 128  # without drafts, before the draft follows all the same
PROMPT_ROWS = 64  # whose logits are in memory at once


@dataclass(frozen=True)
class Outcome:
    """What a step decided for one sequence.

    tokens: newly decided ids, at least one. depths: depth in the tree each was guessed at, 0 for the target's own
    token. tree, path: what was verified, and its accepted nodes; None when the token comes from prefill. seconds: this
    sequence's share of drafting and of verifying.
    """

    tokens: list[int]
    depths: list[int]
    logprobs: list[TokenLogprob] | None
    tree: Tree | None = None
    path: list[int] | None = None
    seconds: tuple[float, float] = (0.0, 0.0)


@dataclass
class Clock:
    """Seconds spent, by part of the step."""

    prefill: float = 0.0
    draft: float = 0.0
    verify: float = 0.0


class Runner:
    """Runs the target, and the draft when there is one, over the shared cache.

    `rejection` replaces the noise that target and draft share (the default) by rejection sampling. `synthetic` decides
    what is accepted instead of the target: for benchmarks only. `device_step`: steps stay on the device where the
    requests allow it; the last page of the cache must then belong to nobody.
    """

    def __init__(
        self,
        target: TargetModel,
        drafter: Drafter | None,
        cache: PagedCache,
        *,
        rejection: bool = False,
        synthetic: SyntheticAcceptance | None = None,
        device_step: bool = False,
    ):
        self.target, self.drafter, self.cache = target, drafter, cache
        self.rejection, self.synthetic = rejection, synthetic
        self.taps = drafter.draft.config.taps if drafter else ()
        self.device = cache.k.device
        self.image_rows = ImageRows(target.vision) if target.vision is not None else None
        self.clock = Clock()
        self.device_step = self.prompt_passes = None
        if device_step:
            # The references of the kernels wait for the device, which a graph cannot.
            pool = GraphPool() if self.device.type == "cuda" and ops.override != "reference" else None
            self.device_step = DeviceStep(target, drafter, cache, pool=pool, synthetic=synthetic)
            self.prompt_passes = TargetPasses(target, cache, self.taps, drafter and drafter.chosen, pool)
            if drafter:
                drafter.stay_on_device(pool)

    @torch.inference_mode()
    def prefill(self, chunks: list[tuple[Sequence, int]]) -> list[Outcome | None]:
        """Computes the next `count` tokens of each sequence; an outcome where that ends a fresh prompt, else None."""
        started = time.perf_counter()
        output, choice_TJN = self._read(chunks)
        self._report_prompts(output.final_state, chunks)
        outcomes: list[Outcome | None] = [None] * len(chunks)
        complete, last_rows, row = [], [], 0
        for index, (sequence, count) in enumerate(chunks):
            if self.drafter:
                if sequence.computed == sequence.draft_end:
                    self.drafter.resume(sequence)
                self._hear(sequence, output, choice_TJN, slice(row, row + count))
            sequence.computed += count
            row += count
            if sequence.computed == len(sequence.token_ids):
                complete.append(index)
                last_rows.append(row - 1)
        if complete:
            logits = self.target.logits(output.final_state[last_rows])
            rows = [Row(chunks[index][0], ()) for index in complete]
            chosen_N = choose(logits, rows, self._eos)
        if self.drafter:  # before the host waits for what has been chosen
            self.drafter.follow([sequence for sequence, _ in chunks])
        if complete:
            choices = chosen_N.tolist()
            reported = self._logprobs(logits, rows, choices)
            for index, token, logprob in zip(complete, choices, reported, strict=True):
                outcomes[index] = Outcome([token], [0], None if logprob is None else [logprob])
        self.clock.prefill += time.perf_counter() - started
        return outcomes

    @torch.inference_mode()
    def decode(
        self, sequences: list[Sequence], limits: list[int], shape: TreeConfig, *, lasting: bool = True
    ) -> list[Outcome]:
        """One verify step of trees of this shape, at most `limits[r]` levels deep below the root of sequence r. Not
        `lasting`: the next one is known to be of other sequences, too.
        """
        if self.device_step is not None:
            if self.device_step.takes(sequences):
                return self._decode_on_device(sequences, limits, shape, lasting=lasting)
            self.device_step.give_up_ahead()
        started = time.perf_counter()
        depth = min(shape.depth, max(limits)) if shape.nodes > 1 else 0
        if depth:
            noise_RDV = None if self.rejection else self._noise(sequences, depth)
            trees = self.drafter.propose(sequences, limits, noise_RDV, shape)
        else:
            trees = [Tree([sequence.token_ids[-1]], [-1]) for sequence in sequences]
        drafted = time.perf_counter()
        outcomes, paths, output, choice_TJN = self._verify(sequences, trees)
        verified = time.perf_counter()
        if self.drafter:
            first = 0
            for sequence, tree, path in zip(sequences, trees, paths, strict=True):
                rows = [first, *(first + node for node in path)]
                self._hear(sequence, output, choice_TJN, rows)
                first += len(tree)
            self._catch_up(sequences)
        self.clock.draft += drafted - started
        self.clock.verify += verified - drafted
        share = (drafted - started) / len(sequences), (verified - drafted) / len(sequences)
        return [replace(outcome, seconds=share) for outcome in outcomes]

    def _decode_on_device(
        self, sequences: list[Sequence], limits: list[int], shape: TreeConfig, *, lasting: bool
    ) -> list[Outcome]:
        decided = self.device_step.run(sequences, limits, shape, lasting=lasting)
        if self.drafter:
            self._catch_up(sequences)
        drafted, verified = self.device_step.seconds
        self.clock.draft += drafted
        self.clock.verify += verified
        share = drafted / len(sequences), verified / len(sequences)
        return [
            Outcome(each.tokens, [*range(1, len(each.path) + 1), 0], None, each.tree, each.path, share)
            for each in decided
        ]

    def _catch_up(self, sequences: list[Sequence]) -> None:
        """Without drafts nobody needs the draft's rows yet: they are computed together now and then, of as many
        sequences at a time as one graph holds, and so early that all have had their turn in time.
        """
        together = ROWS[-1] // PLAIN_STEPS
        early = PLAIN_STEPS - len(sequences) // together
        waiting = [sequence for sequence in sequences if len(sequence.taps) >= early]
        waiting.sort(key=lambda sequence: -len(sequence.taps))
        self.drafter.follow(waiting[:together])

    def _verify(
        self, sequences: list[Sequence], trees: list[Tree]
    ) -> tuple[list[Outcome], list[list[int]], TargetOutput, Tensor | None]:
        """The target scores all nodes in one pass; the accepted nodes' keys move up behind the root. What is decided,
        the accepted nodes, and what the target left.
        """
        batch = self._tree_batch(sequences, trees)
        output, choice_TJN = self._run_target(batch)
        logits_TV = self.target.logits(output.final_state)
        rows = [Row(sequence, path) for sequence, tree in zip(sequences, trees, strict=True) for path in tree.paths()]
        if self.rejection and any(not sequence.params.greedy for sequence in sequences):
            choices = self._choose_by_rejection(logits_TV, rows, trees)
        else:
            choices = choose(logits_TV, rows, self._eos).tolist()
        outcomes, paths, first = [], [], 0
        for sequence, tree in zip(sequences, trees, strict=True):
            chosen = choices[first : first + len(tree)]
            path = tree.accept(chosen) if self.synthetic is None else self.synthetic.path(tree)
            tokens = [tree.tokens[node] for node in path] + [chosen[path[-1] if path else 0]]
            visited = [first, *(first + node for node in path)]
            logprobs = None
            if sequence.params.logprobs is not None:
                logprobs = self._logprobs(logits_TV[visited], [rows[row] for row in visited], tokens)
            outcomes.append(Outcome(tokens, [*range(1, len(path) + 1), 0], logprobs, tree, path))
            paths.append(path)
            sequence.computed += len(tokens)
            first += len(tree)
        longest = max(len(path) for path in paths)
        if longest:
            padded = [path + [-1] * (longest - len(path)) for path in paths]
            self.cache.commit(batch, torch.tensor(padded, device=self.device))
        return outcomes, paths, output, choice_TJN

    def _read(self, chunks: list[tuple[Sequence, int]]) -> tuple[TargetOutput, Tensor | None]:
        """The target's pass over the next `count` tokens of each sequence."""
        parts = [Chunk(s.token_ids[s.computed : s.computed + count], s.computed, s.pages) for s, count in chunks]
        if self.prompt_passes and not any(sequence.request.images for sequence, _ in chunks):
            output = self.prompt_passes.run(parts)
            if output is not None:
                return output
        batch = causal(parts, self.cache.page_size, self.device)
        if self.image_rows is not None:
            batch = self.image_rows.place(batch, chunks)
        return self._run_target(batch)

    def _hear(
        self, sequence: Sequence, output: TargetOutput, choice_TJN: Tensor | None, rows: slice | list[int]
    ) -> None:
        self.drafter.hear(sequence, output.aux[rows], None if choice_TJN is None else choice_TJN[rows])

    def _run_target(self, batch: Batch) -> tuple[TargetOutput, Tensor | None]:
        return run_target(self.target, batch, self.cache, self.taps, self.drafter.chosen if self.drafter else None)

    def _tree_batch(self, sequences: list[Sequence], trees: list[Tree]) -> Batch:
        tokens, starts = [tree.tokens for tree in trees], [sequence.computed for sequence in sequences]
        tables = [sequence.pages for sequence in sequences]
        if max(len(tree) for tree in trees) == 1:
            return Batch.causal(self.cache.page_size, self.device, tokens, starts, tables)
        depths, ancestors = [tree.depths() for tree in trees], [tree.ancestors() for tree in trees]
        return Batch.tree(self.cache.page_size, self.device, tokens, starts, tables, depths, ancestors)

    def _noise(self, sequences: list[Sequence], levels: int) -> Tensor | None:
        """Noise of the next `levels` tokens of each sequence, [R, levels, V]: 0 for greedy ones, None if all are."""
        sampled = [index for index, sequence in enumerate(sequences) if not sequence.params.greedy]
        if not sampled:
            return None
        vocab = self.target.config.vocab_size
        streams = [sequences[index].noise for index in sampled]
        positions = [len(sequences[index].token_ids) for index in sampled]
        drawn = upcoming(streams, positions, levels, vocab, self.device)
        if len(sampled) == len(sequences):
            return drawn
        noise_RDV = torch.zeros(len(sequences), levels, vocab, device=self.device)
        noise_RDV[sampled] = drawn
        return noise_RDV

    def _choose_by_rejection(self, logits_NV: Tensor, rows: list[Row], trees: list[Tree]) -> list[int]:
        candidates = [tokens for tree in trees for tokens in tree.candidates()]
        width = max(1, *map(len, candidates))
        keys = [(row.sequence.seed, row.sequence.request.choice_index, row.position) for row in rows]
        keys = list(zip(*keys, strict=True))
        noise_NV = gumbel(*keys, logits_NV.shape[1], self.device)
        drawn_NW = uniform(*keys, width, self.device)
        candidate_NW = torch.tensor([tokens + [-1] * (width - len(tokens)) for tokens in candidates]).to(self.device)
        return choose_by_rejection(logits_NV, rows, noise_NV, self._eos, candidate_NW, drawn_NW).tolist()

    def _report_prompts(self, state_TH: Tensor, chunks: list[tuple[Sequence, int]]) -> None:
        """Notes what the target thought of the prompt tokens behind these rows, where that is asked for."""
        first = 0
        for sequence, count in chunks:
            # After a preemption the first ones are known already.
            known, end = len(sequence.prompt_logprobs), min(sequence.computed + count, sequence.prompt_length - 1)
            start = max(sequence.computed, known)
            for begin in range(start, end, PROMPT_ROWS) if sequence.params.prompt_logprobs else ():
                positions = range(begin, min(begin + PROMPT_ROWS, end))
                offset = first - sequence.computed
                logits = self.target.logits(state_TH[positions.start + offset : positions.stop + offset])
                tokens = sequence.token_ids[positions.start + 1 : positions.stop + 1]
                rows = [Row(sequence, ())] * len(tokens)
                sequence.prompt_logprobs += self._logprobs(logits, rows, tokens)
            first += count

    def _logprobs(self, logits_NV: Tensor, rows: list[Row], tokens: list[int]) -> list[TokenLogprob | None]:
        """The model's own log-probabilities, before bias and filters, where the request asks for them."""
        reported: list[TokenLogprob | None] = []
        for logits_V, row, token in zip(logits_NV, rows, tokens, strict=True):
            wanted = row.sequence.params.logprobs
            if wanted is None:
                reported.append(None)
                continue
            logprobs_V = logits_V.log_softmax(-1)
            top = logprobs_V.topk(min(wanted, len(logprobs_V)))
            pairs = tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True))
            reported.append(TokenLogprob(token, logprobs_V[token].item(), pairs))
        return reported

    @property
    def _eos(self) -> tuple[int, ...]:
        return self.target.config.eos_token_ids
