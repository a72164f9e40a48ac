"""Figures of a result, small enough to be read on a phone."""

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

# Apart for people who see colours differently (Okabe and Ito).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8A8A00")
SIZE = (4.2, 3.1)
STYLE = {
    "font.size": 8.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "legend.fontsize": 7,
    "svg.fonttype": "none",
    "svg.hashsalt": "spec",
    "axes.prop_cycle": matplotlib.cycler(color=COLOURS),
}
SHARES = ("first", "among")


@dataclass(frozen=True)
class Drawing:
    """A figure; `name` serves as file name. section: "" or the name of the recorded run that it belongs to."""

    name: str
    section: str
    caption: str
    figure: Figure


def drawings(result: dict[str, Any]) -> list[Drawing]:
    """Every figure of a result: a set for each draft, thinking mode and concurrency, and one for each recorded run."""
    rows = result["rows"]
    groups: dict[tuple, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["draft"], row["thinking"], row["concurrency"]), []).append(row)
    drawn = []
    for number, ((draft, thinking, concurrency), chosen) in enumerate(groups.items()):
        words = [draft] * (len(result["pairs"]) > 1) + ["thinking"] * thinking
        words += [f"{concurrency} at a time"] * (concurrency > 1)
        title = f" ({', '.join(words)})" if words else ""
        drawn += _sweep_drawings(chosen, f"-{number}" if number else "", title)
    drawn.append(_drawing("time", "", "Where the time goes, all suites together", _time, rows))
    for number, run in enumerate(result.get("analysis", {}).get("runs", ())):
        drawn += _run_drawings(run, f"run-{number}")
    return drawn


def _sweep_drawings(rows: list[dict[str, Any]], ending: str, title: str) -> list[Drawing]:
    chains = [row for row in rows if row["tree"]["width"] == 1 and row["AL"] is not None]
    drawn = []
    if len({row["tree"]["depth"] for row in chains}) > 1:
        caption = f"Acceptance length by chain length k{title}; bars: 95 %, bootstrap over prompts"
        drawn.append(_drawing(f"al-by-k{ending}", "", caption, _by_k, chains))
        caption = f"Speed-up of decoding over plain decoding in the same run, by chain length k{title}"
        drawn.append(_drawing(f"speed-up-by-k{ending}", "", caption, _speed_by_k, chains))
    lines = dict.fromkeys(_asked(row) for row in rows)
    deepest = [max((r for r in rows if _asked(r) == asked), key=lambda row: row["tree"]["depth"]) for asked in lines]
    shape = ", ".join(dict.fromkeys(row["label"] for row in deepest))
    caption = f"Acceptance by draft position, {shape}{title}: joint (solid), conditional (dotted)"
    drawn.append(_drawing(f"per-position{ending}", "", caption, _per_position, deepest))
    caption = f"Share of verify steps by accepted tokens, {shape}{title}"
    return [*drawn, _drawing(f"histogram{ending}", "", caption, _histogram, deepest)]


def _run_drawings(run: dict[str, Any], name: str) -> list[Drawing]:
    drawn = [_drawing(f"{name}-budget", name, "AL by drafted nodes, replayed", _budget, run["budgets"])]
    for group in ("position", "context", "entropy", "token type"):
        caption = f"Share of tokens that are the draft's first guess, and among its best, by {group}"
        drawn.append(_drawing(f"{name}-{group.replace(' ', '-')}", name, caption, _groups, run[group]))
    return drawn


def svg(figure: Figure) -> str:
    """The figure as an element that can stand in a page."""
    buffer = io.StringIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def png(figure: Figure) -> bytes:
    """A small file: a few dozen colours are enough for lines and letters."""
    drawn, small = io.BytesIO(), io.BytesIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(drawn, format="png", dpi=160)
    with Image.open(drawn) as picture:
        picture.convert("RGB").quantize(64).save(small, format="png", optimize=True)
    return small.getvalue()


def _drawing(name: str, section: str, caption: str, draw: Callable[[Axes, Any], None], data: Any) -> Drawing:
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=SIZE, layout="constrained")
        draw(figure.add_subplot(), data)
    return Drawing(name, section, caption, figure)


def _legend(axes: Axes, columns: int = 2) -> None:
    axes.figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=columns)


def _asked(row: dict[str, Any]) -> str:
    return f"{row['suite']}, T = {row['temperature']:g}"


def _lines(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Rows by suite and temperature, ordered by depth."""
    lines: dict[str, list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: row["tree"]["depth"]):
        lines.setdefault(_asked(row), []).append(row)
    return dict(sorted(lines.items()))


def _style(place: int, row: dict[str, Any]) -> dict[str, Any]:
    style = "-" if row["temperature"] == 0 else "--"
    return {
        "marker": "o",
        "ms": 3,
        "lw": 1.2,
        "label": _asked(row),
        "ls": style,
        "color": COLOURS[place % len(COLOURS)],
    }


def _by_k(axes: Axes, chains: list[dict[str, Any]]) -> None:
    lines = _lines(chains)
    for place, line in enumerate(lines.values()):
        # Side by side, or the bars of one k hide each other.
        aside = 0.06 * (place - (len(lines) - 1) / 2)
        lengths = [row["AL"] for row in line]
        bars = None
        if all(row["AL_interval"] for row in line):
            bars = [[length - row["AL_interval"][0] for length, row in zip(lengths, line, strict=True)],
                    [row["AL_interval"][1] - length for length, row in zip(lengths, line, strict=True)]]  # fmt: skip
        axes.errorbar(
            [row["tree"]["depth"] + aside for row in line], lengths, yerr=bars, elinewidth=0.6, **_style(place, line[0])
        )
    axes.set(xlabel="k", ylabel="AL", ylim=(1, None), xticks=sorted({row["tree"]["depth"] for row in chains}))
    _legend(axes)


def _speed_by_k(axes: Axes, chains: list[dict[str, Any]]) -> None:
    for place, line in enumerate(_lines(chains).values()):
        axes.plot(
            [row["tree"]["depth"] for row in line], [row["decode_speed_up"] for row in line], **_style(place, line[0])
        )
    axes.axhline(1, color="grey", lw=0.8)
    axes.set(xlabel="k", ylabel="speed-up", xticks=sorted({row["tree"]["depth"] for row in chains}))
    _legend(axes)


def _per_position(axes: Axes, rows: list[dict[str, Any]]) -> None:
    for place, row in enumerate(row for row in rows if row["per_position"]):
        positions, colour = range(1, len(row["per_position"]) + 1), COLOURS[place % len(COLOURS)]
        axes.plot(
            positions,
            row["per_position"],
            marker="o",
            ms=3,
            lw=1.2,
            color=colour,
            label=_asked(row),
        )
        conditional = [float("nan") if share is None else share for share in row["conditional"]]
        axes.plot(positions, conditional, ls=":", lw=1, color=colour)
    axes.set(xlabel="draft position", ylabel="accepted", ylim=(0, 1))
    axes.xaxis.get_major_locator().set_params(integer=True)
    _legend(axes)


def _histogram(axes: Axes, rows: list[dict[str, Any]]) -> None:
    width = 0.8 / max(1, len(rows))
    for place, row in enumerate(rows):
        shares = [count / max(1, row["steps"]) for count in row["histogram"]]
        axes.bar([i + place * width for i in range(len(shares))], shares, width, label=_asked(row))
    axes.set(xlabel="accepted tokens", ylabel="share of verify steps")
    axes.xaxis.get_major_locator().set_params(integer=True)
    _legend(axes)


def _time(axes: Axes, rows: list[dict[str, Any]]) -> None:
    labels = list(dict.fromkeys(row["label"] for row in rows))
    base = [0.0] * len(labels)
    for part in ("prefill", "draft", "verify", "other"):
        shares = []
        for label in labels:
            chosen = [row["seconds"] for row in rows if row["label"] == label]
            shares.append(sum(each[part] for each in chosen) / sum(each["total"] for each in chosen))
        axes.barh(labels, shares, left=base, label=part, height=0.7)
        base = [a + b for a, b in zip(base, shares, strict=True)]
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set(xlabel="share of the time", xlim=(0, 1))
    _legend(axes, 4)


def _budget(axes: Axes, budgets: list[dict[str, Any]]) -> None:
    names = [name for name in budgets[0] if name not in ("nodes", "dynamic tree")]
    for name in names:
        points = [(row["nodes"], row[name]) for row in budgets if row.get(name) is not None]
        axes.plot(*zip(*points, strict=True), marker="o", ms=3, lw=1.2, ls=":" if "oracle" in name else "-", label=name)
    axes.set(xlabel="drafted nodes", ylabel="AL", xscale="log", ylim=(1, None))
    axes.set_xticks(ticks := [1, 2, 4, 8, 16, 32, 63], map(str, ticks))
    axes.minorticks_off()
    _legend(axes, 3)


def _groups(axes: Axes, groups: list[dict[str, Any]]) -> None:
    names = [f"{row['group']} ({row['tokens']})" for row in groups]
    for offset, share in zip((-0.2, 0.2), SHARES, strict=True):
        axes.barh([i + offset for i in range(len(names))], [row[share] for row in groups], 0.38, label=share)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set(xlim=(0, 1))
    _legend(axes)
