"""The processes of a target that is split over several: started, watched, and ended together.

This process is rank 0: it leads (`lockstep.py`). When a worker dies, no collective operation that it takes part in can
be finished or called off, so this process ends too, with one line; when this process dies, the workers notice at once.
"""

import atexit
import contextlib
import functools
import gc
import multiprocessing
import multiprocessing.connection
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from serve.lockstep import LeaderTarget, Stop, follow
from target_model.config import M3Config
from target_model.dummy import DummyWeights, dummy_shard
from target_model.errors import UserError
from target_model.shard_loading import load_shard
from target_model.sharding import Shard, ShardedTarget, check_shard

# Exit code of a server that lost a worker.
LOST = 1
# Seconds that workers get to end by themselves.
_GRACE = 5.0
# Seconds in which clients of a lost server still get their errors.
_LAST_WORDS = 0.5


@dataclass(frozen=True)
class TargetPlan:
    """What is loaded, and by how many processes, each its part. threads: of each on the CPU, None as torch chooses."""

    target: str
    size: int
    dtype: torch.dtype
    device: str
    threads: int | None = None
    dummy: DummyWeights | None = None

    def place(self, rank: int) -> str:
        """The device of a rank."""
        return self.device if self.device == "cpu" else f"{self.device}:{rank}"


def check_plan(config: M3Config, plan: TargetPlan) -> None:
    """Raises UserError unless the target can be split so and there are GPUs for it."""
    check_shard(config, Shard(0, plan.size))
    if plan.device == "cpu":
        return
    if plan.device != "cuda":
        raise UserError(
            f"{plan.size} processes take cuda:0 to cuda:{plan.size - 1}: the device is cuda, not {plan.device}"
        )
    if plan.size > torch.cuda.device_count():
        raise UserError(f"{plan.size} processes need as many GPUs: torch sees {torch.cuda.device_count()}")


class Crew:
    """The workers of a plan. Use `lead_target`; `close` ends them."""

    def __init__(self, plan: TargetPlan, config: M3Config):
        self.size = plan.size
        self._meeting = tempfile.mkdtemp(prefix="spec-workers-")
        self.on_loss: Callable[[str], None] = lambda reason: None
        self.graphs: weakref.WeakKeyDictionary[torch.cuda.CUDAGraph, int] = weakref.WeakKeyDictionary()
        self._closing = False
        self._lost = threading.Event()
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes: list[multiprocessing.Process] = []
        for rank in range(1, plan.size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=work, args=(plan, config, rank, self._meeting, theirs), name=f"spec-worker-{rank}", daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        # Before the interpreter ends the workers its own way, which the watch would take for a loss.
        atexit.register(self.close)
        threading.Thread(target=self._watch, name="workers", daemon=True).start()
        join_group(plan, 0, self._meeting)

    @property
    def process_ids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def wait_until_loaded(self) -> None:
        """Raises UserError with the reason of a worker that could not load its part."""
        for rank, pipe in enumerate(self._pipes, 1):
            with self.guard():
                reason = pipe.recv()
            if reason is not None:
                raise UserError(f"worker {rank} of {self.size}: {reason}")

    def tell(self, message: Any) -> None:
        """Sends a message to every worker."""
        for pipe in self._pipes:
            pipe.send(message)

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """What fails in here because a worker is gone is not reported: the watch reports that and ends the process."""
        try:
            yield
        except (RuntimeError, OSError, EOFError):
            if self._lost.wait(_GRACE):
                threading.Event().wait()
            raise

    def close(self) -> None:
        """Ends the workers; they may be in the middle of something."""
        if self._closing:
            return
        self._closing = True
        atexit.unregister(self.close)
        for graph in list(self.graphs):
            graph.reset()
        with contextlib.suppress(OSError):
            self.tell(Stop())
        # All ranks leave the group together; one that does not come must not hold up the others for ever.
        leaving = threading.Thread(target=leave_group, daemon=True)
        leaving.start()
        deadline = time.monotonic() + _GRACE
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
        leaving.join(max(0.0, deadline - time.monotonic()))
        shutil.rmtree(self._meeting, ignore_errors=True)

    def _watch(self) -> None:
        ended = multiprocessing.connection.wait([process.sentinel for process in self._processes])
        if self._closing:
            return
        self._lost.set()
        rank, process = next((n, p) for n, p in enumerate(self._processes, 1) if p.sentinel in ended)
        process.join()
        how = f"exit code {process.exitcode}"
        if process.exitcode < 0:
            how = f"killed by signal {-process.exitcode}"
        pipe = self._pipes[rank - 1]
        with contextlib.suppress(OSError, EOFError):
            if pipe.poll():
                how = pipe.recv()
        line = f"worker {rank} of {self.size} (process {process.pid}) has ended: {how}; the server cannot go on"
        print(f"spec: {line}", file=sys.stderr, flush=True)
        self.on_loss(line)
        time.sleep(_LAST_WORDS)
        shutil.rmtree(self._meeting, ignore_errors=True)
        os._exit(LOST)


def lead_target(plan: TargetPlan, config: M3Config, *, language_only: bool) -> LeaderTarget:
    """Starts the workers and loads all parts at once. The vision tower is loaded here alone, where it is asked for.

    `config` is that of the target, or of the dummy weights.
    """
    crew = Crew(plan, config)
    try:
        build = functools.partial(LeaderTarget, followers=crew)
        target = load_part(plan, config, 0, language_only=language_only, build=build)
        crew.wait_until_loaded()
    except BaseException:
        crew.close()
        raise
    return target


def load_part(
    plan: TargetPlan,
    config: M3Config,
    rank: int,
    *,
    language_only: bool = True,
    build: Callable[..., ShardedTarget] = ShardedTarget,
) -> ShardedTarget:
    """One rank's part, on its device."""
    shard, options = Shard(rank, plan.size), {"dtype": plan.dtype, "device": plan.place(rank), "build": build}
    if plan.dummy is not None:
        return dummy_shard(plan.target, config, shard, plan.dummy.format_name, **options)
    return load_shard(plan.target, shard, language_only=language_only, **options)


def join_group(plan: TargetPlan, rank: int, meeting: str) -> None:
    """NCCL between GPUs, gloo between CPUs; the processes find each other through a file."""
    device = None
    if plan.device != "cpu":
        device = torch.device(plan.place(rank))
        torch.cuda.set_device(device)
    dist.init_process_group(
        "gloo" if device is None else "nccl",
        store=dist.FileStore(f"{meeting}/store", plan.size),
        rank=rank,
        world_size=plan.size,
        device_id=device,
    )


def leave_group() -> None:
    """Once, and also when joining had failed."""
    if dist.is_initialized():
        dist.destroy_process_group()


def work(plan: TargetPlan, config: M3Config, rank: int, meeting: str, pipe: Connection) -> None:
    """A worker's life: join, load, follow; it ends with its parent, however that ends."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # Ctrl-C and service managers reach every process; rank 0 decides
    threading.Thread(target=_end_with_parent, args=(meeting,), daemon=True).start()
    if plan.threads is not None:
        torch.set_num_threads(plan.threads)
    try:
        join_group(plan, rank, meeting)
        target = load_part(plan, config, rank)
    except Exception as error:
        pipe.send(str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}")
        pipe.recv()  # rank 0 reads that when it has loaded its own part, and then says stop
        leave_group()
        return
    # As the server does, see there: the others wait for this process.
    gc.collect()
    gc.freeze()
    pipe.send(None)
    try:
        follow(target, pipe.recv)
        gc.unfreeze()
        leave_group()
    except EOFError:
        _end_with_parent(meeting)
    except Exception as error:
        with contextlib.suppress(OSError):
            pipe.send(f"{type(error).__name__}: {error}")
        os._exit(LOST)


def _end_with_parent(meeting: str) -> None:
    """Wherever this process waits, and also when its parent was killed."""
    multiprocessing.parent_process().join()
    shutil.rmtree(meeting, ignore_errors=True)
    os._exit(LOST)
