"""What the draft learns from: the frozen target's taps and final states beside the tokens they belong to.

`Features` is the seam of training: nothing behind it knows where they came from. N training rows in all, R of them in a
batch, S tokens in a row, A width of the concatenated taps, H target hidden size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from draft_model.chosen_blocks import ChosenBlocks
from target_model.model import TargetModel
from train.data import TrainingRows, valid_steps

# Per token of rows int64 [R, S], all from position 0: [R, S, ...] each.
CaptureRows = Callable[[Tensor], tuple[Tensor, ...]]


@dataclass(frozen=True)
class DraftBlocks:
    """The blocks, of `size` tokens, that the queries of a row attend to by kv head of the draft: int32 [R, S, K, N], -1
    behind the last.
    """

    lists: Tensor
    size: int


@dataclass(frozen=True)
class Features:
    """A batch of training rows.

    token_ids    int64 [R, S]
    documents    int64 [R, S]  number of the document in its row, from 1; 0 is padding
    positions    int64 [R, S]  position in the document, as the target saw it
    valid_steps  int64 [R, S]  TTT steps k = 0, 1, ... of the row that count
    aux          [R, S, A]     residual stream entering each tap layer, concatenated in the order of the taps
    final_state  [R, S, H]     after the target's final norm: its output head applies directly
    packed       whether any row holds more than one document
    blocks       what a sparse draft attends to; None: everything
    """

    token_ids: Tensor
    documents: Tensor
    positions: Tensor
    valid_steps: Tensor
    aux: Tensor
    final_state: Tensor
    packed: bool
    blocks: DraftBlocks | None = None


def document_positions(documents: np.ndarray) -> np.ndarray:
    """Position of every token in its document: int32 [.., S]. Padding counts as one more document."""
    index = np.arange(documents.shape[-1], dtype=np.int32)
    first = np.ones(documents.shape, bool)
    first[..., 1:] = documents[..., 1:] != documents[..., :-1]
    return index - np.maximum.accumulate(np.where(first, index, 0), axis=-1)


def row_features(rows: TrainingRows, valid: np.ndarray, indices: np.ndarray, device: torch.device) -> Features:
    """The rows `indices`, cut to the longest of them, still without taps and states; `valid`: valid steps [N, S]."""
    documents = rows.documents[indices]
    width = int((documents > 0).sum(-1).max())
    documents = documents[:, :width]

    def tensor(values: np.ndarray) -> Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(device, non_blocking=True)

    return Features(
        token_ids=tensor(rows.token_ids[indices, :width]),
        documents=tensor(documents),
        positions=tensor(document_positions(documents)),
        valid_steps=tensor(valid[indices, :width]),
        aux=torch.empty(0),
        final_state=torch.empty(0),
        packed=bool(documents.max() > 1),
    )


class OnlineCapture:
    """Runs the frozen target in this process and hands out its features.

    With `cache` the taps and final states of every row are kept in host memory after the first time, so that several
    epochs over a small data set cost one pass of the target.
    """

    def __init__(
        self,
        target: TargetModel,
        rows: TrainingRows,
        taps: Sequence[int],
        steps: int,
        *,
        capture_rows: int = 16,
        cache: bool = False,
        chosen: ChosenBlocks | None = None,
    ):
        """With `chosen` the features say which blocks a sparse draft attends to; it excludes `cache`."""
        self.target, self.rows, self.taps = target, rows, tuple(taps)
        self.capture_rows, self.chosen = capture_rows, chosen
        self.valid_steps = valid_steps(rows.documents, rows.spans, steps)
        self._cache: dict[int, tuple[Tensor, Tensor]] | None = {} if cache else None
        self._lengths = (rows.documents > 0).sum(-1)
        self.device = target.device

    def features(self, indices: np.ndarray) -> Features:
        """The rows `indices`, cut to the longest of them."""
        partial = row_features(self.rows, self.valid_steps, indices, self.device)
        width = partial.token_ids.shape[1]
        documents = self.rows.documents[indices, :width]
        if self._cache is None:
            final, aux, *choice = self._capture(partial.token_ids, documents)
            blocks = self._blocks(choice[0], partial.positions) if choice else None
            return replace(partial, aux=aux, final_state=final, blocks=blocks)
        self._fill_cache([int(i) for i in indices if int(i) not in self._cache])
        stored = [self._cache[int(i)] for i in indices]
        final, aux = (pad_rows([entry[part] for entry in stored], width).to(self.device) for part in (0, 1))
        return replace(partial, aux=aux, final_state=final)

    def micro_batches(self, parts: list[list[np.ndarray]], rank: int) -> list[Features]:
        """The micro batches of `rank`, of the rows `parts` [ranks][micro batches] of an optimizer step."""
        return [self.features(rows) for rows in parts[rank]]

    def text(self, token_ids_1S: Tensor) -> tuple[Tensor, Tensor, DraftBlocks | None]:
        """Final states [1, S, H], taps [1, S, A] and blocks of any text."""
        final, aux, *choice = self._run(token_ids_1S)
        positions = torch.arange(token_ids_1S.shape[1], device=self.device)[None]
        return final, aux, self._blocks(choice[0], positions) if choice else None

    def _run(self, token_ids_RS: Tensor) -> tuple[Tensor, ...]:
        """Final states, taps and, for a sparse draft, the target's choice, int32 [R, S, J, N]."""
        if self.chosen is None:
            return self.target.capture(token_ids_RS, self.taps)
        recorder = self.chosen.recorder()
        captured = self.target.capture(token_ids_RS, self.taps, recorder)
        count, length = token_ids_RS.shape
        positions_T = torch.arange(length, device=self.device).repeat(count)
        return *captured, self.chosen.recorded(recorder, positions_T).unflatten(0, (count, length))

    def _blocks(self, choice_RSJN: Tensor, positions_RS: Tensor) -> DraftBlocks:
        """Row p goes by the choice made at p, and by the block that the token it reads lies in, as when served."""
        lists = self.chosen.lists(choice_RSJN.flatten(0, 1), positions_RS.flatten() + 1)
        return DraftBlocks(lists.unflatten(0, positions_RS.shape), self.chosen.block_size)

    def _fill_cache(self, missing: list[int]) -> None:
        for start in range(0, len(missing), self.capture_rows):
            group = np.array(missing[start : start + self.capture_rows])
            width = int(self._lengths[group].max())
            token_ids = torch.from_numpy(self.rows.token_ids[group, :width].astype(np.int64)).to(self.device)
            final, aux = self._capture(token_ids, self.rows.documents[group, :width])
            for i, row in enumerate(group):
                length = self._lengths[row]
                self._cache[int(row)] = (final[i, :length].cpu().clone(), aux[i, :length].cpu().clone())

    def _capture(self, token_ids_RS: Tensor, documents: np.ndarray) -> tuple[Tensor, ...]:
        """As `_run`; every document is seen alone and from position 0."""
        parts = []
        for start in range(0, len(token_ids_RS), self.capture_rows):
            piece = slice(start, start + self.capture_rows)
            capture = capture_packed if documents[piece].max() > 1 else capture_unpacked
            parts.append(capture(self._run, token_ids_RS[piece], documents[piece]))
        return parts[0] if len(parts) == 1 else tuple(torch.cat(each) for each in zip(*parts, strict=True))


def capture_unpacked(run: CaptureRows, token_ids_RS: Tensor, documents: np.ndarray) -> tuple[Tensor, ...]:
    """Rows that hold one document from their start on: right padding cannot reach back through causal attention."""
    return run(token_ids_RS)


def capture_packed(run: CaptureRows, token_ids_RS: Tensor, documents: np.ndarray) -> tuple[Tensor, ...]:
    """Takes the documents out of their rows, captures those of similar length together and puts the results back.

    Results at padding are zero.
    """
    width = documents.shape[1]
    pieces = _document_slices(documents)
    pieces.sort(key=lambda piece: piece[1])
    flat_ids = token_ids_RS.flatten()
    placed: list[Tensor] = []
    for group in _similar_lengths(pieces):
        longest = group[-1][1]
        starts = np.array([start for start, _ in group])[:, None]
        inside = np.arange(longest) < np.array([length for _, length in group])[:, None]
        index = torch.from_numpy(np.where(inside, starts + np.arange(longest), 0)).to(flat_ids.device)
        captured = run(flat_ids[index])
        placed = placed or [part.new_zeros(flat_ids.numel(), *part.shape[2:]) for part in captured]
        kept = torch.from_numpy(inside).to(flat_ids.device)
        for whole, part in zip(placed, captured, strict=True):
            whole[index[kept]] = part[kept]
    return tuple(whole.unflatten(0, (-1, width)) for whole in placed)


def _document_slices(documents: np.ndarray) -> list[tuple[int, int]]:
    """(start in the flattened rows, length) of every document."""
    positions = document_positions(documents).ravel()
    starts = np.flatnonzero(positions == 0)
    lengths = np.diff(np.append(starts, positions.size))
    real = documents.ravel()[starts] > 0
    return list(zip(starts[real].tolist(), lengths[real].tolist(), strict=True))


def _similar_lengths(pieces: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Groups of the pieces, sorted by length, in which the longest is at most twice the shortest."""
    groups: list[list[tuple[int, int]]] = []
    for piece in pieces:
        if not groups or piece[1] > 2 * groups[-1][0][1]:
            groups.append([])
        groups[-1].append(piece)
    return groups


def pad_rows(rows: Sequence[Tensor], width: int) -> Tensor:
    """Stacks [length, C] tensors into [R, width, C], zero behind each row's end."""
    out = rows[0].new_zeros(len(rows), width, rows[0].shape[-1])
    for i, row in enumerate(rows):
        out[i, : len(row)] = row
    return out
