"""A file with the shape of a draft: what `spec tune tree` writes and `spec serve` takes.

`tree` is {depth, width, nodes} or, for a static tree, {paths}; `measured` tells people where it comes from.
"""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from serve.tree import TreeConfig
from target_model.errors import UserError, atomic_write

SHAPE = ("depth", "width", "nodes")


def read_tree(path: str | Path) -> TreeConfig:
    """Raises UserError for a file that is missing, no YAML, or has an unknown or a missing key."""
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, Mapping) or not isinstance(values.get("tree"), Mapping):
        raise UserError(f"{path} must hold `tree` with {', '.join(SHAPE)}, or with paths")
    for key in values:
        if key not in ("tree", "measured"):
            raise UserError(f"{path}: unknown key {key!r}: expected tree and measured")
    return _shape(values["tree"], path)


def _shape(tree: Mapping[str, Any], path: str | Path) -> TreeConfig:
    if set(tree) == {"paths"}:
        paths = tree["paths"]
        if not isinstance(paths, list) or not all(
            isinstance(p, list) and all(type(r) is int for r in p) for p in paths
        ):
            raise UserError(f"{path}: tree.paths must be lists of ranks, for example [[0], [1], [0, 0]]")
        return TreeConfig.static(paths)
    if set(tree) != set(SHAPE):
        wrong = ", ".join(map(str, sorted(set(tree) ^ set(SHAPE), key=str)))
        raise UserError(f"{path}: tree must have {', '.join(SHAPE)}, or paths alone; missing or unknown: {wrong}")
    if not all(type(value) is int for value in tree.values()):
        raise UserError(f"{path}: tree.depth, tree.width and tree.nodes must be whole numbers")
    return TreeConfig(**tree)


def write_tree(path: Path, shape: TreeConfig, measured: Mapping[str, Any]) -> None:
    tree = {"paths": [list(p) for p in shape.paths]} if shape.paths else {name: asdict(shape)[name] for name in SHAPE}
    with atomic_write(path, "w") as file:
        file.write("# Written by spec tune tree. Serve with it: spec serve --tree-file FILE\n")
        yaml.safe_dump(
            {"tree": tree, "measured": dict(measured)}, file, sort_keys=False, default_flow_style=None, width=110
        )
