"""`spec bench compare`: two results of the acceptance benchmark, or one and MiniMax-M3's published curves."""

import json
from collections.abc import Hashable, Iterator
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from spec.bench.bootstrap import difference, holm
from spec.bench.results import read_result
from spec.bench.tables import NOT_AVAILABLE, bounds, number
from target_model.errors import UserError, write_json

PUBLISHED = "published"
LEVEL = 0.05
SAME = ("suite", "label", "temperature", "top_p", "top_k", "thinking", "concurrency")
SETTINGS = ("target", "tokens", "turns", "stride", "seed", "repeats", "device")


def run(first: Path, second: str, path: Path | None) -> None:
    """Prints what differs, writes it to `path`, and prints one JSON line last."""
    console, result = Console(), read_result(first)
    if second == PUBLISHED and not Path(second).exists():
        compared = against_published(result)
        _print_published(console, compared)
    else:
        compared = compare(result, read_result(second))
        _print_compared(console, compared, str(first), second)
    if path is not None:
        write_json(path, compared)
    differing = sum(bool(row["differs"]) for row in compared["rows"])
    print(json.dumps({"benchmark": "compare", "rows": len(compared["rows"]), "differ": differing}))


def published() -> dict[str, Any]:
    """MiniMax-M3's published acceptance lengths."""
    return json.loads((files("spec.bench") / "published.json").read_text(encoding="utf-8"))


def compare(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """b - a of every row that both have, over the prompts that both have; p values are corrected for their number.

    Raises UserError where nothing can be compared.
    """
    one_draft = all(len(result["pairs"]) == 1 for result in (a, b))
    keyed = [{_key(row, one_draft): row for row in result["rows"]} for result in (a, b)]
    common = [key for key in keyed[0] if key in keyed[1]]
    if not common:
        raise UserError("the two results have no row in common: same suite, shape and sampling")
    rows = []
    for key in common:
        pair = keyed[0][key], keyed[1][key]
        length = difference(*(_parts(row, "emitted", "steps") for row in pair))
        speed = difference(*(_parts(row, "plain_decode_seconds", "decode_seconds") for row in pair))
        rows.append(
            {
                **{name: pair[0][name] for name in SAME},
                "drafts": [row["draft"] for row in pair],
                "prompts": len(set(pair[0]["by_answer"]["prompt"]) & set(pair[1]["by_answer"]["prompt"])),
                "AL": [row["AL"] for row in pair],
                "AL_difference": length and asdict(length),
                "decode_speed_up": [row["decode_speed_up"] for row in pair],
                "decode_speed_up_difference": speed and asdict(speed),
            }
        )
    tested = [row for row in rows if row["AL_difference"]]
    for row, p in zip(tested, holm([row["AL_difference"]["p"] for row in tested]), strict=True):
        row["AL_difference"]["p_corrected"] = p
    for row in rows:
        row["differs"] = row["AL_difference"] and row["AL_difference"]["p_corrected"] < LEVEL
    settings = {name: (a["settings"][name], b["settings"][name]) for name in SETTINGS}
    return {
        "benchmark": "compare",
        "unlike_settings": {name: list(pair) for name, pair in settings.items() if pair[0] != pair[1]},
        "only_one_has": [len(keyed[0]) - len(common), len(keyed[1]) - len(common)],
        "rows": rows,
    }


def _key(row: dict[str, Any], one_draft: bool) -> tuple[Hashable, ...]:
    return (*(row[name] for name in SAME), None if one_draft else row["draft"])


def _parts(row: dict[str, Any], above: str, below: str) -> tuple[list, list, list]:
    answers = row["by_answer"]
    return answers["prompt"], answers[above], answers[below]


def against_published(result: dict[str, Any]) -> dict[str, Any]:
    """Chains of the result beside the published curves that were sampled as they were, and beside the card's figures.

    Curves have no interval of their own: "differs" says that a curve is outside that of the result.
    """
    rows = [*_curve_rows(result["rows"]), *_card_rows(result["rows"])]
    if not rows:
        raise UserError("the result has no chain of 1 to 8 at T = 1, top_p 0.95, top_k 40, and none of 3 for the card")
    for row in rows:
        spread = row["AL_interval"]
        row["difference"] = row["AL"] - row["published"]
        row["differs"] = spread and not spread[0] <= row["published"] <= spread[1]
    return {"benchmark": "compare", "published": published()["what"], "rows": rows}


def _curve_rows(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for curve in published()["curves"]:
        for row in rows:
            depth = row["tree"]["depth"]
            same = all(row[name] == curve[name] for name in ("thinking", "temperature", "top_p", "top_k"))
            if same and row["tree"]["width"] == 1 and depth <= len(curve["AL"]) and row["AL"] is not None:
                yield _beside(row, f"M3, {curve['name']}", curve["AL"][depth - 1])


def _card_rows(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    card = published()["card"]
    for row in rows:
        chain = row["tree"]["width"] == 1 and row["tree"]["depth"] == 3
        if chain and row["suite"] in card["AL"] and row["AL"] is not None:
            yield _beside(row, "M3, card", card["AL"][row["suite"]])


def _beside(row: dict[str, Any], curve: str, value: float) -> dict[str, Any]:
    names = ("suite", "draft", "label", "temperature", "thinking", "concurrency", "AL", "AL_interval")
    return {**{name: row[name] for name in names}, "curve": curve, "published": value}


def _print_compared(console: Console, compared: dict[str, Any], first: str, second: str) -> None:
    console.print(f"A: {first}\nB: {second}", highlight=False)
    for name, (a, b) in compared["unlike_settings"].items():
        console.print(f"[yellow]not asked alike:[/] {name} is {a} in A and {b} in B", highlight=False)
    if any(compared["only_one_has"]):
        console.print("rows that only A or only B has: {} and {}".format(*compared["only_one_has"]), highlight=False)
    console.print(_difference_table("AL", compared["rows"], "AL", "AL_difference"))
    console.print(
        _difference_table("decoding speed-up", compared["rows"], "decode_speed_up", "decode_speed_up_difference")
    )
    console.print(
        "B - A by paired bootstrap over prompts. p: two-sided; of AL it is corrected for the number of rows (Holm), "
        "and an AL differs below 0.05. Prompts: "
        + ", ".join(dict.fromkeys(str(row["prompts"]) for row in compared["rows"])),
        style="dim",
    )


def _difference_table(title: str, rows: list[dict[str, Any]], values: str, differences: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None)
    for heading in ("suite", "shape", "asked"):
        table.add_column(heading, overflow="fold")
    for heading in ("A", "B", "B - A", "95 %", "p", ""):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        found = row[differences]
        differs = differences == "AL_difference" and row["differs"]
        table.add_row(
            row["suite"],
            row["label"],
            _asked(row),
            *(number(value) for value in row[values]),
            NOT_AVAILABLE if found is None else f"{found['value']:+.2f}",
            bounds(found and (found["low"], found["high"])),
            NOT_AVAILABLE if found is None else f"{found.get('p_corrected', found['p']):.3f}",
            "[bold]differs[/]" if differs else "",
        )
    return table


def _print_published(console: Console, compared: dict[str, Any]) -> None:
    console.print(compared["published"], highlight=False)
    for curve in dict.fromkeys(row["curve"] for row in compared["rows"]):
        table = Table(title=curve, title_justify="left", title_style="bold", box=None)
        for heading in ("suite", "shape", "asked"):
            table.add_column(heading, overflow="fold")
        for heading in ("AL", "95 %", "published", "difference", ""):
            table.add_column(heading, justify="right", no_wrap=True)
        for row in (row for row in compared["rows"] if row["curve"] == curve):
            table.add_row(
                row["suite"],
                row["label"],
                _asked(row),
                number(row["AL"]),
                bounds(row["AL_interval"]),
                number(row["published"]),
                f"{row['difference']:+.2f}",
                "[bold]differs[/]" if row["differs"] else "",
            )
        console.print(table)
    console.print("published curves have no interval; it differs where they are outside the result's", style="dim")


def _asked(row: dict[str, Any]) -> str:
    thinking = ", thinking" if row["thinking"] else ""
    return f"T = {row['temperature']:g}{thinking}" + (f", {row['concurrency']}" if row["concurrency"] > 1 else "")
