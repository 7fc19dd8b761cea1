import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distrib
from distrib.errors import VariableError
from distrib.variables import VariableAggregation, VariableTree
from tests.conformance.table import central, mirrored, rid

TREE = {
    "dense": {"kernel": np.ones((2, 3), np.float32), "bias": np.zeros(3, np.float32)},
    "step": 4,
}


def make_tree(strategy, tree=None, **kwargs):
    with strategy.scope():
        return VariableTree(TREE if tree is None else tree, "params", **kwargs)


def assert_trees_equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


def test_a_variable_for_each_leaf():
    tree = make_tree(mirrored(), trainable=True)
    aggregation = {v.name: v.aggregation for v in tree.variables}
    assert len(aggregation) == 3
    assert all(v.trainable for v in tree.variables)
    (step,) = (v for v in tree.variables if "step" in v.name)
    assert step.aggregation is VariableAggregation.ONLY_FIRST_REPLICA
    assert {v.aggregation for v in tree.variables if v is not step} == {VariableAggregation.MEAN}
    assert any("params" in name and "dense" in name and "kernel" in name for name in aggregation)


@pytest.mark.parametrize("make", [mirrored, central])
def test_reads_as_the_tree(make):
    assert_trees_equal(make_tree(make()).value(), TREE)


@pytest.mark.parametrize("make", [mirrored, central])
def test_assign_outside(make):
    tree = make_tree(make())
    before = tree.value()
    doubled = jax.tree.map(lambda x: np.asarray(x) * 2 + 1, TREE)
    tree.assign(doubled)
    assert_trees_equal(tree.value(), doubled)
    assert_trees_equal(before, TREE)


@pytest.mark.parametrize("make", [mirrored, central])
def test_assign_in_a_step_combines(make):
    strategy = make()
    tree = make_tree(strategy)

    def step():
        # Replica 0 adds 0 and replica 1 adds 2, whose mean is 1.
        old = tree.value()
        floats = jax.tree.map(lambda x: x + 2 * rid(), old["dense"])
        tree.assign({"dense": floats, "step": old["step"] + 1})
        return tree.value()["step"]

    steps = strategy.run(step)
    assert [int(x) for x in steps.values] == [5, 5]
    expected = {"dense": {"kernel": np.full((2, 3), 2.0), "bias": np.ones(3)}, "step": 5}
    assert_trees_equal(tree.value(), expected)
    strategy.extended.assert_mirrored(tree.variables)


def test_snapshots_survive_a_step():
    strategy = mirrored()
    tree = make_tree(strategy)
    before = tree.value()
    strategy.run(lambda: tree.assign(jax.tree.map(lambda x: x + 1, tree.value())))
    assert_trees_equal(before, TREE)


def test_typed_keys():
    key = jax.random.key(7)
    strategy = mirrored()
    tree = make_tree(strategy, {"key": key})
    assert jnp.issubdtype(tree.value()["key"].dtype, jax.dtypes.prng_key)
    assert jax.random.key_data(tree.value()["key"]).tolist() == jax.random.key_data(key).tolist()
    assert tree.build_data()["key"].dtype == jnp.uint32
    strategy.run(lambda: tree.assign({"key": jax.random.split(tree.value()["key"])[0]}))
    expected = jax.random.split(key)[0]
    assert (
        jax.random.key_data(tree.value()["key"]).tolist() == jax.random.key_data(expected).tolist()
    )


def test_another_structure_is_refused():
    tree = make_tree(mirrored())
    with pytest.raises(VariableError, match="given for params has another structure: .*extra"):
        tree.assign({**TREE, "extra": 1.0})


def test_another_shape_is_refused():
    tree = make_tree(mirrored())
    dense = {**TREE["dense"], "bias": np.zeros(4, np.float32)}
    with pytest.raises(VariableError, match=r"bias.* has shape \(3,\), .* of shape \(4,\)"):
        tree.assign({**TREE, "dense": dense})


def test_an_empty_tree():
    strategy = mirrored()
    tree = make_tree(strategy, {})
    strategy.run(lambda: tree.assign(tree.value()))
    assert tree.value() == {}
    assert tree.variables == []


def test_sum():
    strategy = mirrored()
    tree = make_tree(strategy, {"w": np.float32(0)}, aggregation=VariableAggregation.SUM)
    strategy.run(lambda: tree.assign({"w": rid() + 1}))
    assert float(tree.value()["w"]) == 3.0
    assert isinstance(tree.variables[0], distrib.Variable)
