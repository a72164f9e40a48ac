"""What any tree would have accepted, worked out from a recorded run without the models.

A tree that grows as the server's (dynamic) is grown again inside the recorded one. A static tree only needs the rank of
the target's token at every depth. Both are exact where the recorded tree holds what they need; of a dynamic tree
`missing` says how much it did not.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from serve.request import StepRecord
from serve.tree import TreeConfig
from spec.bench.recording import Recording, Text
from spec.bench.statistics import Acceptance, measure
from target_model.errors import UserError


@dataclass(frozen=True)
class Replayed:
    """At every recorded position: tokens that a step from there would accept, and nodes it would draft, int [n]. Of a
    static tree these include nodes that top-k and top-p of the request would leave out.

    missing: share of the nodes to be expanded that the recorded tree had not expanded.
    """

    accepted: np.ndarray
    drafted: np.ndarray
    missing: float = 0.0


def replay(recording: Recording, shape: TreeConfig) -> Replayed:
    """Raises UserError for a shape that the recorded tree cannot hold."""
    ranks = max(map(max, shape.paths)) + 1 if shape.paths else shape.width
    if shape.depth > recording.depth or ranks > recording.width:
        raise UserError(
            f"a {shape} needs depth {shape.depth} and width {ranks}, but depth {recording.depth} and width "
            f"{recording.width} were recorded"
        )
    return _static(recording, shape) if shape.paths else _dynamic(recording, shape)


def acceptance(recording: Recording, shape: TreeConfig, texts: Sequence[bool] | None = None) -> Acceptance:
    """What serving the recorded texts (or the chosen ones) with this shape would have measured."""
    return walk(recording, replay(recording, shape), shape.depth, texts)


def walk(recording: Recording, replayed: Replayed, depth: int, texts: Sequence[bool] | None = None) -> Acceptance:
    """Goes through the texts step by step: a step decides the accepted tokens and one more."""
    steps, first = [], 0
    for index, text in enumerate(recording.texts):
        if texts is None or texts[index]:
            steps += _steps(text, replayed, first)
        first += text.positions
    return measure(steps, depth)


def _steps(text: Text, replayed: Replayed, first: int) -> list[StepRecord]:
    steps, place = [], 0
    while place < text.positions:
        accepted, left = int(replayed.accepted[first + place]), text.positions - place
        emitted = min(accepted + 1, left)
        steps.append(StepRecord(int(replayed.drafted[first + place]), min(accepted, emitted), emitted))
        place += emitted
    return steps


def _static(recording: Recording, shape: TreeConfig) -> Replayed:
    codes = _codes(recording.rank, recording.width)[:, : shape.depth]
    depths = range(1, shape.depth + 1)
    wanted = {depth: [_code(p, recording.width) for p in shape.paths if len(p) == depth] for depth in depths}
    inside = np.stack([np.isin(codes[:, d - 1], wanted[d]) for d in depths], 1)
    # A tree is as deep as the answer allows: what may not be drafted has no score.
    allowed = np.stack([np.isfinite(recording.score[:, recording.level(d)]).any(1) for d in depths], 1)
    counts = np.array([len(wanted[depth]) for depth in depths])
    return Replayed((inside & allowed).cumprod(1).sum(1), allowed @ counts)


def _codes(rank: np.ndarray, width: int) -> np.ndarray:
    """int64 [n, D]: one number for each path of ranks, -1 from the first token on that is not among the candidates."""
    codes, known = np.zeros(len(rank), np.int64), np.ones(len(rank), bool)
    columns = []
    for depth in range(rank.shape[1]):
        known &= rank[:, depth] >= 0
        codes = codes * width + rank[:, depth]
        columns.append(np.where(known, codes, -1))
    return np.stack(columns, 1)


def _code(path: tuple[int, ...], width: int) -> int:
    code = 0
    for rank in path:
        code = code * width + rank
    return code


def _dynamic(recording: Recording, shape: TreeConfig) -> Replayed:
    count, wide, narrow = len(recording.rank), recording.width, shape.width
    active = np.ones((count, 1), bool)  # which of the recorded run's expanded nodes this tree expands too
    pools, places = [], []  # candidates' scores, and the place of the target's token among them
    on_path = np.zeros(count, np.int64)  # which expanded node is on the target's path, -1: none
    wanted = found = 0
    for depth in range(1, shape.depth + 1):
        score = recording.score[:, recording.level(depth)].reshape(count, -1, wide)
        score = np.where(active[:, :, None] & (np.arange(wide) < narrow), score, -np.inf)
        pool = score.reshape(count, -1)
        rank = recording.rank[:, depth - 1].astype(np.int64)
        place = np.where((rank >= 0) & (on_path >= 0), on_path * wide + rank, -1)
        pools.append(pool)
        places.append(place)
        if depth < shape.depth:
            beam = np.argpartition(-pool, min(narrow, pool.shape[1]) - 1, axis=1)[:, :narrow]
            chosen = np.zeros(pool.shape, bool)
            np.put_along_axis(chosen, beam, np.take_along_axis(pool, beam, 1) > -np.inf, 1)
            kept = recording.expanded[:, depth - 1].astype(np.int64)
            active = np.take_along_axis(chosen, np.maximum(kept, 0), 1) & (kept >= 0)
            wanted, found = wanted + chosen.sum(), found + active.sum()
            match = (kept == place[:, None]) & (place[:, None] >= 0)
            on_path = np.where(match.any(1), match.argmax(1), -1)
    drafted, accepted = _select(pools, places, shape.nodes - 1)
    return Replayed(accepted, drafted, float(1 - found / wanted) if wanted else 0.0)


def _select(pools: list[np.ndarray], places: list[np.ndarray], budget: int) -> tuple[np.ndarray, np.ndarray]:
    """Nodes of the best `budget`, and how many tokens of the target's path are among them, each int [n]."""
    everything, first = np.concatenate(pools, 1), 0
    alive = np.ones(len(everything), bool)
    accepted = np.zeros(len(everything), np.int64)
    index = np.arange(everything.shape[1])
    for pool, place in zip(pools, places, strict=True):
        own = np.take_along_axis(pool, np.maximum(place, 0)[:, None], 1)
        # Ties go to the earlier candidate.
        before = (everything > own) | ((everything == own) & (index < (first + place)[:, None]))
        alive &= (place >= 0) & (own[:, 0] > -np.inf) & (before.sum(1) < budget)
        accepted += alive
        first += pool.shape[1]
    return np.minimum((everything > -np.inf).sum(1), budget), accepted


def best_static_tree(recording: Recording, nodes: int, depth: int) -> TreeConfig:
    """The static tree of at most `nodes` nodes (the root counted) that accepts most from all recorded positions: the
    paths that the target took most often. A path never occurs more often than its parent, so parents come along.
    """
    codes = _codes(recording.rank, recording.width)
    frequent: list[tuple[int, int, tuple[int, ...]]] = []
    for level in range(1, min(depth, recording.depth) + 1):
        values, counts = np.unique(codes[:, level - 1], return_counts=True)
        frequent += [
            (-int(count), level, _path(int(value), level, recording.width))
            for value, count in zip(values, counts, strict=True)
            if value >= 0
        ]
    chosen: list[tuple[int, ...]] = []
    for _, _, path in sorted(frequent):
        if len(chosen) == nodes - 1:
            break
        if (len(path) == 1 or path[:-1] in chosen) and _fits([*chosen, path]):
            chosen.append(path)
    return TreeConfig.static(chosen or [(0,)])


def _path(code: int, depth: int, width: int) -> tuple[int, ...]:
    return tuple(code // width**place % width for place in reversed(range(depth)))


def _fits(paths: list[tuple[int, ...]]) -> bool:
    try:
        TreeConfig.static(paths)
    except UserError:
        return False
    return True


def oracle(recording: Recording, width: int, depth: int) -> Replayed:
    """A chain that always knows which of the draft's `width` best tokens to follow: the most that branches can give."""
    rank = recording.rank[:, :depth]
    accepted = ((rank >= 0) & (rank < width)).cumprod(1).sum(1)
    limits = [np.isfinite(recording.score[:, recording.level(level)]).any(1) for level in range(1, depth + 1)]
    return Replayed(accepted, np.stack(limits, 1).sum(1))
