"""The rows of `spec bench decode`, their table and the fastest of them."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.table import Table

from serve.tree import TreeConfig
from spec.bench.decode_settings import Variant
from spec.bench.step_timing import StepTimes
from spec.bench.sweep import short_name


@dataclass(frozen=True)
class Row:
    """One measured case; `tree` and `variant` are None for plain decoding. decreed: the AL, None: the target's own.
    context: tokens, in the middle of the timed steps. floor: seconds that the bytes of a step take at the measured
    bandwidth. speed_up: of tokens per second over plain decoding at the same batch; promised: what the bytes say of it;
    whole: the same for the target with all of its layers, where fewer were made.
    """

    tree: TreeConfig | None
    variant: Variant | None
    batch: int
    decreed: float | None
    context: int
    times: StepTimes
    floor: float
    speed_up: float = 1.0
    promised: float = 1.0
    whole: float | None = None

    @property
    def label(self) -> str:
        return "plain" if self.tree is None else short_name(self.tree)

    def to_json(self) -> dict[str, Any]:
        """Seconds are rounded to microseconds."""
        named = {"shape": self.label, "options": None if self.variant is None else str(self.variant)}
        own = ("batch", "decreed", "context", "floor", "speed_up", "promised", "whole")
        numbers = {name: getattr(self, name) for name in own} | asdict(self.times)
        numbers |= {"other": self.times.other, "overhead": self.times.overhead}
        return named | {name: round(value, 6) if isinstance(value, float) else value for name, value in numbers.items()}


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.2f}"


COLUMNS: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("shape", lambda row: row.label),
    ("B", lambda row: str(row.batch)),
    ("AL", lambda row: f"{row.times.length:.2f}"),
    ("tok/s", lambda row: f"{row.times.tokens_per_second:.1f}"),
    ("step", lambda row: _milliseconds(row.times.wall)),
    ("draft", lambda row: _milliseconds(row.times.draft)),
    ("verify", lambda row: _milliseconds(row.times.verify)),
    ("other", lambda row: _milliseconds(row.times.other)),
    ("kernels", lambda row: _milliseconds(row.times.kernels)),
    ("over", lambda row: "-" if row.times.overhead is None else f"{row.times.overhead:.0%}"),
    ("bytes", lambda row: _milliseconds(row.floor)),
    ("x plain", lambda row: f"{row.speed_up:.2f}"),
    ("promised", lambda row: f"{row.promised:.2f}"),
    ("reached", lambda row: f"{row.speed_up / row.promised:.0%}"),
    ("whole", lambda row: "-" if row.whole is None else f"{row.whole:.2f}"),
)
LEGEND = (
    "Milliseconds of a step. kernels: in which the device ran one; over: wall beyond them; bytes: what a step reads, "
    "at the copy bandwidth. x plain: tokens/s over plain decoding; promised: by the bytes; reached: x plain / "
    "promised; whole: promised for the target with all of its layers."
)


def rows_table(rows: Sequence[Row]) -> Table:
    """Every row, one draft after the other."""
    table = Table(box=box.SIMPLE_HEAD, padding=0)
    for name, _ in COLUMNS:
        table.add_column(name, justify="left" if name == "shape" else "right", no_wrap=True)
    shown = None
    for row in rows:
        if row.variant is not None and row.variant != shown:
            table.add_row(f"[bold]{row.variant.short}[/]")
            shown = row.variant
        table.add_row(*(cell(row) for _, cell in COLUMNS))
    return table


def fastest(rows: Sequence[Row]) -> dict[int, Row]:
    """By batch: the row with the most tokens per second."""
    best: dict[int, Row] = {}
    for row in rows:
        if row.batch not in best or row.times.tokens_per_second > best[row.batch].times.tokens_per_second:
            best[row.batch] = row
    return best


def fastest_lines(rows: Sequence[Row]) -> list[str]:
    """One sentence for each batch, with the setting as options (--draft-vocab stands for such a draft)."""
    lines = []
    for batch, row in fastest(rows).items():
        setting = "plain decoding"
        if row.tree is not None:
            setting = f"--tree {row.tree.depth},{row.tree.width},{row.tree.nodes} {row.variant}".strip()
        speed = f"{row.times.tokens_per_second:.1f} tokens/s, {row.speed_up:.2f} times plain decoding"
        lines.append(f"fastest at batch {batch}: {setting}: {speed}")
    return lines
