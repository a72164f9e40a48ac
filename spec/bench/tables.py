"""Measured acceptance as tables for the terminal."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from spec.bench.bootstrap import interval
from spec.bench.statistics import DEFINITIONS
from spec.bench.sweep import Row

NOT_AVAILABLE = "n/a"


def number(value: float | None, digits: int = 2) -> str:
    """A figure, or n/a: no rate is made up where nothing was drafted."""
    return NOT_AVAILABLE if value is None else f"{value:.{digits}f}"


def bounds(pair: tuple[float, float] | list[float] | None) -> str:
    """An interval, or nothing where there is none."""
    return "" if pair is None else f"{pair[0]:.2f} to {pair[1]:.2f}"


def print_rows(console: Console, rows: Sequence[Row]) -> None:
    """Five tables for each suite and draft: the figures; tokens and time; acceptance by position, joint and
    conditional; and the histogram of accepted tokens.
    """
    several = len({row.draft for row in rows}) > 1
    for suite, draft in dict.fromkeys((row.suite, row.draft) for row in rows):
        chosen = [row for row in rows if (row.suite, row.draft) == (suite, draft)]
        console.print(_figures(f"{suite}, {chosen[0].prompts} prompts" + f", {draft}" * several, chosen))
        console.print(_work(chosen))
        for kind, title in (("per_position", "joint"), ("conditional", "conditional")):
            shares = [getattr(row.acceptance, kind) for row in chosen]
            console.print(_by_position(f"acceptance per position, {title}", chosen, shares))
        console.print(_histogram(chosen))
        console.print()


def print_definitions(console: Console) -> None:
    for word, meaning in DEFINITIONS.items():
        console.print(f"[bold]{word}[/]: {meaning}", style="dim", highlight=False)


def _table(title: str, style: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left", title_style=style, box=None)
    for heading in ("shape", "asked"):
        table.add_column(heading, overflow="fold")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _figures(title: str, rows: Sequence[Row]) -> Table:
    headings = ("AL", "95 %", "kept", "speed-up", "decoding", "as plain")
    table = _table(title, "bold", *headings)
    for row in rows:
        answers, same = row.answers, f"{row.identical}/{len(row.answers)}"
        counts = [answer.acceptance for answer in answers]
        spread = interval(
            [answer.prompt for answer in answers], [each.emitted for each in counts], [each.steps for each in counts]
        )
        table.add_row(
            row.label,
            str(row.condition),
            number(row.acceptance.length),
            bounds(spread),
            number(row.acceptance.rate),
            f"{row.speed_up:.2f}x",
            f"{row.decode_speed_up:.2f}x",
            same if row.identical == len(answers) else f"[red]{same}[/]",
        )
    return table


def _work(rows: Sequence[Row]) -> Table:
    headings = ("drafted", "verified", "accepted", "prefill", "draft", "verify", "other")
    table = _table("tokens of verify steps, and where the time goes", "italic", *headings)
    for row in rows:
        counts, spent = row.acceptance, row.time
        table.add_row(
            row.label,
            str(row.condition),
            *(str(count) for count in (counts.drafted, counts.verified, counts.accepted)),
            *(f"{part / spent.total:.0%}" for part in (spent.prefill, spent.draft, spent.verify, spent.other)),
        )
    return table


def _by_position(title: str, rows: Sequence[Row], shares: Sequence[Sequence[float | None] | None]) -> Table:
    deepest = max(row.shape.depth for row in rows)
    table = _table(title, "italic", *map(str, range(1, deepest + 1)))
    for row, each in zip(rows, shares, strict=True):
        table.add_row(row.label, str(row.condition), *map(number, [None] * row.shape.depth if each is None else each))
    return table


def _histogram(rows: Sequence[Row]) -> Table:
    longest = max(len(row.acceptance.histogram) for row in rows)
    table = _table("verify steps by accepted tokens", "italic", *map(str, range(longest)))
    for row in rows:
        table.add_row(row.label, str(row.condition), *(str(count) for count in row.acceptance.histogram))
    return table
