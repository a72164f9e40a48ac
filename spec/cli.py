"""The `spec` command: its sub-commands, and the one place that turns expected errors into a line and an exit code.

Only light modules are imported here; each command imports what it needs when it runs, so `spec --help` answers at once.
"""

import sys
from typing import Annotated

import typer

from spec import __version__
from spec.commands.bench import bench
from spec.commands.capture import capture
from spec.commands.chat import chat
from spec.commands.data import data
from spec.commands.demo import demo
from spec.commands.doctor import doctor
from spec.commands.export import export
from spec.commands.import_draft import import_draft
from spec.commands.inspect import inspect
from spec.commands.quantize import quantize
from spec.commands.runs import runs
from spec.commands.serve import serve
from spec.commands.train import train
from spec.commands.tune import tune
from target_model.errors import UserError, full_disk

USER_ERROR, INTERRUPTED = 2, 130

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(train)
app.command()(capture)
app.command()(runs)
app.command()(serve)
app.command()(chat)
app.command()(demo)
app.command()(inspect)
app.command()(quantize)
app.command()(export)
app.command(name="import")(import_draft)
app.command()(doctor)
app.add_typer(data, name="data")
app.add_typer(bench, name="bench")
app.add_typer(tune, name="tune")


def _print_version(requested: bool) -> None:
    if requested:
        print(f"spec {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Train EAGLE-3 drafts for MiniMax-M3, serve both losslessly with tree speculation, and measure acceptance."""


def explain(error: BaseException) -> str | None:
    """One line for an error that the user can mend, None for a fault of the program (which keeps its traceback)."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, typer.TyperException):
        return " ".join(error.format_message().split())
    if (cause := full_disk(error)) is not None:
        name = f" ({cause.filename})" if isinstance(cause, OSError) and cause.filename else ""
        return f"the disk is full{name}"
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return None


def main() -> None:
    """Runs the command line. Exit codes: 0, 1 when a check fails, 2 for what the user can mend, 130 after Ctrl-C."""
    try:
        sys.exit(app(prog_name="spec", standalone_mode=False))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except Exception as error:
        line = explain(error)
        if line is None:
            raise
        if line:  # a bare `spec` has printed its help and has nothing to add
            print(f"spec: {line}", file=sys.stderr)
        sys.exit(USER_ERROR)


if __name__ == "__main__":
    main()
