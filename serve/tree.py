"""The shape of a draft: what may be grown, and one grown tree ready to be verified."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from target_model.batch import MAX_SCRATCH
from target_model.errors import UserError


@dataclass(frozen=True)
class TreeConfig:
    """How far to draft. Depth does not count the root, nodes do.

    Each of the best `width` nodes of a depth is expanded to its best `width` children, and of all candidates the best
    `nodes` - 1 are verified (EAGLE-2). Width 1 is a chain, a single node drafts nothing. The default was fastest for
    m3-tiny on a CPU, greedy and sampled together; where verified tokens are dear, a small tree is right as well.

    With `paths` the tree is static (see `static`): the other three follow from them.
    """

    depth: int = 3
    width: int = 2
    nodes: int = 6
    paths: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self):
        for name in ("depth", "width", "nodes"):
            if getattr(self, name) < 1:
                raise UserError(f"tree {name} must be at least 1, got {getattr(self, name)}")
        if self.nodes > MAX_SCRATCH:
            raise UserError(f"tree nodes must be at most {MAX_SCRATCH} (root included), got {self.nodes}")
        if self.width > MAX_SCRATCH:
            raise UserError(f"tree width must be at most {MAX_SCRATCH}, got {self.width}")
        if self.draft_rows > MAX_SCRATCH:
            raise UserError(f"tree width x (depth - 1) must be at most {MAX_SCRATCH}, got {self.draft_rows}")

    @property
    def most_nodes(self) -> int:
        """Nodes that a tree of this depth and width can have: a level below the first has the children of `width`."""
        return 1 + self.width + (self.depth - 1) * self.width**2

    @property
    def draft_rows(self) -> int:
        """Rows that the draft computes beyond the root's: candidates of the last depth are never expanded."""
        return self.width * (self.depth - 1)

    @property
    def scratch_slots(self) -> int:
        """Slots behind the committed ones that a step may write: the verified nodes, or the root and the draft's
        guessed rows.
        """
        return max(self.nodes, 1 + self.draft_rows)

    @staticmethod
    def chain(depth: int) -> "TreeConfig":
        return TreeConfig(depth=depth, width=1, nodes=depth + 1)

    @staticmethod
    def static(paths: Iterable[Iterable[int]]) -> "TreeConfig":
        """A tree that always has the same nodes. A node is named by its path, the ranks of the guesses from the root's
        child down to it: (0, 2) is the third best guess behind the best one. Every parent must be among the paths.
        """
        ordered = tuple(sorted({tuple(path) for path in paths}, key=lambda path: (len(path), path)))
        for path in ordered:
            if not path or min(path) < 0 or (len(path) > 1 and path[:-1] not in ordered):
                raise UserError(f"tree path {list(path)} must hold ranks from 0 and follow its parent's path")
        if not ordered:
            raise UserError("a static tree needs at least one path")
        inner = {path[:-1] for path in ordered}
        width = max(max(max(path) for path in ordered) + 1, *Counter(map(len, inner)).values())
        return TreeConfig(len(ordered[-1]), width, len(ordered) + 1, ordered)

    @cached_property
    def layout(self) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
        """Of a static tree, for each depth: the places of its nodes among the candidates, and of those to be expanded.

        The candidates of a depth are the best `width` children of each expanded node of the depth above, in order.
        """
        levels, expanded = [], {(): 0}
        inner = {path[:-1] for path in self.paths}
        for depth in range(1, self.depth + 1):
            place = {p: expanded[p[:-1]] * self.width + p[-1] for p in self.paths if len(p) == depth}
            levels.append((tuple(place.values()), tuple(place[p] for p in place if p in inner)))
            expanded = {path: order for order, path in enumerate(p for p in place if p in inner)}
        return tuple(levels)

    @staticmethod
    def parse(text: str) -> "TreeConfig":
        """From "depth,width,nodes"."""
        try:
            depth, width, nodes = (int(part) for part in text.split(","))
        except ValueError:
            raise UserError(f"tree must be depth,width,nodes, for example 5,4,24, got {text!r}") from None
        shape = TreeConfig(depth, width, nodes)
        if nodes > shape.most_nodes:
            most = shape.most_nodes
            raise UserError(f"a tree of depth {depth} and width {width} has at most {most} nodes, got {text!r}")
        return shape

    def __str__(self) -> str:
        if self.nodes == 1:
            return "no drafts"
        if self.width == 1:
            return f"chain of {self.depth}"
        if self.paths:
            return f"static tree of {self.nodes} nodes, depth {self.depth}"
        return f"tree of {self.nodes} nodes, depth {self.depth}, width {self.width}"


def step_slots(shapes: Iterable[TreeConfig], *, ahead: bool) -> int:
    """Slots behind the decided tokens that a step of any of these shapes may write: its scratch slots, or the decided
    tokens of the deepest path and the draft's row of the bonus token; with `ahead` a second step behind those, too.
    """
    shapes = tuple(shapes)
    deepest = max(min(shape.depth, shape.nodes - 1) for shape in shapes)
    return max(deepest + 2, *(shape.scratch_slots for shape in shapes)) + (deepest + 1 if ahead else 0)


@dataclass(frozen=True)
class Tree:
    """Nodes in an order in which parents come first. Node 0 is the root, the last decided token; its parent is -1."""

    tokens: list[int]
    parents: list[int]

    @staticmethod
    def of(root: int, tokens: list[int], parents: list[int], live: list[int]) -> tuple["Tree", dict[int, int]]:
        """A root and those of the nodes 1, 2, ... below it that are live, numbered anew; and the number of each now."""
        tree, number = Tree([root], [-1]), {0: 0}
        for node, (token, parent, alive) in enumerate(zip(tokens, parents, live, strict=True), 1):
            if alive:
                number[node] = len(tree)
                tree.tokens.append(token)
                tree.parents.append(number[parent])
        return tree, number

    def __len__(self) -> int:
        return len(self.tokens)

    def depths(self) -> list[int]:
        """Distance of each node from the root."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        return depths

    def ancestors(self) -> list[int]:
        """For each node the bit mask of itself and its ancestors."""
        masks: list[int] = []
        for node, parent in enumerate(self.parents):
            masks.append(1 << node | (0 if parent < 0 else masks[parent]))
        return masks

    def paths(self) -> list[tuple[int, ...]]:
        """For each node the tokens from the root's child down to it."""
        paths: list[tuple[int, ...]] = []
        for token, parent in zip(self.tokens, self.parents, strict=True):
            paths.append(() if parent < 0 else (*paths[parent], token))
        return paths

    def candidates(self) -> list[list[int]]:
        """For each node the tokens of its children, in order."""
        children: list[list[int]] = [[] for _ in self.tokens]
        for token, parent in zip(self.tokens[1:], self.parents[1:], strict=True):
            children[parent].append(token)
        return children

    def accept(self, choices: list[int]) -> list[int]:
        """The accepted nodes, root excluded: from the root on, the child that carries the target's choice at its
        parent.

        `choices[i]` is the token the target puts behind node i. The bonus token is the choice at the last accepted node
        (or the root).
        """
        path, node = [], 0
        for child in range(1, len(self)):
            if self.parents[child] == node and self.tokens[child] == choices[node]:
                path.append(child)
                node = child
        return path


@dataclass(frozen=True)
class Verified:
    """A tree and what the target kept of it: `path` are its accepted nodes, the root excluded."""

    tree: Tree
    path: list[int]
