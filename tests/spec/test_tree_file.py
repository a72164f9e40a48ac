"""The file that carries a tree from spec tune tree to spec serve."""

import pytest

from serve.tree import TreeConfig
from spec import cli
from spec.bench.acceptance import parse_shapes
from spec.tree_file import read_tree, write_tree
from target_model.errors import UserError


@pytest.mark.parametrize("shape", [TreeConfig(5, 4, 24), TreeConfig.static([(0,), (1,), (0, 0)])], ids=str)
def test_written_and_read(tmp_path, shape):
    path = tmp_path / "tree.yaml"
    write_tree(path, shape, {"speed_up": {"chain 3": 1.2}})
    assert read_tree(path) == shape
    assert "spec serve --tree-file" in path.read_text()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tree: [", "not YAML"),
        ("- 1", "must hold `tree`"),
        ("tree: 3,2,6", "must hold `tree`"),
        ("tree: {depth: 3, width: 2, nodes: 6}\nextra: 1", "unknown key 'extra'"),
        ("tree: {depth: 3, width: 2}", "missing or unknown: nodes"),
        ("tree: {depth: 3, width: 2, nodes: 6, topk: 1}", "missing or unknown: topk"),
        ("tree: {depth: 3, width: 2, nodes: '6'}", "whole numbers"),
        ("tree: {depth: 3, width: 2, nodes: 600}", "at most 64"),
        ("tree: {paths: [[0], [1, 0]]}", "follow its parent"),
        ("tree: {paths: [0]}", "lists of ranks"),
    ],
)
def test_a_bad_file_is_refused(tmp_path, text, message):
    path = tmp_path / "tree.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        read_tree(path)


def test_the_benchmark_takes_it(tmp_path):
    path, shape = tmp_path / "tree.yaml", TreeConfig.static([(0,), (1,), (0, 0)])
    write_tree(path, shape, {})
    assert parse_shapes("none", ["none"], [path]) == (shape,)
    assert parse_shapes("2", ["none"], [path, path]) == (TreeConfig.chain(2), shape)


def test_spec_serve_takes_it(monkeypatch, capsys, tmp_path):
    path, seen = tmp_path / "tree.yaml", []
    write_tree(path, TreeConfig.static([(0,), (1,), (0, 0)]), {})
    monkeypatch.setattr("serve.server.run", seen.append)
    for ending, code in (([], 0), (["--tree", "3,2,6"], 2)):
        monkeypatch.setattr("sys.argv", ["spec", "serve", "--tree-file", str(path), *ending])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        assert (stop.value.code or 0) == code
    assert [options.engine.tree for options in seen] == [TreeConfig.static([(0,), (1,), (0, 0)])]
    assert "--tree and --tree-file exclude each other" in capsys.readouterr().err
