"""CUDA graphs of one engine."""

from collections.abc import Callable

import torch


class GraphPool:
    """Records graphs that take turns in one pool of memory: what outlives a replay lies in buffers outside of it."""

    def __init__(self) -> None:
        self._memory: tuple[int, int] | None = None

    def record(self, run: Callable[[], None], record: Callable[..., torch.cuda.CUDAGraph]) -> torch.cuda.CUDAGraph:
        """A graph of what has run before, by `record_graph` or a target's `make_graph`."""
        graph = record(run, self._memory)
        self._memory = graph.pool()
        return graph
