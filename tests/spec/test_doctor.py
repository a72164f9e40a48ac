"""`spec doctor`: what it finds here, and that a broken part is reported and fails the command."""

import io

import pytest
from rich.console import Console

from spec import cli, doctor
from spec.pair import load_pair


def report() -> tuple[bool, str]:
    console = Console(file=io.StringIO(), width=200)
    return doctor.run(console), console.file.getvalue()


def test_everything_works_here(monkeypatch, untrained_draft):
    monkeypatch.setattr(doctor, "load_pair", lambda target, _: load_pair(target, untrained_draft, "cpu"))
    good, text = report()
    assert good, text
    for name in ("torch", "deepspeed", "gcc", "bundled weights"):
        assert name in text
    assert "the same as plain decoding's" in text


def test_a_failing_check_is_reported_and_fails(monkeypatch, capsys):
    def explode(*_):
        raise RuntimeError("weights are gone")

    monkeypatch.setattr(doctor, "_import_error", lambda module: None)
    monkeypatch.setattr(doctor, "load_pair", explode)
    good, text = report()
    assert not good
    assert "RuntimeError: weights are gone" in text and "broken: bundled_pair" in text
    monkeypatch.setattr("sys.argv", ["spec", "doctor"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 1 and "weights are gone" in capsys.readouterr().out


def test_a_module_that_does_not_import_is_explained():
    assert doctor._import_error("json") is None
    assert "No module named 'no_such_module'" in doctor._import_error("no_such_module")
