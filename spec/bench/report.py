"""The report of a result: one HTML file with everything inside, and beside it figures, JSON, CSV and recorded runs."""

import csv
import io
import json
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from spec.bench.plots import Drawing, drawings, png, svg
from spec.bench.recording import Recording
from spec.bench.tables import bounds, number
from target_model.errors import atomic_directory

HTML, JSON, CSV = "report.html", "result.json", "rows.csv"
COLUMNS = (
    "suite draft label temperature top_p top_k thinking concurrency prompts answers steps drafted verified accepted "
    "emitted AL accepted_per_drafted identical_to_plain tokens speed_up decode_speed_up"
).split()


def write_report(result: dict[str, Any], directory: Path, recordings: dict[str, Recording]) -> None:
    """Writes the directory whole; one that is there is replaced."""
    drawn = drawings(result)
    with atomic_directory(directory) as work:
        for name, recording in recordings.items():
            recording.save(work / name)
        for each in drawn:
            (work / f"{each.name}.png").write_bytes(png(each.figure))
        (work / JSON).write_text(json.dumps(result, indent=1), encoding="utf-8")
        (work / CSV).write_text(rows_csv(result["rows"]), encoding="utf-8")
        (work / HTML).write_text(page(result, drawn), encoding="utf-8")


def rows_csv(rows: Iterable[dict[str, Any]]) -> str:
    """One line a row; intervals, shares by position and seconds in columns of their own."""
    table = [_flat(row) for row in rows]
    columns = list(dict.fromkeys(name for row in table for name in row))
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    return buffer.getvalue()


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    flat = {name: row[name] for name in COLUMNS}
    for name in ("AL_interval", "decode_speed_up_interval"):
        flat[f"{name}_low"], flat[f"{name}_high"] = row[name] or (None, None)
    for part, seconds in row["seconds"].items():
        flat[f"{part}_seconds"] = seconds
    for name in ("per_position", "conditional"):
        flat |= {f"{name}_{place}": share for place, share in enumerate(row[name] or (), 1)}
    return flat


def page(result: dict[str, Any], drawn: list[Drawing]) -> str:
    """The HTML file."""
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    environment.filters |= {"number": number, "bounds": bounds, "spelled": _spelled, "listed": _listed, "svg": svg}
    template = environment.from_string((files("spec.bench") / "report.html").read_text(encoding="utf-8"))
    rows, analysis = result["rows"], result.get("analysis")
    drafts = list(result["pairs"])
    return template.render(
        result=result,
        drafts=", ".join(drafts),
        several=len(drafts) > 1,
        drawn=drawn,
        varied={name: len({row[name] for row in rows}) > 1 for name in ("thinking", "concurrency")},
        suites=list(dict.fromkeys(row["suite"] for row in rows)),
        deepest=max(len(row["per_position"] or ()) for row in rows),
        categories=list(dict.fromkeys(name for row in rows for name in row["categories"])),
        greedy=_same(row for row in rows if row["temperature"] == 0),
        sampled=_same(row for row in rows if row["temperature"] > 0),
        runs=analysis["runs"] if analysis else [],
        costs=analysis["costs"] if analysis else [],
    )


def _same(rows: Iterable[dict[str, Any]]) -> dict[str, int]:
    chosen = list(rows)
    return {
        "same": sum(row["identical_to_plain"] for row in chosen),
        "asked": sum(row["answers"] for row in chosen),
    }


def _spelled(token: str) -> str:
    """A token with its blanks and line ends to be seen."""
    return token.replace(" ", "␣").replace("\n", "⏎").replace("\t", "⇥") or "(nothing)"


def _listed(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
