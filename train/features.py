"""What the draft learns from: the frozen target's taps and final states beside the tokens they belong to.

`Features` is the seam of training: nothing behind it knows where they came from. N training rows in all, R of them in a
batch, S tokens in a row, A width of the concatenated taps, H target hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from target_model.model import TargetModel
from train.data import TrainingRows, valid_steps


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
    """

    token_ids: Tensor
    documents: Tensor
    positions: Tensor
    valid_steps: Tensor
    aux: Tensor
    final_state: Tensor
    packed: bool


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
    ):
        self.target, self.rows, self.taps = target, rows, tuple(taps)
        self.capture_rows = capture_rows
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
            final, aux = self._capture(partial.token_ids, documents)
            return replace(partial, aux=aux, final_state=final)
        self._fill_cache([int(i) for i in indices if int(i) not in self._cache])
        stored = [self._cache[int(i)] for i in indices]
        final, aux = (pad_rows([entry[part] for entry in stored], width).to(self.device) for part in (0, 1))
        return replace(partial, aux=aux, final_state=final)

    def micro_batches(self, parts: list[list[np.ndarray]], rank: int) -> list[Features]:
        """The micro batches of `rank`, of the rows `parts` [ranks][micro batches] of an optimizer step."""
        return [self.features(rows) for rows in parts[rank]]

    def text(self, token_ids_RS: Tensor) -> tuple[Tensor, Tensor]:
        """Final states [R, S, H] and taps [R, S, A] of any text."""
        return self.target.capture(token_ids_RS, self.taps)

    def _fill_cache(self, missing: list[int]) -> None:
        for start in range(0, len(missing), self.capture_rows):
            group = np.array(missing[start : start + self.capture_rows])
            width = int(self._lengths[group].max())
            token_ids = torch.from_numpy(self.rows.token_ids[group, :width].astype(np.int64)).to(self.device)
            final, aux = self._capture(token_ids, self.rows.documents[group, :width])
            for i, row in enumerate(group):
                length = self._lengths[row]
                self._cache[int(row)] = (final[i, :length].cpu().clone(), aux[i, :length].cpu().clone())

    def _capture(self, token_ids_RS: Tensor, documents: np.ndarray) -> tuple[Tensor, Tensor]:
        """(final state [R, S, H], aux [R, S, A]); every document is seen alone and from position 0."""
        parts = []
        for start in range(0, len(token_ids_RS), self.capture_rows):
            piece = slice(start, start + self.capture_rows)
            capture = capture_packed if documents[piece].max() > 1 else capture_unpacked
            parts.append(capture(self.target, token_ids_RS[piece], documents[piece], self.taps))
        final, aux = zip(*parts, strict=True)
        return (final[0], aux[0]) if len(parts) == 1 else (torch.cat(final), torch.cat(aux))


def capture_unpacked(
    target: TargetModel, token_ids_RS: Tensor, documents: np.ndarray, taps: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """Rows that hold one document from their start on: right padding cannot reach back through causal attention."""
    return target.capture(token_ids_RS, taps)


def capture_packed(
    target: TargetModel, token_ids_RS: Tensor, documents: np.ndarray, taps: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """Takes the documents out of their rows, captures those of similar length together and puts the results back.

    Results at padding are zero.
    """
    width = documents.shape[1]
    pieces = _document_slices(documents)
    pieces.sort(key=lambda piece: piece[1])
    flat_ids = token_ids_RS.flatten()
    final = aux = None
    for group in _similar_lengths(pieces):
        longest = group[-1][1]
        starts = np.array([start for start, _ in group])[:, None]
        inside = np.arange(longest) < np.array([length for _, length in group])[:, None]
        index = torch.from_numpy(np.where(inside, starts + np.arange(longest), 0)).to(flat_ids.device)
        states, taps_out = target.capture(flat_ids[index], taps)
        if final is None:
            final = states.new_zeros(flat_ids.numel(), states.shape[-1])
            aux = taps_out.new_zeros(flat_ids.numel(), taps_out.shape[-1])
        kept = torch.from_numpy(inside).to(flat_ids.device)
        final[index[kept]] = states[kept]
        aux[index[kept]] = taps_out[kept]
    return final.unflatten(0, (-1, width)), aux.unflatten(0, (-1, width))


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
