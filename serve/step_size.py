"""What a step on the device is made for, and what it has decided for one sequence."""

from dataclasses import dataclass

from serve.guesses import Noise
from serve.padded_passes import padded_pages, padded_sequences
from serve.tree import Tree, TreeConfig


@dataclass(frozen=True)
class Size:
    """What a captured step is made for: sequences and pages padded, a shape, and how much noise it needs."""

    sequences: int
    pages: int
    shape: TreeConfig
    noise: Noise

    @staticmethod
    def of(sequences: int, pages: int, shape: TreeConfig, noise: Noise, *, padded: bool) -> "Size":
        """The smallest size that these fit in; as they are unless `padded`."""
        if not padded:
            return Size(sequences, pages, shape, noise)
        return Size(padded_sequences(sequences), padded_pages(pages), shape, noise)

    @property
    def place(self) -> tuple[int, int]:
        """Steps of the same place share their buffers."""
        return self.sequences, self.pages

    @property
    def depth(self) -> int:
        return self.shape.depth if self.shape.nodes > 1 else 0

    @property
    def nodes(self) -> int:
        """Nodes of every tree, the root and those that are not live included."""
        if self.shape.paths:
            return self.shape.nodes
        return min(self.shape.nodes, self.shape.most_nodes)


@dataclass(frozen=True)
class Decided:
    """What a step decided for one sequence: its tree, the accepted nodes, the tokens (the bonus token last)."""

    tree: Tree
    path: list[int]
    tokens: list[int]

    @staticmethod
    def read(row: list[int], depth: int, nodes: int) -> "Decided":
        """From one row of a result: kept nodes, tokens [F], path [D], and of the tree tokens, parents, live [N] each.
        Nodes that are not live are left out.
        """
        if nodes == 1:  # many sequences share a short step
            return Decided(Tree([row[2]], [-1]), [], [row[1]])
        kept, row = row[0], row[1:]
        tokens, path, rest = row[: kept + 1], row[depth + 1 : depth + 1 + kept], row[2 * depth + 1 :]
        below = (rest[column * nodes + 1 : (column + 1) * nodes] for column in range(3))
        tree, number = Tree.of(rest[0], *below)
        return Decided(tree, [number[node] for node in path], tokens)
