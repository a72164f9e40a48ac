"""Comparisons of results: what differs, what does not, what cannot be compared, and the published curves."""

import json
import re

import pytest

from spec import cli
from spec.bench.compare import against_published, compare, published
from target_model.errors import UserError
from tests.spec.results import result


def test_the_same_twice_does_not_differ():
    found = compare(result(0.6), result(0.6))
    assert len(found["rows"]) == 4 and not found["unlike_settings"]
    for row in found["rows"]:
        assert row["AL_difference"]["value"] == 0 and not row["differs"] and row["prompts"] == 12


def test_a_better_draft_differs_and_by_how_much():
    a, b = result(0.6), result(0.75)
    for row, first, second in zip(compare(a, b)["rows"], a["rows"], b["rows"], strict=True):
        found = row["AL_difference"]
        assert found["value"] == pytest.approx(second["AL"] - first["AL"])
        assert found["low"] <= found["value"] <= found["high"]
        assert row["differs"] and found["p"] <= found["p_corrected"] < 0.05
        assert row["decode_speed_up_difference"]["value"] == pytest.approx(
            second["decode_speed_up"] - first["decode_speed_up"], abs=1e-4
        )
    assert all(row["AL_difference"]["value"] < 0 for row in compare(b, a)["rows"])


def test_one_prompt_allows_no_verdict():
    (row, *_) = compare(result(0.6, prompts=1), result(0.7, prompts=1))["rows"]
    assert row["AL_difference"] is None and not row["differs"]


def test_unlike_settings_are_said_and_rows_without_a_partner_counted():
    a, b = result(0.6), result(0.6)
    b["settings"]["tokens"] = 48
    b["rows"] = b["rows"][1:]
    found = compare(a, b)
    assert found["unlike_settings"] == {"tokens": [96, 48]} and found["only_one_has"] == [1, 0]
    b["rows"] = []
    with pytest.raises(UserError, match="no row in common"):
        compare(a, b)


def test_published_curves_are_the_published_ones():
    curves = {curve["name"]: curve["AL"] for curve in published()["curves"]}
    assert curves["thinking off"] == [1.84, 2.52, 2.93, 3.41, 3.59, 3.57, 3.85, 4.06]
    assert curves["thinking on"][-1] == 3.74 and published()["card"]["AL"]["mt_bench"] == 2.698


def test_against_the_published_curves():
    """Only chains sampled as the curves were, in the same thinking mode; the card's chain of 3 in both temperatures."""
    rows = against_published(result(0.6))["rows"]
    curves = [(row["label"], row["curve"], row["published"]) for row in rows if "card" not in row["curve"]]
    assert curves == [
        ("chain 1", "M3, thinking off", 1.84),
        ("chain 3", "M3, thinking off", 2.93),
        ("chain 1", "M3, GQA draft, thinking off", 1.83),
        ("chain 3", "M3, GQA draft, thinking off", 2.97),
    ]
    assert [(row["temperature"], row["published"]) for row in rows if "card" in row["curve"]] == [
        (0, 2.698),
        (1, 2.698),
    ]
    for row in rows:
        low, high = row["AL_interval"]
        assert row["difference"] == pytest.approx(row["AL"] - row["published"])
        assert row["differs"] == (not low <= row["published"] <= high)
    with pytest.raises(UserError, match="no chain"):
        against_published({"rows": []})


@pytest.fixture
def call(monkeypatch, capsys):
    def run(*arguments) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["spec", "bench", "compare", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return stop.value.code or 0, *capsys.readouterr()

    return run


def test_the_command(call, tmp_path):
    a, b, written = tmp_path / "a.json", tmp_path / "b.json", tmp_path / "c.json"
    a.write_text(json.dumps(result(0.6)))
    b.write_text(json.dumps(result(0.8)))
    code, out, _ = call(a, b, "--json", written)
    assert code == 0 and len(re.findall("differs", out)) >= 4
    assert json.loads(out.strip().splitlines()[-1]) == {"benchmark": "compare", "rows": 4, "differ": 4}
    assert len(json.loads(written.read_text())["rows"]) == 4
    code, out, _ = call(a, "published")
    assert code == 0 and json.loads(out.strip().splitlines()[-1])["rows"] == 6
    for text, message in (
        ("{", "not JSON"),
        ("[]", "no result of"),
        ('{"benchmark": "acceptance"}', "another version"),
    ):
        b.write_text(text)
        code, _, error = call(a, b)
        assert code == 2 and message in error and error.count("\n") == 1
    assert call(a, tmp_path / "none.json")[0] == 2
