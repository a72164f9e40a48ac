"""Measured acceptance as tables for the terminal."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from spec.bench.statistics import DEFINITIONS
from spec.bench.sweep import Row

NOT_AVAILABLE = "n/a"


def number(value: float | None, digits: int = 2) -> str:
    """A figure, or n/a: no rate is made up where nothing was drafted."""
    return NOT_AVAILABLE if value is None else f"{value:.{digits}f}"


def print_rows(console: Console, rows: Sequence[Row]) -> None:
    """Two tables for each suite: the figures, and the histogram of accepted tokens."""
    for suite in dict.fromkeys(row.suite for row in rows):
        chosen = [row for row in rows if row.suite == suite]
        console.print(_figures(suite, chosen))
        console.print(_histogram(chosen))
        console.print()


def print_definitions(console: Console) -> None:
    for word, meaning in DEFINITIONS.items():
        console.print(f"[bold]{word}[/]: {meaning}", style="dim", highlight=False)


def _figures(suite: str, rows: Sequence[Row]) -> Table:
    table = Table(title=f"{suite}, {rows[0].prompts} prompts", title_justify="left", title_style="bold", box=None)
    table.add_column("shape", no_wrap=True)
    for heading in ("T", "AL", "accepted/\ndrafted", "speed-up", "decoding", "same as\nplain"):
        table.add_column(heading, justify="right")
    table.add_column("acceptance per position (joint)")
    for row in rows:
        positions = row.acceptance.per_position
        table.add_row(
            row.label,
            f"{row.temperature:g}",
            number(row.acceptance.length),
            number(row.acceptance.rate),
            f"{row.speed_up:.2f}x",
            f"{row.decode_speed_up:.2f}x",
            f"{row.identical}/{row.prompts}"
            if row.identical == row.prompts
            else f"[red]{row.identical}/{row.prompts}[/]",
            NOT_AVAILABLE if positions is None else " ".join(f"{share:.2f}" for share in positions),
        )
    return table


def _histogram(rows: Sequence[Row]) -> Table:
    longest = max(len(row.acceptance.histogram) for row in rows)
    table = Table(title="verify steps by accepted tokens", title_justify="left", title_style="italic", box=None)
    table.add_column("shape", no_wrap=True)
    table.add_column("T", justify="right")
    for accepted in range(longest):
        table.add_column(str(accepted), justify="right")
    for row in rows:
        table.add_row(row.label, f"{row.temperature:g}", *(str(count) for count in row.acceptance.histogram))
    return table
