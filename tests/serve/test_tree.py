"""Tree bookkeeping: depths, masks, acceptance, limits."""

import pytest

from serve.tree import Tree, TreeConfig
from target_model.errors import UserError

#        0 (10)
#      /        \
#   1 (11)     2 (12)
#     |        /     \
#   3 (13)  4 (14)  5 (15)
TREE = Tree(tokens=[10, 11, 12, 13, 14, 15], parents=[-1, 0, 0, 1, 2, 2])


def test_depths_ancestors_candidates_paths():
    assert TREE.depths() == [0, 1, 1, 2, 2, 2]
    assert TREE.ancestors() == [0b1, 0b11, 0b101, 0b1011, 0b10101, 0b100101]
    assert TREE.candidates() == [[11, 12], [13], [14, 15], [], [], []]
    assert TREE.paths() == [(), (11,), (12,), (11, 13), (12, 14), (12, 15)]


@pytest.mark.parametrize(
    ("choices", "path"),
    [
        ([12, 0, 15, 0, 0, 9], [2, 5]),
        ([11, 13, 0, 9, 0, 0], [1, 3]),
        ([11, 14, 14, 0, 0, 0], [1]),  # 14 hangs below the other branch
        ([9, 13, 14, 0, 0, 0], []),
    ],
)
def test_accept_follows_the_targets_choices(choices, path):
    assert TREE.accept(choices) == path


def test_config_limits():
    assert TreeConfig.chain(3) == TreeConfig(depth=3, width=1, nodes=4)
    assert TreeConfig.parse("5,4,24") == TreeConfig(5, 4, 24)
    for text in ("5,4", "a,b,c", "0,1,4", "3,2,65", "9,9,32", "3,1,9", "1,3,5"):
        with pytest.raises(UserError):
            TreeConfig.parse(text)


def test_a_static_tree_names_its_nodes_by_rank():
    tree = TreeConfig.static([[0], [2], [0, 0], [2, 1], [2, 0], [2, 1, 0]])
    assert (tree.depth, tree.width, tree.nodes) == (3, 3, 7)
    # Places: rank behind the root; then 3 candidates for each expanded node, in order.
    assert tree.layout == (((0, 2), (0, 2)), ((0, 3, 4), (4,)), ((0,), ()))
    assert TreeConfig.static([(0, 0), (0,)]).layout == (((0,), (0,)), ((0,), ()))


@pytest.mark.parametrize("paths", [[], [[0], [1, 0]], [[-1]], [[]], [[0], [1], [70]]])
def test_a_static_tree_without_its_parents_is_refused(paths):
    with pytest.raises(UserError, match="tree"):
        TreeConfig.static(paths)
