"""What `spec runs` lists."""

import json

from tests.commands import call


def test_every_run_is_listed(tmp_path, monkeypatch, capsys):
    """Also one that ended, or still is, before its first record; not a folder that is no run's."""
    record = {"name": "done", "target": "m3-tiny", "step": 7, "complete": True, "best": {"al": 2.25}}
    for name in ("done", "ended/state", "starting", "foreign"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    (tmp_path / "runs" / "done" / "run.json").write_text(json.dumps(record))
    (tmp_path / "runs" / "starting" / "lock").touch()
    (tmp_path / "runs" / "foreign" / "notes.txt").touch()
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    code, out, _ = call(monkeypatch, capsys, "runs")
    rows = {line.split()[0]: line for line in out.splitlines() if line.strip()}
    assert code == 0 and "2.25" in rows["done"] and "complete" in rows["done"]
    assert all("no record yet" in rows[name] and "none yet" in rows[name] for name in ("ended", "starting"))
    assert "foreign" not in rows
    (tmp_path / "runs" / "done" / "run.json").unlink()
    code, out, _ = call(monkeypatch, capsys, "runs")
    assert code == 0 and "ended" in out and "done" not in out


def test_no_run_is_said(tmp_path, monkeypatch, capsys):
    (tmp_path / "runs" / "foreign").mkdir(parents=True)
    code, _, err = call(monkeypatch, capsys, "runs", str(tmp_path / "runs"))
    assert (code, err) == (2, f"spec: no training run under {tmp_path / 'runs'}\n")
