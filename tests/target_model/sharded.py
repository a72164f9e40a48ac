"""A target run over several processes, and the same in one: what the tests of sharding compare."""

import functools
import random
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor

from target_model.batch import Batch
from target_model.model import Recorder, TargetModel
from target_model.pipeline import PipelineStage
from target_model.shard_loading import load_shard
from target_model.sharding import Shard

PAGES = 24


@dataclass(frozen=True)
class Case:
    """A target over `parts` processes a layer, cut before each of the layers in `cuts`."""

    target: str
    taps: tuple[int, ...]
    parts: int = 1
    cuts: tuple[int, ...] = ()
    length: int = 60
    device: str = "cpu"

    @property
    def processes(self) -> int:
        return self.parts * (len(self.cuts) + 1)


def exercise(model: TargetModel, case: Case) -> dict[str, list[Tensor]]:
    """Prompts in two chunks, three tokens one by one, a tree, its commit, and a token behind it; two sequences."""
    rng = random.Random(0)
    config, device = model.config, model.device
    cache = model.make_cache(2 * PAGES)
    tables = [list(range(r, 2 * PAGES, 2)) for r in range(2)]
    lengths = [case.length, case.length - 7]
    seen: dict[str, list[Tensor]] = {"logits": [], "aux": [], "hidden": [], "blocks": []}

    def tokens(count: int) -> list[int]:
        return [rng.randrange(config.vocab_size) for _ in range(count)]

    def run(batch: Batch) -> Batch:
        recorder = Recorder()
        output = model(batch, cache, case.taps, recorder)
        seen["hidden"] += recorder.hidden_states
        seen["blocks"] += recorder.blocks.values()
        if output.final_state.numel():
            seen["logits"].append(model.logits(output.final_state))
            seen["aux"].append(output.aux)
        return batch

    def causal(counts: list[int], starts: list[int]) -> None:
        run(Batch.causal(config.block_size, device, [tokens(count) for count in counts], starts, tables))

    causal([13, 29], [0, 0])
    causal([lengths[0] - 13, lengths[1] - 29], [13, 29])
    for step in range(3):
        causal([1, 1], [length + step for length in lengths])
    committed = [length + 3 for length in lengths]
    parents = [-1, 0, 0, 1, 3, 2, 5]
    paths = [[0]]
    for parent in parents[1:]:
        paths.append([*paths[parent], len(paths)])
    depths, masks = [len(path) - 1 for path in paths], [sum(1 << node for node in path) for path in paths]
    tree = Batch.tree(config.block_size, device, [tokens(7), tokens(7)], committed, tables, [depths] * 2, [masks] * 2)
    cache.commit(run(tree), torch.tensor([[2, 5, 6], [1, 3, -1]], device=device))
    causal([1, 1], [committed[0] + 4, committed[1] + 3])
    if not case.cuts:
        # Behind the last layer, by a pass that records nothing else.
        recorder = Recorder(choice_of=config.num_layers - 1)
        step = [length + 4 for length in committed], tables
        model(Batch.causal(config.block_size, device, [tokens(1), tokens(1)], *step), cache, recorder=recorder)
        seen["choice"] = list(recorder.blocks.values())
    final, aux = model.capture(torch.arange(40).view(2, 20), case.taps)
    seen |= {"captured": [final, aux], "cache": [cache.k, cache.v, cache.index_k]}
    return {name: [value.cpu() for value in values] for name, values in seen.items()}


def _load(case: Case, rank: int) -> TargetModel:
    """Ranks of a stage are neighbours."""
    stage, part = divmod(rank, case.parts)
    groups = [dist.new_group(list(range(first, first + case.parts))) for first in range(0, case.processes, case.parts)]
    edges = [0, *case.cuts, None]
    shard = Shard(part, case.parts, edges[stage], edges[stage + 1])
    device = case.device if case.device == "cpu" else f"{case.device}:{rank}"
    if not case.cuts:
        return load_shard(case.target, shard, device=device)
    build = functools.partial(
        PipelineStage,
        previous=rank - case.parts if stage else None,
        following=rank + case.parts if stage < len(case.cuts) else None,
        group=groups[stage],
    )
    return load_shard(case.target, shard, device=device, build=build)


def _process(rank: int, cases: list[Case], directory: Path) -> None:
    torch.set_num_threads(1)
    processes, backend = cases[0].processes, "gloo"
    if cases[0].device == "cuda":
        backend = "nccl"
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"file://{directory}/meeting", rank=rank, world_size=processes)
    for number, case in enumerate(cases):
        torch.save(exercise(_load(case, rank), case), directory / f"{number}-{rank}.pt")
    dist.destroy_process_group()


def run_cases(cases: list[Case], directory: Path) -> list[list[dict[str, list[Tensor]]]]:
    """By case and rank, what each process saw. All cases take the same number of processes."""
    processes = cases[0].processes
    torch.multiprocessing.spawn(_process, (cases, directory), nprocs=processes)
    return [
        [torch.load(directory / f"{number}-{rank}.pt") for rank in range(processes)] for number in range(len(cases))
    ]
