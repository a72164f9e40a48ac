"""`spec inspect`: a target's parts, sizes and needs from its config, and a checkpoint held against them."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from target_model.config import M3Config
from target_model.errors import UserError
from target_model.inspection import (
    CACHE_TYPES,
    CONTEXTS,
    CacheNeed,
    CheckpointReport,
    FormatNeed,
    cache_needs,
    format_needs,
    gpu_table,
    has_weights,
    inspect_checkpoint,
    parameter_rows,
    schedule,
)
from target_model.memory import GPU_SIZES, USABLE
from target_model.resolve import BUNDLED, known_targets, target_config
from target_model.sizes import bytes_text, count_parameters

# Of a long list of tensors, only so many are named.
NAMED = 20
# Characters of the schedule in one line.
_PICTURE_WIDTH = 64


def run(target: str, console: Console | None = None) -> bool:
    """Prints everything; False when a checkpoint directory does not match its config."""
    console = console or Console(highlight=False, width=100, soft_wrap=True)
    config, directory = _open(target)
    _print_parameters(console, target, config)
    formats, caches = format_needs(config), cache_needs(config)
    _print_formats(console, config, formats)
    _print_cache(console, config, caches)
    _print_gpus(console, config)
    _print_schedule(console, config)
    if directory is None:
        console.print("\nno checkpoint: everything above is from the config alone")
        return True
    report = inspect_checkpoint(config, directory)
    _print_checkpoint(console, directory, report)
    return report.good


def _open(target: str) -> tuple[M3Config, Path | None]:
    """Config, and the directory whose weights are to be checked. Nothing is downloaded."""
    path = Path(target).expanduser()
    if (BUNDLED / target).is_dir():
        path = BUNDLED / target
    if path.is_file():
        return M3Config.from_json(path), None
    if path.is_dir():
        return M3Config.from_json(path), path if has_weights(path) else None
    if target.removeprefix("MiniMaxAI/") in known_targets():
        return target_config(target), None
    raise UserError(
        f"unknown target {target!r}: name a directory, a config.json, or one of {', '.join(known_targets())}"
    )


def _print_parameters(console: Console, target: str, config: M3Config) -> None:
    count = count_parameters(config)
    table = _table("parameters", ("part", "how"), ("parameters", "share"))
    for label, how, size in parameter_rows(config):
        table.add_row(label, how, _count(size), f"{size / count.total:.2%}")
    table.add_row("all", f"{_count(count.active)} active for a token", _count(count.total), "", style="bold")
    console.print(f"[bold]{target}[/]: {config.num_layers} layers, context {config.max_position}")
    console.print(table)
    console.print(
        f"tensors: {count.text_tensors:,} text + {count.vision_tensors:,} vision = "
        f"{count.text_tensors + count.vision_tensors:,}"
    )


def _print_formats(console: Console, config: M3Config, formats: list[FormatNeed]) -> None:
    table = _table("bytes", ("format",), ("checkpoint", "in memory (text)", "bits a weight"))
    total = count_parameters(config).total
    for need in formats:
        table.add_row(
            need.name, bytes_text(need.checkpoint), bytes_text(need.loaded), f"{need.checkpoint * 8 / total:.2f}"
        )
    console.print(table)


def _print_cache(console: Console, config: M3Config, caches: list[CacheNeed]) -> None:
    table = _table("cache", ("type",), ("KiB a token", "with draft", *(f"GiB at {_tokens(size)}" for size in CONTEXTS)))
    for need in caches:
        both = need.target + need.draft
        sizes = [f"{both * size / 2**30:.2f}" for size in CONTEXTS]
        table.add_row(need.name, f"{need.target / 1024:.2f}", f"{both / 1024:.2f}", *sizes)
    console.print(table)
    console.print(f"draft: one layer with {config.num_heads} KV heads in bf16", style="dim")


def _print_gpus(console: Console, config: M3Config) -> None:
    headings = [f"{size / 10**9:.0f} GB" for size in GPU_SIZES]
    table = _table(
        f"GPUs, a power of two, for one sequence of {' / '.join(_tokens(size) for size in CONTEXTS)}",
        ("weights", "cache"),
        headings,
    )
    for name, cache, columns in gpu_table(config, CACHE_TYPES[:2], GPU_SIZES):
        table.add_row(name, cache, *(" / ".join(str(count or "-") for count in counts) for counts in columns))
    console.print(table)
    console.print(
        f"split as by spec serve --tp, the draft's cache on the first GPU; {1 - USABLE:.0%} of each stays free",
        style="dim",
    )


def _print_schedule(console: Console, config: M3Config) -> None:
    console.print(
        "\n[bold]layers[/] (F full attention, S block-sparse, r block-sparse with the choice of the layer before;"
    )
    console.print("D dense MLP, M mixture of experts)")
    for start in range(0, config.num_layers, _PICTURE_WIDTH):
        for label, picture in schedule(config):
            console.print(f"{start:>5} {label:<10}{picture[start : start + _PICTURE_WIDTH]}")


def _print_checkpoint(console: Console, directory: Path, report: CheckpointReport) -> None:
    console.print(f"\n[bold]checkpoint[/] {directory}")
    if report.files:
        table = _table("files", ("file",), ("bytes", "of tensors", "header"))
        for name, size, held in report.files:
            table.add_row(name, f"{size:,}", f"{held:,}", f"{size - held:,}")
        console.print(table)
    stored = ", ".join(f"{count} {name}" for name, count in sorted(report.formats.items()))
    console.print(f"tensors as expected: {sum(report.formats.values()):,} ({stored or 'none read'})")
    if report.claimed is not None and report.files:
        note = "agrees" if report.claimed == report.tensor_bytes else "is wrong: do not size memory by it"
        claim = f"the index claims {report.claimed:,} (untrusted), which {note}"
        console.print(f"bytes of all tensors: {report.tensor_bytes:,}; {claim}")
    for label, names in (("missing", report.missing), ("unknown", report.unknown), ("wrong", report.problems)):
        more = f" and {len(names) - NAMED:,} more" if len(names) > NAMED else ""
        console.print(f"{label}: {len(names):,}{''.join(f'{chr(10)}  {name}' for name in names[:NAMED])}{more}")
    console.print("this checkpoint loads" if report.good else "[red]this checkpoint does not load[/]")


def _table(title: str, texts: Sequence[str], numbers: Sequence[str]) -> Table:
    table = Table(title=f"\n{title}", title_justify="left", title_style="bold", box=None, pad_edge=False)
    for heading in texts:
        table.add_column(heading, no_wrap=True)
    for heading in numbers:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _count(size: int) -> str:
    return f"{size / 10**9:.3f} B" if size >= 10**7 else f"{size / 10**6:.3f} M"


def _tokens(size: int) -> str:
    return f"{size // 1024}k" if size < 2**20 else f"{size // 2**20}M"
