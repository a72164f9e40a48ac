"""Looks at the machine and tries what the other commands need, from versions up to a tiny speculative generation."""

import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

import torch
from rich.console import Console
from rich.table import Table

from serve.request import SamplingParams
from serve.tree import TreeConfig
from spec import __version__
from spec.pair import load_pair

PACKAGES = ("torch", "triton", "transformers", "deepspeed", "datasets", "safetensors", "wandb", "fastapi", "uvicorn")
ONE_STEP = ("data.max_documents=8", "draft.initialisation=random", "schedule.epochs=null", "schedule.steps=1")
PROMPT = "Write a Python function that adds two numbers."
COLOURS = {"ok": "green", "note": "yellow", "broken": "bold red"}


@dataclass(frozen=True)
class Finding:
    """One line of the report. "note": works without it or in another way; "broken": it must work and does not."""

    name: str
    state: Literal["ok", "note", "broken"]
    detail: str


def run(console: Console | None = None) -> bool:
    """Prints the report line by line; True when nothing is broken."""
    console = console or Console()
    findings = []
    for check in (_machine, _packages, _devices, _compilers, _triton, _bundled_pair, _training):
        for finding in _attempt(check):
            findings.append(finding)
            console.print(_row(finding))
    broken = [finding.name for finding in findings if finding.state == "broken"]
    console.print(f"[bold red]broken: {', '.join(broken)}[/]" if broken else "[bold green]everything needed works[/]")
    return not broken


def _row(finding: Finding) -> Table:
    row = Table.grid(padding=(0, 2))
    row.add_column(width=16)
    row.add_column(width=6, style=COLOURS[finding.state])
    row.add_column(overflow="fold")
    row.add_row(finding.name, finding.state, finding.detail)
    return row


def _attempt(check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """A check that raises is itself a finding: here, and only here, any exception is reported and not passed on."""
    try:
        yield from check()
    except Exception as error:
        yield Finding(check.__name__.strip("_"), "broken", f"{type(error).__name__}: {' '.join(str(error).split())}")


def _machine() -> Iterator[Finding]:
    yield Finding("spec", "ok", f"{__version__}, Python {platform.python_version()}, {platform.platform()}")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    free = shutil.disk_usage(os.curdir).free / 2**30
    yield Finding("machine", "ok", f"{os.cpu_count()} cores, {memory:.0f} GiB memory, {free:.0f} GiB free disk here")


def _packages() -> Iterator[Finding]:
    for name in PACKAGES:
        try:
            yield Finding(name, "ok", version(name))
        except PackageNotFoundError:
            yield Finding(name, "broken", "not installed")


def _devices() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"
        yield Finding("gpu", "note", f"none usable ({build} build of torch): everything runs on the CPU")
        return
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        memory = device.total_memory / 2**30
        yield Finding(f"gpu {index}", "ok", f"{device.name}, {memory:.0f} GiB, sm_{device.major}{device.minor}")


def _compilers() -> Iterator[Finding]:
    for name in ("gcc", "nvcc"):
        path = shutil.which(name)
        yield Finding(name, "ok" if path else "note", path or "not found; nothing here has to be compiled with it")


def _triton() -> Iterator[Finding]:
    import triton  # noqa: F401  (a broken installation fails here)

    if torch.cuda.is_available():
        yield Finding("triton kernels", "ok", "used on the GPU")
    else:
        yield Finding("triton kernels", "note", "triton imports; without a GPU the PyTorch reference is used")


def _training() -> Iterator[Finding]:
    """One optimizer step of the demo's recipe on a few rows, in a folder that is thrown away."""
    from train.config import load_config
    from train.loop import train

    with tempfile.TemporaryDirectory() as folder:
        train(load_config("demo", [*ONE_STEP, f"output={folder}"]), progress=False)
    yield Finding("training", "ok", "one step with DeepSpeed, saved and exported")


def _bundled_pair() -> Iterator[Finding]:
    """Loads the bundled target and draft and lets both answer, which runs every layer of the serving path."""
    pair = load_pair("m3-tiny", "eagle3")
    yield Finding("bundled weights", "ok", pair.description.replace("\n", "; "))
    prompt = pair.render(PROMPT)
    params = SamplingParams(temperature=0.0, max_tokens=24)
    plain, speculative = (
        pair.engine(tree, len(prompt) + params.max_tokens).generate([prompt], params)[0]
        for tree in (None, TreeConfig())
    )
    accepted = sum(step.accepted for step in speculative.steps)
    detail = f"{len(speculative.token_ids)} tokens, {accepted} of them drafted, "
    if plain.token_ids != speculative.token_ids:
        yield Finding("generation", "broken", detail + "but not those of plain decoding")
    else:
        yield Finding("generation", "ok", detail + "the same as plain decoding's")
