"""The report of a small run, looked at in headless Chromium as on a phone; its files; the analysis; replaying it."""

import csv
import json
import os
import sys

import pytest
from PIL import Image

from spec import cli
from spec.bench.analysis import breakdown, budgets
from spec.bench.recording import Recording
from spec.bench.report import rows_csv, write_report
from spec.pair import pairs_of
from tests.serve.test_page import browser, needs_browser  # noqa: F401
from tests.spec.results import result

PHONE = 390


def command(arguments: str) -> int:
    sys.argv, saved = ["spec", *arguments.split()], sys.argv
    try:
        with pytest.raises(SystemExit) as stop:
            cli.main()
    finally:
        sys.argv = saved
    return stop.value.code or 0


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """Of the bundled pair, the draft in fp32: no near tie is decided by rounding."""

    def exact(*arguments):
        pairs = pairs_of(*arguments)
        for pair in pairs.values():
            pair.draft.float()
        return pairs

    directory = tmp_path_factory.mktemp("run") / "report"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("spec.bench.acceptance.pairs_of", exact)
        patch.setattr("spec.bench.costs.PASSES", 1)
        patch.setattr("spec.bench.costs.LONGEST", 64)
        shapes = "--chain 1,3 --tree 2,2,4 --concurrency 2 --repeats 2"
        assert (
            command(f"bench acceptance --suite mt_bench --prompts 2 --tokens 8 {shapes} --analyse --report {directory}")
            == 0
        )
    return directory


def test_files(report):
    found = {path.name for path in report.iterdir()}
    assert {"report.html", "result.json", "rows.csv", "recorded-0.npz", "recorded-1.npz", "al-by-k.png"} <= found
    stored = json.loads((report / "result.json").read_text())
    with open(report / "rows.csv") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == len(stored["rows"]) == 6
    for line, row in zip(lines, stored["rows"], strict=True):
        assert float(line["AL"]) == row["AL"] and line["suite"] == row["suite"]
        assert row["answers"] == row["identical_to_plain"] == (8 if row["temperature"] else 4)
        assert row["seconds"]["total"] == pytest.approx(
            sum(row["seconds"][part] for part in ("prefill", "draft", "verify", "other")), abs=1e-4
        )
    for path in report.glob("*.png"):
        with Image.open(path) as picture:
            assert min(picture.size) > 300
    html = (report / "report.html").read_text()
    assert "<script" not in html and "<link" not in html and " src=" not in html and "url(http" not in html
    assert stored["command"].startswith("spec bench acceptance --suite mt_bench") and stored["command"] in html


@needs_browser
def test_readable_on_a_phone(report, browser):  # noqa: F811
    browser.command("window/rect", width=PHONE + 120, height=900)
    browser.open(f"file://{report / 'report.html'}")
    browser.run(f"document.body.style.width = '{PHONE - 24}px'")
    assert browser.run("return document.title").startswith("Acceptance of ")
    assert "yes, 12 of 12" in browser.run("return document.getElementById('lossless').textContent")
    # Nothing but the scrolling tables is wider than the screen, and the letters in the figures are large enough.
    wide = browser.run(
        "return [...document.body.children].filter(e => e.scrollWidth > e.clientWidth + 1)"
        ".map(e => e.outerHTML).filter(text => !text.startsWith('<div class=\"wide\"') && !text.startsWith('<pre'))"
    )
    assert wide == []
    heights = browser.run(
        "return [...document.querySelectorAll('figure svg')].map(e => e.getBoundingClientRect().height)"
    )
    assert len(heights) == 15 and min(heights) > 150
    small = browser.run(
        "return [...document.querySelectorAll('figure svg text')]"
        ".map(e => parseFloat(getComputedStyle(e).fontSize) * e.getScreenCTM().a).filter(size => size > 0 && size < 6)"
    )
    assert small == []
    rows = browser.run("return document.querySelectorAll('table.rows tbody tr').length")
    assert rows == 6
    if path := os.environ.get("PAGE_PICTURE"):
        browser.picture(path)


def test_the_recorded_run_replays_what_was_measured(report, capsys):
    stored = json.loads((report / "result.json").read_text())
    for run in stored["analysis"]["runs"]:
        assert {tree["shape"] for tree in run["trees"]} == {"chain 1", "chain 3", "tree 2,2,4"}
        for tree in run["trees"]:
            assert tree["replayed_AL"] == pytest.approx(tree["measured_AL"])
            assert tree["expected_speed_up"] > 0
    assert command(f"bench replay {report / 'recorded-0.npz'} --tree 2,2,4 --static 4") == 0
    last = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    measured = {tree["shape"]: tree["replayed_AL"] for tree in stored["analysis"]["runs"][0]["trees"]}
    assert last["AL"]["chain 3"] == measured["chain 3"] and last["AL"]["tree 2,2,4"] == measured["tree 2,2,4"]
    assert command(f"bench replay {report / 'recorded-0.npz'} --tree 9,2,20") == 2
    assert command(f"bench replay {report / 'result.json'}") == 2


def test_groups_add_up(report):
    from target_model.resolve import resolve_target
    from target_model.tokenizer import load_tokenizer

    recording = Recording.load(report / "recorded-1.npz")
    found = breakdown(recording, load_tokenizer(resolve_target("m3-tiny").path))
    hits = (recording.rank[:, 0] == 0).sum()
    for name in ("category", "turn", "position", "context", "entropy"):
        assert sum(row["tokens"] for row in found[name]) == len(recording.rank)
        assert sum(row["tokens"] * row["first"] for row in found[name]) == pytest.approx(
            hits, abs=0.01 * len(found[name])
        )
    assert sum(row["tokens"] for row in found["token type"]) == 2 * len(recording.rank)  # a place and a kind each
    assert sum(row["missed"] for row in found["missed"]) <= len(recording.rank) - hits
    for row in budgets(recording):
        assert row["dynamic"] >= row.get("chain", 1.0) - 1e-9
        assert row.get("oracle 8", 99) >= row.get("oracle 2", 0) >= row.get("chain", 0) - 1e-9


def test_a_figure_that_is_not_there_reads_not_available(tmp_path):
    """Rows without a draft, one prompt, and no chains of different length."""
    small = result(0.6, prompts=1)
    for row in small["rows"]:
        row.update(per_position=None, conditional=None, accepted_per_drafted=None, AL=None)
    write_report(small, tmp_path / "report", {})
    html = (tmp_path / "report" / "report.html").read_text()
    assert "n/a" in html and "None" not in html.partition("Repeat it")[0]
    assert "AL_interval_low" in rows_csv(small["rows"])


def test_a_directory_of_something_else_is_left_alone(tmp_path, capsys):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    assert command(f"bench acceptance --prompts 1 --tokens 4 --report {tmp_path / 'mine'}") == 2
    assert "holds no report" in capsys.readouterr().err and (tmp_path / "mine" / "notes.txt").exists()
