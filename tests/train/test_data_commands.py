"""`spec data show`, `spec capture` and `spec runs` as a user meets them."""

import io
import json

import numpy as np
import pytest
from rich.console import Console

from spec.conversation import TRAINED, Settings, coloured, show
from target_model.resolve import resolve_target
from target_model.tokenizer import load_tokenizer
from tests.commands import call
from train.config import DataConfig, load_config
from train.data import read_document
from train.progress import ProgressDisplay


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(resolve_target("m3-tiny").path)


@pytest.fixture
def rows(tmp_path):
    turns = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cdéf"}]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ({"messages": turns[:1]}, {"messages": turns})))
    return str(path)


def test_trained_tokens_are_coloured(tokenizer, rows):
    """Exactly the answer and its end-of-turn token, also a character of several tokens."""
    document, _ = read_document(DataConfig(path=rows), tokenizer, 2)
    text = coloured(tokenizer, document.token_ids, document.spans)
    trained = [text.plain[span.start : span.end] for span in text.spans if span.style == TRAINED]
    end = tokenizer.decode([tokenizer.eos_ids[0]])
    assert trained == ["cdéf" + end] and "ab" in text.plain
    assert text.plain == tokenizer.decode(document.token_ids.tolist())
    twice = coloured(tokenizer, np.array([65, 66, 67]), np.array([1, 0, 2]))
    assert [span.style for span in twice.spans] == [TRAINED, "dim", TRAINED]


def test_rows_and_drops_are_shown(tokenizer, rows):
    output = io.StringIO()
    show(Settings(DataConfig(path=rows), "m3-tiny", row=2, table=True), Console(file=output, width=120))
    lines = output.getvalue().splitlines()
    listed = [line.split() for line in lines if line.strip()[:1].isdigit() and "documents" not in line]
    count = next(int(line.split("(coloured), ")[1].split()[0]) for line in lines if "(coloured)" in line)
    assert len(listed) == count >= 3
    assert all(int(row[0]) + 1 == int(row[3]) for row in listed)  # row p reads the token at p + 1
    assert lines[-1].endswith("dropped: 1 without an assistant turn")
    output.truncate(0)
    show(Settings(DataConfig(path=rows), "m3-tiny", row=1), Console(file=output, width=120))
    assert "row 1 is left out: without an assistant turn" in output.getvalue()


def test_commands(monkeypatch, capsys, tmp_path, rows):
    code, out, _ = call(monkeypatch, capsys, "data", "show", rows, "--row", "2")
    assert code == 0 and "cdéf" in out
    code, _, err = call(monkeypatch, capsys, "data", "show", rows, "--row", "3")
    assert code == 2 and err.endswith("rows.jsonl has no row 3\n")
    code, out, _ = call(monkeypatch, capsys, "data", "show", "--config", "demo", "--thinking", "disabled")
    assert code == 0 and "rows of 256" in out
    code, out, _ = call(monkeypatch, capsys, "data", "coverage", rows)
    shares = {line.split()[0]: float(line.split()[1]) for line in out.splitlines() if "%" in line}
    assert code == 0 and list(shares) == ["256", "512", "1,024", "2,048", "4,096"] and shares["4,096"] == 100
    for wrong in ([], [rows, "--config", "demo"], [rows, "--thinking", "maybe"]):
        code, _, err = call(monkeypatch, capsys, "data", "show", *wrong)
        assert code == 2 and ("one of the two" in err or "thinking_mode: " in err)
    code, _, err = call(monkeypatch, capsys, "regenerate", rows)
    assert code == 2 and "regenerate" in err
    store = tmp_path / "store"
    arguments = ["capture", "--config", "demo", f"data.path={rows}", "--output", str(store)]
    code, out, _ = call(monkeypatch, capsys, *arguments, "--plan")
    assert code == 0 and "GB of them to write" in out and not store.exists()
    code, out, _ = call(monkeypatch, capsys, *arguments, "--dtype", "fp8")
    assert code == 0 and f"data.path={rows} features.cache=false features.store={store}" in out
    code, _, err = call(monkeypatch, capsys, *arguments, "--dtype", "int3")
    assert code == 2 and "dtype must be one of fp32, bf16, fp8, not 'int3'" in err


def test_a_row_that_is_not_json_is_an_error_even_behind_the_one_that_is_shown(monkeypatch, capsys, rows):
    with open(rows, "a") as file:
        file.write("oops\n")
    code, out, err = call(monkeypatch, capsys, "data", "show", rows, "--row", "2")
    assert code == 2 and "cdéf" in out and "not JSON" not in out
    assert err.startswith(f"spec: {rows}:3 is not JSON") and err.count("\n") == 1


def test_what_is_refused_leaves_one_line_and_no_progress(monkeypatch, capsys, tmp_path, rows):
    other, missing = tmp_path / "other", tmp_path / "missing"
    other.mkdir()
    (other / "mine.txt").touch()
    refused = call(monkeypatch, capsys, "capture", "--config", "demo", f"data.path={rows}", "--output", str(other))
    assert refused == (2, "", f"spec: {other} is not a feature store, so nothing is written into it\n")
    train = ["train", "--config", "demo", "name=x", f"output={tmp_path}"]
    code, out, err = call(monkeypatch, capsys, *train, f"features.store={missing}")
    assert (code, out) == (2, "") and err == f"spec: feature store {missing} does not exist: it has no manifest.json\n"
    # A terminal shows a bar until then, which is taken away.
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    err = call(monkeypatch, capsys, *train, f"features.store={missing}")[2]
    assert "reading data" in err and "\x1b[2K" in err.split("reading data")[-1]


def test_a_note_is_one_line_in_a_file(capsys):
    with ProgressDisplay(load_config("demo"), enabled=True) as display:
        display.note("word " * 40)
    assert capsys.readouterr() == ("", "word " * 40 + "\n")


def test_regenerate_shows_no_bar_without_a_terminal(monkeypatch, capsys, tmp_path, rows):
    arguments = [rows, "--output", str(tmp_path / "answers.jsonl"), "--max-tokens", "2", "--device", "cpu"]
    code, out, err = call(monkeypatch, capsys, "data", "regenerate", *arguments)
    assert (code, err) == (0, "") and "0:00:00" not in out
    assert out.splitlines()[-1].startswith("1 answered, 0 already there, 1 left out")


def test_runs_are_listed_best_first(monkeypatch, capsys, tmp_path):
    for name, al in (("worse", 1.5), ("better", 2.25), ("unjudged", None)):
        (tmp_path / name / "draft").mkdir(parents=True)
        (tmp_path / name / "draft" / "config.json").write_text("{}")
        record = {"name": name, "target": "m3-tiny", "step": 7, "complete": al is not None}
        record["best"] = None if al is None else {"al": al}
        (tmp_path / name / "run.json").write_text(json.dumps(record))
    code, out, _ = call(monkeypatch, capsys, "runs", str(tmp_path))
    positions = [out.index(name) for name in ("better", "2.25", "worse", "1.50", "unjudged", "not finished")]
    assert code == 0 and positions == sorted(positions)
    log = [{"tau_sim": 1.75, "step": 7, "tokens_per_second": 9.0}, {"step": 7, "judge": {"tau_sim": 9.0}}]
    (tmp_path / "unjudged" / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in log) + '{"tau')
    (tmp_path / "killed").mkdir()
    record = {"name": "killed", "target": "m3-tiny", "step": 500, "complete": False, "best": None}
    (tmp_path / "killed" / "run.json").write_text(json.dumps(record))
    monkeypatch.setenv("COLUMNS", "200")
    code, out, _ = call(monkeypatch, capsys, "runs", str(tmp_path))
    shown = {line.split()[0]: " ".join(line.split()) for line in out.splitlines() if "m3-tiny" in line}
    assert shown["killed"] == "killed m3-tiny not judged - 500 not finished none yet"
    assert shown["unjudged"].startswith("unjudged m3-tiny not judged 1.75 7 not finished ")
    code, _, err = call(monkeypatch, capsys, "runs", str(tmp_path / "none"))
    assert code == 2 and "no training run" in err
