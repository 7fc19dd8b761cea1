import pytest
from hypothesis import given
from hypothesis import strategies as st

from distrib.values import Mirrored, PerReplica, is_distributed, regroup, select_replica


def test_regroup_of_one_replica_is_its_tree():
    tree = {"a": [1]}
    assert regroup([tree]) is tree


def test_regroup_keeps_the_structure():
    grouped = regroup([{"a": (1, [2]), "b": None}, {"a": (3, [4]), "b": None}])
    assert grouped["a"][0].values == (1, 3)
    assert grouped["a"][1][0].values == (2, 4)
    assert grouped["b"] is None


def test_regroup_of_different_structures():
    with pytest.raises(ValueError):
        regroup([{"a": 1}, {"b": 1}])


def test_select_replica():
    tree = {"x": PerReplica([1, 2]), "m": Mirrored([5, 5]), "c": "constant"}
    assert select_replica(tree, 0) == {"x": 1, "m": 5, "c": "constant"}
    assert select_replica(tree, 1) == {"x": 2, "m": 5, "c": "constant"}


def test_is_distributed():
    assert is_distributed(PerReplica([1]))
    assert is_distributed(Mirrored([1]))
    assert not is_distributed([PerReplica([1])])


@given(
    st.lists(st.lists(st.integers(), min_size=3, max_size=3), min_size=2, max_size=5),
)
def test_select_undoes_regroup(rows):
    trees = [{"a": a, "b": (b, [c])} for a, b, c in rows]
    grouped = regroup(trees)
    assert [select_replica(grouped, i) for i in range(len(trees))] == trees
