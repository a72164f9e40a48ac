"""`spec doctor`: what it finds here, and that a broken part is reported and fails the command."""

import io

import pytest
from rich.console import Console

from spec import cli, doctor


def report() -> tuple[bool, str]:
    console = Console(file=io.StringIO(), width=200)
    return doctor.run(console), console.file.getvalue()


def test_everything_works_here():
    good, text = report()
    assert good, text
    for name in ("torch", "deepspeed", "gcc", "bundled weights"):
        assert name in text
    assert "the same as plain decoding's" in text and "one step with DeepSpeed" in text


def test_a_failing_check_is_reported_and_fails(monkeypatch, capsys):
    def explode(*_):
        raise RuntimeError("weights are gone")

    monkeypatch.setattr("train.loop.train", lambda *_, **__: None)
    monkeypatch.setattr(doctor, "load_pair", explode)
    good, text = report()
    assert not good
    assert "RuntimeError: weights are gone" in text and "broken: bundled_pair" in text
    monkeypatch.setattr("sys.argv", ["spec", "doctor"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 1 and "weights are gone" in capsys.readouterr().out
