"""How far to draft in the next step: the shape that promises most tokens per second, by measured costs and by what was
accepted lately. Nothing here changes what comes out, only how fast.

A shape's cost is that of a whole step (draft and verify) at its tokens, batch and context, from a table measured on the
machine. What it brings is estimated from how often the target's choice was the first, second, ... child of a node, by
depth: over all requests of a kind (greedy or sampled), and over each one's own recent steps.
"""

from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property

from serve.tree import Tree, TreeConfig

OFF = TreeConfig(depth=1, width=1, nodes=1)  # the root alone: plain decoding
# Share of the time given to the largest shape for what it shows about all others. The first steps are for looking, too,
# with the largest shape that is not expected to lose more than so many plain steps.
PROBING, FIRST_PROBES, FIRST_LOSS = 0.01, 3, 1.0
# Drafting has to promise so much more than plain decoding: the best of many estimates is too rosy.
MARGIN = 1.03
# Without drafts the draft's rows wait, and whoever drafts again has to compute them first: over so many steps that is
# spread.
HORIZON = 8
# Steps after which the outlook of a request is worked out anew; in which its record fades by half, and that over all
# requests; and how many steps of its own weigh as much as the rate over all requests.
REFRESH, HALF_LIFE, OVERALL_HALF_LIFE, TRUST = 4, 24, 256, 4.0


@dataclass(frozen=True)
class Cost:
    """Seconds that one step of `shape` took, for `batch` sequences of `context` tokens each."""

    shape: TreeConfig
    batch: int
    context: int
    draft: float
    verify: float


@dataclass(frozen=True)
class CostTable:
    """Measured steps: every shape at every pair of batch and context, OFF among the shapes. row: seconds of the draft's
    row of one decided token; a step of a drafting shape has one of them for each sequence.
    """

    costs: tuple[Cost, ...]
    row: float = 0.0

    @property
    def shapes(self) -> tuple[TreeConfig, ...]:
        return tuple(dict.fromkeys(cost.shape for cost in self.costs))

    def seconds(self, shape: TreeConfig, batch: int, context: int) -> float:
        """Of one step: linear between the measured batches and contexts, and beyond them."""
        return _linear({size: _linear(row, context) for size, row in self._points[shape].items()}, batch)

    @cached_property
    def _points(self) -> dict[TreeConfig, dict[int, dict[int, float]]]:
        points: dict[TreeConfig, dict[int, dict[int, float]]] = {}
        for cost in self.costs:
            points.setdefault(cost.shape, {}).setdefault(cost.batch, {})[cost.context] = cost.draft + cost.verify
        return points


def _linear(points: dict[int, float], x: int) -> float:
    known = sorted(points)
    if len(known) == 1:
        return points[known[0]]
    place = min(max(bisect_left(known, x), 1), len(known) - 1)
    low, high = known[place - 1], known[place]
    slope = (points[high] - points[low]) / (high - low)
    return max(points[low] + slope * (x - low), min(points.values()) / 2)


class Record:
    """How often the target's choice behind a node of depth d was its child of rank j, lately. Without steps of its own
    it says what `prior` says.
    """

    def __init__(self, depth: int, width: int, prior: "Record | None" = None):
        self.prior = prior
        # What all requests have in common is heard from all of them, many times in a step.
        self.keep = 0.5 ** (1 / (HALF_LIFE if prior else OVERALL_HALF_LIFE))
        self.offered = [[0.0] * width for _ in range(depth)]
        self.hit = [[0.0] * width for _ in range(depth)]
        self.steps = 0

    def add(self, tree: Tree, path: list[int]) -> None:
        """One verified tree and its accepted nodes."""
        keep = self.keep
        self.steps += 1
        for depth, parent in enumerate([0, *path]):
            children = [node for node in range(1, len(tree)) if tree.parents[node] == parent]
            if depth >= len(self.hit) or not children:
                return
            for rank, child in enumerate(children[: len(self.hit[0])]):
                self.offered[depth][rank] = keep * self.offered[depth][rank] + 1
                self.hit[depth][rank] = keep * self.hit[depth][rank] + (child in path)

    def chance(self, depth: int, rank: int) -> float:
        """That the target's choice behind a node of this depth, which it has reached, is the child of this rank."""
        if self.prior is not None:
            guess = self.prior.chance(depth, rank)
        else:
            guess = self.chance(depth - 1, rank) if depth else 0.6 * 0.3**rank
        return (self.hit[depth][rank] + TRUST * guess) / (self.offered[depth][rank] + TRUST)

    def expected(self, shape: TreeConfig) -> list[float]:
        """Drafted tokens that a step of `shape` would keep at depth 1, 2, ...: the chances of its likeliest nodes."""
        level, nodes = [1.0], []
        for depth in range(shape.depth):
            ranks = [self.chance(depth, rank) for rank in range(shape.width)]
            level = sorted((p * chance for p in level for chance in ranks), reverse=True)
            nodes += [(p, depth) for p in level]
            level = level[: shape.width]
        kept = [0.0] * shape.depth
        for p, depth in sorted(nodes, reverse=True)[: shape.nodes - 1]:
            kept[depth] += p
        return kept


class Budget:
    """Chooses a shape for each step. The same table and the same accepted trees give the same choices."""

    def __init__(self, table: CostTable):
        self.table = table
        self.shapes = table.shapes
        self.largest = max(self.shapes, key=lambda shape: (shape.nodes, shape.depth))
        self.depth = max(shape.depth for shape in self.shapes)
        self.width = max(shape.width for shape in self.shapes)
        self.overall = {kind: Record(self.depth, self.width) for kind in ("greedy", "sampled")}
        self.saved = 0.0  # seconds that a probe may cost
        self._records: dict[str, Record] = {}
        self._expected: dict[str, dict[TreeConfig, list[float]]] = {}

    def choose(
        self, ids: list[str], kinds: list[str], contexts: list[int], limits: list[int], waiting: int = 0
    ) -> TreeConfig:
        """The shape for a step of these requests, each "greedy" or "sampled"; request r can take `limits[r]` drafted
        tokens. `waiting`: rows of the draft that have to be computed before it can draft, of all of them.
        """
        for each, kind in zip(ids, kinds, strict=True):
            if each not in self._records:
                self._records[each] = Record(self.depth, self.width, self.overall[kind])
        batch, context = len(ids), sum(contexts) // len(contexts)
        backlog = self.table.row * max(waiting - batch, 0) / HORIZON
        tokens, seconds = {}, {}
        for shape in self.shapes:
            outlooks = [self._outlook(each)[shape] for each in ids]
            tokens[shape] = sum(1 + sum(kept[:limit]) for kept, limit in zip(outlooks, limits, strict=True))
            seconds[shape] = self.table.seconds(shape, batch, context)
            if shape != OFF:
                seconds[shape] += backlog + self.table.row * (tokens[shape] - batch)

        def speed(shape: TreeConfig) -> float:
            return tokens[shape] / seconds[shape]

        best = max(self.shapes, key=lambda shape: speed(shape) * (MARGIN if shape == OFF else 1))

        def loss(shape: TreeConfig) -> float:
            return seconds[shape] * (1 - speed(shape) / speed(best))

        if any(self.overall[kind].steps < FIRST_PROBES for kind in kinds):
            affordable = [shape for shape in self.shapes if loss(shape) <= FIRST_LOSS * seconds[OFF]]
            return max(affordable, key=lambda shape: (shape.nodes, shape.depth))
        if loss(self.largest) <= self.saved:
            self.saved = 0.0
            return self.largest
        self.saved += PROBING * seconds[best]
        return best

    def learn(self, request_id: str, tree: Tree, path: list[int]) -> None:
        """Takes a verified tree and its accepted nodes down."""
        if len(tree) == 1:
            return
        record = self._records[request_id]
        record.prior.add(tree, path)
        record.add(tree, path)
        if record.steps % REFRESH == 0:
            self._expected.pop(request_id, None)

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._records.pop(request_id, None)
        self._expected.pop(request_id, None)

    def _outlook(self, request_id: str) -> dict[TreeConfig, list[float]]:
        if request_id not in self._expected:
            record = self._records[request_id]
            expected = {shape: record.expected(shape) if shape != OFF else [0.0] for shape in self.shapes}
            self._expected[request_id] = expected
        return self._expected[request_id]
