"""`spec doctor`: what is installed here and what works."""

import typer


def doctor() -> None:
    """Check the installation: versions, GPU, compilers, and a tiny run of the real thing."""
    from spec.doctor import run

    if not run():
        raise typer.Exit(1)
