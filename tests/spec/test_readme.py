"""The README against the repository: every source file is named, the check runs its lines, packages are complete."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOMS = ("configs", "draft_model", "serve", "spec", "target_model", "train")
README = (ROOT / "README.md").read_text()


def source_files() -> list[str]:
    return sorted(
        str(path.relative_to(ROOT))
        for room in ROOMS
        for path in (ROOT / room).rglob("*.py")
        if path.name != "__init__.py"
    )


def test_every_source_file_has_its_line():
    assert [path for path in source_files() if f"| `{path}` |" not in README] == []


def test_no_line_names_a_file_that_is_gone():
    named = re.findall(r"^\| `([^`]+)` \|", README, flags=re.MULTILINE)
    assert len(named) > 50 and sorted(named) == sorted(set(named))
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_the_check_runs_the_readmes_test_line():
    (line,) = re.findall(r"^pip install -e '\.\[test\]'.*$", README, flags=re.MULTILINE)
    assert f"({line})" in (ROOT / ".ci" / "run").read_text()


def test_every_package_is_listed():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = {
        str(path.parent.relative_to(ROOT)).replace("/", ".")
        for room in ROOMS
        for path in (ROOT / room).rglob("__init__.py")
    }
    assert found == set(listed)


def test_commands_in_the_readme_exist():
    from spec.cli import app

    known = {command.name or command.callback.__name__ for command in app.registered_commands}
    known |= {group.name for group in app.registered_groups}
    used = set(re.findall(r"^(?:pip install -e \. && )?spec ([a-z]+)", README, flags=re.MULTILINE))
    assert {"serve", "train", "demo", "bench", "doctor"} <= used <= known
