"""Acceptance by decree, for benchmarks of the system: how many drafted tokens a step keeps does not depend on what the
target thinks of them. The text is meaningless; draft, verification and cache do all of their work.
"""

import math

from serve.tree import Tree, TreeConfig
from target_model.errors import UserError


class SyntheticAcceptance:
    """Keeps drafted tokens so that the acceptance length is `length` on average.

    The share of steps that keep depth i is rate**i, as if each token were accepted with the same chance `rate`; steps
    are spread evenly instead of drawn, so the mean is met after a few of them. What a tree is not deep enough for, the
    next ones make up.
    """

    def __init__(self, length: float, shape: TreeConfig):
        depth = min(shape.depth, shape.nodes - 1)
        if not (math.isfinite(length) and 1 <= length <= depth + 1):
            raise UserError(
                f"the synthetic acceptance length must be from 1 to {depth + 1} for a {shape}, got {length:g}"
            )
        low, high = 0.0, 1.0
        for _ in range(60):
            rate = (low + high) / 2
            if sum(rate**i for i in range(1, depth + 1)) < length - 1:
                low = rate
            else:
                high = rate
        self.length = length
        self.per_position = tuple(high**i for i in range(1, depth + 1))
        self._steps = self._owed = 0

    def start_over(self) -> None:
        """As if no step had been made."""
        self._steps = self._owed = 0

    def path(self, tree: Tree) -> list[int]:
        """Nodes to accept in the next step: the longest path of the tree, cut to the step's share."""
        depths = tree.depths()
        node = max(range(len(tree)), key=depths.__getitem__)
        path = []
        while node:
            path.append(node)
            node = tree.parents[node]
        wanted = self.wanted()
        self.settle(max(0, wanted - len(path)))
        return path[::-1][:wanted]

    def wanted(self) -> int:
        """Nodes that the next step is to keep, with what earlier ones owe as far as a tree can be deep."""
        self._steps += 1
        share = self._steps * (math.sqrt(5) - 1) / 2 % 1
        self._owed += sum(share < position for position in self.per_position)
        wanted = min(self._owed, len(self.per_position))
        self._owed -= wanted
        return wanted

    def settle(self, missing: int) -> None:
        """Tells how many of them a tree was not deep enough for."""
        self._owed += missing
