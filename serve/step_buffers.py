"""What a device step reads and leaves, in memory whose place never changes: a captured graph knows only addresses.

R sequences, W pages, N nodes, A = taps * target hidden, H draft hidden, J index heads, K heads of the draft.
"""

import itertools
import time
import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from serve.drafter import Drafter
from serve.request import Sequence
from serve.sampling import Row, RowSettings
from serve.step_size import Size
from target_model.batch import MAX_SCRATCH
from target_model.cache import PagedCache

Mark = torch.cuda.Event | float
Sent = tuple[Tensor, Mark]  # a result on its way to this place on the host, and when it is there

# What the host sends for a padded sequence, see `StepBuffers.load`: one decided token, greedy, nothing to draft.
_NOTHING = (0, 0, 0, 0, 1, 0), (0.0, 1.0, 0.0)
# Kept nodes; F tokens, D path, and N tokens, parents and live flags.
_RESULT = 1 + 2 * (MAX_SCRATCH + 1) + 3 * MAX_SCRATCH


@dataclass(frozen=True)
class Launched:
    """A step on its way: how many nodes it is to keep by decree of each sequence ([]: none is decreed), when it begins
    and when its trees have been drafted, where its result arrives, and what the target leaves for a draft that does not
    follow at once.
    """

    size: Size
    buffers: "StepBuffers"
    wanted: list[int]
    begun: Mark
    drafted: Mark
    sent: Sent
    left: tuple[Tensor, Tensor | None] | None


@dataclass(frozen=True)
class Ahead:
    """A step that was begun before its time, of sequences with these pages and so many computed tokens."""

    step: Launched
    places: list[tuple[weakref.ref[Sequence], list[int], int]]

    @staticmethod
    def of(step: Launched, sequences: list[Sequence]) -> "Ahead":
        """Of these sequences as they are now, when all that came before the step has been read."""
        return Ahead(step, [(weakref.ref(sequence), sequence.pages, sequence.computed) for sequence in sequences])

    def rows(self, sequences: list[Sequence]) -> list[int] | None:
        """Which row each sequence has; None unless this is the step that all of them are to make now."""
        places = {id(own()): (r, pages, computed) for r, (own, pages, computed) in enumerate(self.places)}
        rows = []
        for sequence in sequences:
            row, pages, computed = places.get(id(sequence), (0, None, 0))
            if sequence.pages is not pages or sequence.computed != computed:
                return None
            rows.append(row)
        return rows


class StepBuffers:
    """The buffers of one number of sequences and pages, and their copies on the host.

    The host sends the roots, decided tokens, levels that may be drafted, how tokens are chosen, and the block table; a
    draft leaves `token_RN`, `parent_RN` and `live_RN`, a verification its result, the draft's state of the next roots,
    or (without a tree) what the target left.
    """

    def __init__(self, sequences: int, pages: int, cache: PagedCache, drafter: Drafter | None):
        self.device = device = cache.k.device
        self._cuda, self._spare = device.type == "cuda", cache.num_pages - 1

        def pair(*shape: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
            host = torch.zeros(shape, dtype=dtype, pin_memory=self._cuda)
            return host, torch.zeros(shape, dtype=dtype, device=device)

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(sequences, *shape, dtype=dtype, device=device)

        # Rows begin at multiples of 16 bytes: other addresses would be other kernels.
        padded = -(-sequences // 4) * 4
        self._host_integers, self._integers = pair(len(_NOTHING[0]), padded, dtype=torch.int64)
        self._host_floats, self._floats = pair(len(_NOTHING[1]), padded, dtype=torch.float32)
        self.root_R, self.limit_R, *choosing = self._integers[:, :sequences]
        self.wanted_R = zeros()
        self._seed_R, self._choice_R, self.length_R, self._top_k_R = choosing
        self._host_table, self.table_RW = pair(sequences, pages, dtype=torch.int32)
        host_result, self._result = pair(sequences, _RESULT, dtype=torch.int64)
        # Two, since a result may be sent before the one before it has been read.
        self._host_results = host_result, pair(sequences, _RESULT, dtype=torch.int64)[0]
        self._loaded: torch.cuda.Event | None = None  # when the host's copies may be written again
        # Made once, as a step has no time for more: two steps are on their way at most, each with three marks.
        self._marks = itertools.cycle(torch.cuda.Event(enable_timing=True) for _ in range(6))
        # The block tables on the host: whose list each row holds, and how much of it.
        self._written: list[tuple[list[int] | None, int]] = [(None, 0)] * sequences
        self.token_RN, self.parent_RN = zeros(MAX_SCRATCH), zeros(MAX_SCRATCH)
        self.live_RN = zeros(MAX_SCRATCH, dtype=torch.bool)
        self.live_RN[:, 0] = True
        self.state_RH = self.blocks_RKN = self.left_RA = self.choice_RJN = None
        self._before: list[tuple[Tensor, Tensor]] = []  # what a draft's next trees grow from, and what it was
        if drafter is not None:
            config, chosen = drafter.draft.config, drafter.chosen
            self.state_RH = zeros(config.hidden_size, dtype=drafter.draft.dtype)
            self.left_RA = zeros(config.num_aux * config.target_hidden_size, dtype=drafter.draft.dtype)
            if chosen is not None:
                self.blocks_RKN = zeros(chosen.kv_heads, chosen.top_k + 1, dtype=torch.int32)
                self.choice_RJN = zeros(chosen.index_heads, chosen.top_k, dtype=torch.int32)
            self._states = list(self.state_RH)
            roots = [each for each in (self.state_RH, self.blocks_RKN) if each is not None]
            self._before = [(each, torch.empty_like(each)) for each in roots]

    def settings(self) -> RowSettings:
        """How the sequences' tokens are chosen."""
        temperature_R, top_p_R, min_p_R = self._floats[:, : len(self._written)]
        keys = self._seed_R, self._choice_R, self.length_R
        return RowSettings(temperature_R, self._top_k_R.int(), top_p_R, min_p_R, *keys)

    def load(self, sequences: list[Sequence], limits: list[int], *, drafting: bool) -> None:
        """Sends what this step needs to know of its sequences; their roots as well, when it drafts and the last step
        here was of others, or they have been elsewhere since.
        """
        integers, floats = [], []
        for sequence, limit in zip(sequences, limits, strict=True):
            row = Row(sequence, ())
            integers.append((sequence.token_ids[-1], limit, *row.integers))
            floats.append(row.floats)
        padding = self._floats.shape[1] - len(sequences)
        self._wait(self._loaded)
        self._host_integers.copy_(torch.tensor(integers + [_NOTHING[0]] * padding).T)
        self._host_floats.copy_(torch.tensor(floats + [_NOTHING[1]] * padding).T)
        self._integers.copy_(self._host_integers, non_blocking=True)
        self._floats.copy_(self._host_floats, non_blocking=True)
        self.load_table(sequences)
        self._loading()
        if drafting and any(s.root_state is not own for s, own in zip(sequences, self._states, strict=False)):
            self.state_RH[: len(sequences)] = torch.stack([sequence.root_state for sequence in sequences])
            if self.blocks_RKN is not None:
                self.blocks_RKN[: len(sequences)] = torch.stack([sequence.root_blocks for sequence in sequences])

    def load_wanted(self, wanted: list[int]) -> None:
        """Sends how many nodes the next step is to keep by decree."""
        sent = torch.tensor(wanted, pin_memory=self._cuda)
        self.wanted_R[: len(wanted)].copy_(sent, non_blocking=True)

    def load_table(self, sequences: list[Sequence]) -> None:
        """Sends the block tables, where they have changed."""
        self._wait(self._loaded)
        if self._write_table([sequence.pages for sequence in sequences]):
            self.table_RW.copy_(self._host_table, non_blocking=True)
            self._loading()

    def _write_table(self, tables: list[list[int]]) -> bool:
        """Brings the host's copy up to date; whether anything changed. A list of pages only ever grows."""
        changed = False
        for r, (pages, written) in enumerate(self._written):
            table = tables[r] if r < len(tables) else None
            if pages is table and (table is None or written == len(table)) and (table is not None or written):
                continue
            changed = True
            if table is None:
                self._host_table[r] = self._spare
                self._written[r] = (None, 1)
            else:
                first = written if pages is table else 0
                self._host_table[r, first : len(table)] = torch.tensor(table[first:], dtype=torch.int32)
                self._written[r] = (table, len(table))
        return changed

    def plant(self, token_RK: Tensor, parent_RK: Tensor, live_RK: Tensor) -> None:
        """Keeps the trees, as `Drafter.nodes` describes them."""
        nodes = slice(1, 1 + token_RK.shape[1])
        self.token_RN[:, 0] = self.root_R
        self.token_RN[:, nodes], self.parent_RN[:, nodes], self.live_RN[:, nodes] = token_RK, parent_RK, live_RK

    def leave(self, aux_RA: Tensor, choice_RJN: Tensor | None) -> None:
        """Keeps what the target left of a step without a tree."""
        self.left_RA.copy_(aux_RA)
        if choice_RJN is not None:
            self.choice_RJN.copy_(choice_RJN)

    def remember(self) -> None:
        """Keeps what the trees of this step grew from, for `take_back`."""
        for now, before in self._before:
            before.copy_(now)

    def take_back(self) -> None:
        """The last step does not count: the next trees grow from where its own did."""
        for now, before in self._before:
            now.copy_(before)

    def left(self) -> tuple[Tensor, Tensor | None]:
        """What the target left of a step without a tree, in memory of its own."""
        return self.left_RA.clone(), None if self.choice_RJN is None else self.choice_RJN.clone()

    def keep(self, parts: list[Tensor]) -> None:
        """Keeps the result, [R, columns] each."""
        result = torch.cat(parts, 1)
        self._result[:, : result.shape[1]] = result

    def advance(self, root_R: Tensor, tokens_R: Tensor) -> None:
        """So many tokens have been decided, this one the last: the next step may begin before the host knows."""
        self.root_R.copy_(root_R)
        self.length_R.add_(tokens_R)
        self.limit_R.sub_(tokens_R)

    def send_result(self) -> Sent:
        """Starts the way of the result to the host."""
        self._host_results = self._host_results[::-1]
        self._host_results[0].copy_(self._result, non_blocking=True)
        return self._host_results[0], self.mark()

    def result(self, sent: Sent) -> list[list[int]]:
        """Waits for it; row by row."""
        self._wait(sent[1])
        return sent[0].tolist()

    def _loading(self) -> None:
        if self._cuda:
            self._loaded = torch.cuda.Event()
            self._loaded.record()

    def _wait(self, mark: Mark | None) -> None:
        if isinstance(mark, torch.cuda.Event):
            mark.synchronize()

    def hand_over(self, sequences: list[Sequence], rows: list[int]) -> None:
        """The draft has followed: the next tree of sequence r grows from what lies in row rows[r]."""
        for sequence, row in zip(sequences, rows, strict=True):
            sequence.root_state = self._states[row]
            sequence.root_blocks = None if self.blocks_RKN is None else self.blocks_RKN[row]
            sequence.draft_end = sequence.computed + 1

    def mark(self) -> Mark:
        """A point in the device's time."""
        if not self._cuda:
            return time.perf_counter()
        event = next(self._marks)
        event.record()
        return event

    @staticmethod
    def between(begin: Mark, end: Mark) -> float:
        """Seconds, of marks that have been passed."""
        if begin is end:
            return 0.0
        return end - begin if isinstance(begin, float) else begin.elapsed_time(end) / 1000
