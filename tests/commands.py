"""The command line in this process."""

import sys

from spec import cli


def call(monkeypatch, capsys, *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `spec ARGUMENTS`."""
    monkeypatch.setattr(sys, "argv", ["spec", *arguments])
    code = 0
    try:
        cli.main()
    except SystemExit as stop:
        code = stop.code or 0
    captured = capsys.readouterr()
    return code, captured.out, captured.err
