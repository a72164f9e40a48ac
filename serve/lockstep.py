"""One target in several processes that run in step: what the leader is asked, the others are told to repeat.

A message through a pipe says what is to be run, the tensors of the batch follow as a broadcast. Only the leader knows
requests, drafts and samples. Shapes: T rows, H hidden, R sequences, M moves.
"""

import functools
import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from target_model.batch import Batch
from target_model.cache import DraftKVShape, PagedCache
from target_model.config import M3Config
from target_model.model import Recorder, TargetOutput, record_graph
from target_model.quantised_formats import Format
from target_model.sharding import Shard, ShardedTarget

_TENSORS = (
    "token_ids", "positions", "slots", "physical_slots", "row_start", "committed", "block_table", "ancestors",
    "image_rows",
)  # fmt: skip


@dataclass(frozen=True)
class BatchLayout:
    """What a batch is made of: (name, shape, type) of its integer tensors, its host fields, shape of its image features
    or None.
    """

    tensors: tuple[tuple[str, tuple[int, ...], torch.dtype], ...]
    row_counts: tuple[int, ...]
    max_context: int
    page_size: int
    features: tuple[int, int] | None


@dataclass(frozen=True)
class MakeCache:
    """`types`: kv_dtype and index_dtype."""

    number: int
    pages: int
    types: dict[str, torch.dtype | None]


@dataclass(frozen=True)
class Forward:
    """`choice_of`: layer whose choice of blocks is wanted, or None."""

    cache: int
    layout: BatchLayout
    choice_of: int | None


@dataclass(frozen=True)
class Logits:
    """Of states of this shape, [.., H]."""

    shape: tuple[int, ...]


@dataclass(frozen=True)
class Commit:
    """After the last Forward on this cache; `shape` of the path, [R, M]."""

    cache: int
    shape: tuple[int, int]


@dataclass(frozen=True)
class Drop:
    """A cache or a graph, which are numbered together."""

    number: int


@dataclass(frozen=True)
class BeginGraph:
    """What follows, up to EndGraph, is not run but becomes a CUDA graph."""

    number: int


@dataclass(frozen=True)
class EndGraph:
    pass


@dataclass(frozen=True)
class ReplayGraph:
    number: int


@dataclass(frozen=True)
class Stop:
    pass


class Followers(Protocol):
    """How the leader reaches the others. `on_loss` is told why, before this process ends because one is gone. `graphs`:
    those of the leader in which it works with the others, and their numbers. NCCL lets nobody leave while they exist.
    """

    on_loss: Callable[[str], None]
    graphs: weakref.WeakKeyDictionary[torch.cuda.CUDAGraph, int]

    def tell(self, message: Any) -> None:
        """Sends a message to all of them."""

    def guard(self) -> AbstractContextManager[None]:
        """Around what can only fail because one of them is gone."""


class LeaderCache(PagedCache):
    """The leader's part of a cache that every process has a part of; the draft's rows are here only."""

    def __init__(self, number: int, followers: Followers, config: M3Config, pages: int, **options: Any):
        super().__init__(config, pages, **options)
        self.number, self._followers = number, followers

    def commit(self, batch: Batch, path_RM: Tensor) -> None:
        with self._followers.guard():
            self._followers.tell(Commit(self.number, tuple(path_RM.shape)))
            dist.broadcast(path_RM.contiguous(), 0)
        super().commit(batch, path_RM)


class LeaderTarget(ShardedTarget):
    """Rank 0 of a target. To its user it is a target like any other."""

    def __init__(
        self,
        config: M3Config,
        shard: Shard,
        dtype: torch.dtype = torch.float32,
        *,
        followers: Followers,
        vision: bool = False,
        formats: Mapping[str, Format] | None = None,
    ):
        super().__init__(config, shard, dtype, vision=vision, formats=formats)
        self.followers = followers
        self._numbers = itertools.count()
        self._dropped: list[Drop] = []

    def make_cache(self, pages: int, *, draft: DraftKVShape | None = None, **types: torch.dtype | None) -> LeaderCache:
        """As TargetModel's, in every process."""
        number = self._next()
        self.followers.tell(MakeCache(number, pages, types))
        options = {"dtype": self.dtype, "device": self.device, "draft": draft, **types}
        cache = LeaderCache(number, self.followers, self.config, pages, **options)
        weakref.finalize(cache, self._dropped.append, Drop(number))
        return cache

    def make_graph(self, run: Callable[[], None], pool: tuple[int, int] | None) -> torch.cuda.CUDAGraph:
        """As TargetModel's: every process makes a graph of its part."""
        number = self._next()
        with self.followers.guard():
            self.followers.tell(BeginGraph(number))
            try:
                graph = super().make_graph(run, pool)
            finally:
                self.followers.tell(EndGraph())
        self.followers.graphs[graph] = number
        weakref.finalize(graph, self._dropped.append, Drop(number))
        return graph

    def replay(self, graph: torch.cuda.CUDAGraph) -> None:
        with self.followers.guard():
            self.followers.tell(ReplayGraph(self.followers.graphs[graph]))
            super().replay(graph)

    def _next(self) -> int:
        """The number of a new cache or graph. Before it is given the others hear of those that are gone."""
        while self._dropped:
            self.followers.tell(self._dropped.pop())
        return next(self._numbers)

    def forward(
        self, batch: Batch, cache: LeaderCache, taps: Sequence[int] = (), recorder: Recorder | None = None
    ) -> TargetOutput:
        with self.followers.guard():
            layout, integers = pack(batch)
            self.followers.tell(Forward(cache.number, layout, recorder and recorder.choice_of))
            dist.broadcast(integers, 0)
            if batch.image_features is not None:
                dist.broadcast(batch.image_features.contiguous(), 0)
            return super().forward(batch, cache, taps, recorder)

    def scores(self, final_state: Tensor) -> Tensor:
        with self.followers.guard():
            self.followers.tell(Logits(tuple(final_state.shape)))
            dist.broadcast(final_state.contiguous(), 0)
            return super().scores(final_state)


def follow(target: ShardedTarget, receive: Callable[[], Any]) -> None:
    """Repeats what the leader does until it says stop."""
    with torch.inference_mode():
        _Follower(target, receive).repeat(Stop)


class _Follower:
    def __init__(self, target: ShardedTarget, receive: Callable[[], Any]):
        self.target, self.receive = target, receive
        self.caches: dict[int, PagedCache] = {}
        self.batches: dict[int, Batch] = {}  # of the last pass over each cache
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def repeat(self, end: type) -> None:
        """What it is told, up to a message of this type."""
        while not isinstance(message := self.receive(), end):
            self._do(message)

    def _do(self, message: Any) -> None:
        target, caches, batches = self.target, self.caches, self.batches
        match message:
            case ReplayGraph(number):
                self.graphs[number].replay()
            case Forward(cache, layout, choice_of):
                integers = self._broadcast((_size(layout),), torch.int64)
                features = None if layout.features is None else self._broadcast(layout.features, target.dtype)
                batches[cache] = unpack(layout, integers, features)
                recorder = None if choice_of is None else Recorder(choice_of=choice_of)
                target(batches[cache], caches[cache], recorder=recorder)
            case Logits(shape):
                target.scores(self._broadcast(shape, target.dtype))
            case Commit(cache, shape):
                caches[cache].commit(batches[cache], self._broadcast(shape, torch.int64))
            case BeginGraph(number):
                # All in one pool of memory, which is gone when none of them is left.
                pool = next((graph.pool() for graph in self.graphs.values()), None)
                self.graphs[number] = record_graph(functools.partial(self.repeat, EndGraph), pool)
            case MakeCache(number, pages, types):
                caches[number] = target.make_cache(pages, **types)
            case Drop(number):
                for kept in (caches, batches, self.graphs):
                    kept.pop(number, None)

    def _broadcast(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        received = torch.empty(shape, dtype=dtype, device=self.target.device)
        dist.broadcast(received, 0)
        return received


def pack(batch: Batch) -> tuple[BatchLayout, Tensor]:
    """The layout of a batch, and all its integers in one tensor."""
    present = {name: value for name in _TENSORS if (value := getattr(batch, name)) is not None}
    features = None if batch.image_features is None else tuple(batch.image_features.shape)
    layout = BatchLayout(
        tuple((name, tuple(value.shape), value.dtype) for name, value in present.items()),
        batch.row_counts,
        batch.max_context,
        batch.page_size,
        features,
    )
    return layout, torch.cat([value.flatten().long() for value in present.values()])


def unpack(layout: BatchLayout, integers: Tensor, features: Tensor | None) -> Batch:
    """The batch again."""
    found: dict[str, Tensor | None] = dict.fromkeys(_TENSORS)
    parts = integers.split([torch.Size(shape).numel() for _, shape, _ in layout.tensors])
    for (name, shape, dtype), part in zip(layout.tensors, parts, strict=True):
        found[name] = part.view(shape).to(dtype)
    return Batch(
        **found,
        row_counts=layout.row_counts,
        max_context=layout.max_context,
        page_size=layout.page_size,
        image_features=features,
    )


def _size(layout: BatchLayout) -> int:
    return sum(torch.Size(shape).numel() for _, shape, _ in layout.tensors)
