import collections

import flax.struct
import jax

from distrib.platform import pytree_paths

Point = collections.namedtuple("Point", "x y")


@flax.struct.dataclass
class State:
    params: dict
    step: int


def names(tree, **kwargs):
    return [name for name, _ in pytree_paths.leaves_with_paths(tree, **kwargs)]


def test_names():
    assert names(State(params={"Dense_0": {"kernel": 1}}, step=2)) == [
        "params['Dense_0']['kernel']",
        "step",
    ]
    assert names({"params": {"Dense_0": {"kernel": 1}}}) == ["params['Dense_0']['kernel']"]
    assert names([Point(1, {"a b": 2}), 3]) == ["[0].x", "[0].y['a b']", "[1]"]
    assert names({"a b": 1}) == ["['a b']"]
    assert names({3: 1}) == ["[3]"]
    assert names(Point(1, 2)) == ["x", "y"]


def test_root_and_none():
    assert pytree_paths.leaves_with_paths(5) == [("(root)", 5)]
    assert pytree_paths.leaves_with_paths(None) == []


def test_is_leaf():
    assert names({"a": (1, 2)}, is_leaf=lambda node: isinstance(node, tuple)) == ["a"]
    assert names([None], is_leaf=lambda node: node is None) == ["[0]"]


def test_order_is_that_of_jax():
    tree = {"b": [1, 2], "a": {"c": 3}}
    leaves = [leaf for _, leaf in pytree_paths.leaves_with_paths(tree)]
    assert leaves == jax.tree.leaves(tree)
