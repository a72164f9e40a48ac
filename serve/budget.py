"""How far to draft in the next step: the shape that promises most tokens per second, by measured costs and by what was
accepted lately. Nothing here changes what comes out, only how fast.

A shape's cost is that of a whole step (draft and verify) at its tokens, batch and context, from a table measured on the
machine. What it brings is estimated from how often the target's choice was the first, second, ... child of a node, by
depth: over all requests of a kind (greedy or sampled), and over each one's own recent steps.
"""

from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from serve.tree import Tree, TreeConfig

OFF = TreeConfig(depth=1, width=1, nodes=1)  # the root alone: plain decoding
# Share of the time given to the largest shape for what it shows about all others. The first steps are for looking, too,
# with the largest shape that is not expected to lose more than so many plain steps.
LOOKING, FIRST_LOOKS, FIRST_LOSS = 0.01, 3, 1.0
# Another shape has to promise so much more than plain decoding and than the shape in use, as the best of many estimates
# is too rosy.
MARGIN = 1.03
# Without drafts the draft's rows wait, and whoever drafts again has to compute them first: over so many steps that is
# spread. A look at drafting pays it alone.
HORIZON = 8
# Steps after which the choice and the outlook of a request are worked out anew, and those after which a choice not to
# draft is, as nothing is learnt meanwhile.
REFRESH, PLAIN_REFRESH = 8, 32
# Steps in which a request's record fades by half, and that over all requests; and how many steps of its own weigh as
# much as the rate over all requests.
HALF_LIFE, OVERALL_HALF_LIFE, TRUST = 24, 256, 4.0


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
    """Measured steps: every shape at every pair of batch and context, OFF among the shapes.

    row: seconds that a row of the draft which has waited, that of one decided token, adds to the first step that drafts
    again. wake: what that step takes besides, however many rows have waited. kept: seconds that an accepted token adds
    to the next step, beyond one of each sequence, which a drafting shape's own costs hold. greedy: costs of steps of
    greedy requests alone, which need no noise; () where drafting costs them as much more than plain decoding as others.
    """

    costs: tuple[Cost, ...]
    row: float = 0.0
    wake: float = 0.0
    kept: float = 0.0
    greedy: tuple[Cost, ...] = ()

    @cached_property
    def shapes(self) -> tuple[TreeConfig, ...]:
        return tuple(dict.fromkeys(cost.shape for cost in self.costs))

    def seconds(self, batch: int, context: int, *, greedy: bool = False) -> dict[TreeConfig, float]:
        """Of one step, by shape, `greedy` if all of it is: linear between the measured batches and contexts, and beyond
        them.
        """
        grid = self._greedy_grid if greedy and self.greedy else self._grid
        return grid.seconds(batch, context)

    @cached_property
    def _grid(self) -> "_Grid":
        return _Grid(self.costs)

    @cached_property
    def _greedy_grid(self) -> "_Grid":
        return _Grid(self.greedy)


class _Grid:
    """Seconds of every shape at every batch and context."""

    def __init__(self, costs: tuple[Cost, ...]):
        self.batches = sorted({cost.batch for cost in costs})
        self.contexts = sorted({cost.context for cost in costs})
        found = {(cost.shape, cost.batch, cost.context): cost.draft + cost.verify for cost in costs}
        self.rows = {
            shape: [[found[shape, batch, context] for context in self.contexts] for batch in self.batches]
            for shape in dict.fromkeys(cost.shape for cost in costs)
        }
        self.least = {shape: min(map(min, rows)) / 2 for shape, rows in self.rows.items()}

    def seconds(self, batch: int, context: int) -> dict[TreeConfig, float]:
        (low, high, share), (near, far, part) = _place(self.batches, batch), _place(self.contexts, context)

        def between(row: list[float]) -> float:
            return row[near] + part * (row[far] - row[near])

        found = {}
        for shape, rows in self.rows.items():
            at_low = between(rows[low])
            found[shape] = max(at_low + share * (between(rows[high]) - at_low), self.least[shape])
        return found


def _place(sizes: list[int], x: int) -> tuple[int, int, float]:
    """Two neighbours in ascending sizes, and how far from the first to the second x is."""
    if len(sizes) == 1:
        return 0, 0, 0.0
    high = min(max(bisect_left(sizes, x), 1), len(sizes) - 1)
    return high - 1, high, (x - sizes[high - 1]) / (sizes[high] - sizes[high - 1])


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
        """One verified tree and its accepted nodes, for `prior` as well."""
        offered = []  # by depth: the children of the node that was reached, and which of them was hit
        for parent, chosen in zip([0, *path], [*path, None], strict=True):
            children = [node for node, above in enumerate(tree.parents) if above == parent]
            offered.append((len(children), children.index(chosen) if chosen else None))
        for record in (self, self.prior) if self.prior else (self,):
            record._count(offered)

    def _count(self, offered: list[tuple[int, int | None]]) -> None:
        self.steps += 1
        for (children, chosen), counts, hits in zip(offered, self.offered, self.hit, strict=False):
            for rank in range(min(children, len(counts))):
                counts[rank] = self.keep * counts[rank] + 1
                hits[rank] = self.keep * hits[rank] + (rank == chosen)

    def chance(self, depth: int, rank: int) -> float:
        """That the target's choice behind a node of this depth, which it has reached, is the child of this rank."""
        if self.prior is not None:
            guess = self.prior.chance(depth, rank)
        else:
            guess = self.chance(depth - 1, rank) if depth else 0.6 * 0.3**rank
        return (self.hit[depth][rank] + TRUST * guess) / (self.offered[depth][rank] + TRUST)

    def chances(self) -> list[list[float]]:
        """By depth and rank."""
        return [[self.chance(depth, rank) for rank in range(len(row))] for depth, row in enumerate(self.hit)]


def expected(chances: list[list[float]], shape: TreeConfig) -> list[float]:
    """Drafted tokens that a step of `shape` would keep at depth 1, 2, ...: the chances of its likeliest nodes."""
    kept, level, nodes = [0.0] * shape.depth, [1.0], []
    if shape == OFF:
        return kept
    for depth in range(shape.depth):
        ranks = chances[depth][: shape.width]
        level = sorted([p * chance for p in level for chance in ranks], reverse=True)[: shape.nodes - 1]
        nodes += [(p, depth) for p in level]
        level = level[: shape.width]
    for p, depth in sorted(nodes, reverse=True)[: shape.nodes - 1]:
        kept[depth] += p
    return kept


@dataclass
class _Choice:
    """A shape for these requests and this largest limit, the steps that it stands for, if it is only a look, and
    what each of them saves for looks.
    """

    asked: tuple[list[str], int]
    shape: TreeConfig
    steps: int
    look: bool = False
    saved: float = 0.0


class Budget:
    """Chooses a shape for each step. The same table and the same accepted trees give the same choices."""

    def __init__(self, table: CostTable):
        self.table = table
        self.shapes = table.shapes
        self.largest = max(self.shapes, key=lambda shape: (shape.nodes, shape.depth))
        self.depth = max(shape.depth for shape in self.shapes)
        self.width = max(shape.width for shape in self.shapes)
        self.overall = {kind: Record(self.depth, self.width) for kind in ("greedy", "sampled")}
        self.saved = 0.0  # seconds that a look may cost
        self._drafted = False  # by the choice before
        # The choice is for one step that drafts, and no other may be begun behind it.
        self.looking = False
        self._in_use = OFF
        self._records: dict[str, Record] = {}
        self._expected: dict[str, dict[TreeConfig, list[float]]] = {}
        self._chosen: _Choice | None = None

    def choose(
        self, ids: list[str], kinds: list[str], contexts: list[int], limits: list[int], waiting: int = 0
    ) -> TreeConfig:
        """The shape for a step of these requests, each "greedy" or "sampled"; request r can take `limits[r]` drafted
        tokens. `waiting`: rows of the draft that have to be computed before it can draft, of all of them.

        For the same requests the choice stands for some steps: in a step of a small model it would take its share.
        """
        asked = ids, min(max(limits), self.depth)
        kept = self._chosen
        if kept is None or kept.asked != asked or not kept.steps:
            kept = self._chosen = self._choice(asked, kinds, sum(contexts) // len(contexts), limits, waiting)
        kept.steps -= 1
        self.saved += kept.saved
        self.looking, self._drafted = kept.look, kept.shape != OFF
        return kept.shape

    def _choice(
        self, asked: tuple[list[str], int], kinds: list[str], context: int, limits: list[int], waiting: int
    ) -> _Choice:
        ids, batch, greedy = asked[0], len(kinds), "sampled" not in kinds
        for each, kind in zip(ids, kinds, strict=True):
            if each not in self._records:
                self._records[each] = Record(self.depth, self.width, self.overall[kind])
        # A step that drafts leaves rows as well, which are in its costs.
        wakes = waiting > batch and not self._drafted
        backlog = self.table.row * (waiting - batch) + self.table.wake if wakes else 0.0
        outlooks = [self._outlook(each) for each in ids]
        tokens, seconds = {}, self.table.seconds(batch, context, greedy=greedy)
        for shape in self.shapes:
            kept = sum(outlook[shape][min(limit, shape.depth)] for outlook, limit in zip(outlooks, limits, strict=True))
            tokens[shape] = batch + kept
            if shape != OFF:
                seconds[shape] += backlog / HORIZON + self.table.kept * max(0.0, kept - batch)

        def speed(shape: TreeConfig) -> float:
            return tokens[shape] / seconds[shape]

        favoured = OFF, self._in_use
        best = max(self.shapes, key=lambda shape: speed(shape) * (MARGIN if shape in favoured else 1))
        if asked[1] == self.depth:  # the last steps of an answer say nothing of the next one
            self._in_use = best

        def loss(shape: TreeConfig) -> float:
            once = backlog * (1 - 1 / HORIZON) if best == OFF != shape else 0.0
            return once + seconds[shape] * (1 - speed(shape) / speed(best))

        if asked[1] and any(self.overall[kind].steps < FIRST_LOOKS for kind in kinds):
            affordable = [shape for shape in self.shapes if loss(shape) <= FIRST_LOSS * seconds[OFF]]
            first = max(affordable, key=lambda shape: (shape.nodes, shape.depth))
            if first != OFF:
                return self._look(asked, first, best)
        if asked[1] and best != self.largest and 0 < loss(self.largest) <= self.saved:
            return self._look(asked, self.largest, best)
        return _Choice(asked, best, PLAIN_REFRESH if best == OFF else REFRESH, saved=LOOKING * seconds[best])

    def _look(self, asked: tuple[list[str], int], shape: TreeConfig, best: TreeConfig) -> _Choice:
        """One step of this shape. Where the others draft as well it is begun behind them as any other. Else a plain one
        may have been begun before it, so it is chosen anew until it has come about.
        """
        if best != OFF:
            self.saved = 0.0
        return _Choice(asked, shape, 1, look=best == OFF)

    def learn(self, request_id: str, tree: Tree, path: list[int]) -> None:
        """Takes a verified tree and its accepted nodes down."""
        if len(tree) == 1:
            return
        record = self._records[request_id]
        record.add(tree, path)
        if record.steps % REFRESH == 0 or self.looking:
            self._expected.pop(request_id, None)
        if self.looking:  # this was it
            self._chosen, self.saved = None, 0.0

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._chosen = None  # the next one may have its id
        self._records.pop(request_id, None)
        self._expected.pop(request_id, None)

    def _outlook(self, request_id: str) -> dict[TreeConfig, list[float]]:
        """Drafted tokens that a step of each shape would keep, were it 0, 1, 2, ... levels deep."""
        if request_id not in self._expected:
            chances = self._records[request_id].chances()
            self._expected[request_id] = {
                shape: list(accumulate(expected(chances, shape), initial=0.0)) for shape in self.shapes
            }
        return self._expected[request_id]
