"""Updates that are applied outside of the replicas' program."""

import jax
import jax.numpy as jnp
import numpy as np

import distrib
from distrib.collectives import Scattered
from distrib.engines.deferred_updates import apply_in_order, split_off, updated_variables
from distrib.engines.program import Update
from distrib.platform import shards_of


def add(olds, operand):
    return [old + operand["x"] for old in olds]


def test_an_operand_comes_off_and_back():
    v, w = distrib.Variable(jnp.zeros(5)), distrib.Variable(jnp.ones(()))
    shards = shards_of((5,), 3)
    first, arrays = split_off(Update((v,), add, {"x": Scattered(jnp.ones(2), shards)}))
    assert first.shards == (shards,)
    assert first.update.operand is None
    assert [a.shape for a in arrays] == [(2,)]  # The part of one replica.
    second, arrays = split_off(Update((w, w), add, {"x": 2.0}))
    assert (second.shards, [a.shape for a in arrays]) == ((None,), [()])
    changed = updated_variables([first, second, first])
    assert [id(x) for x in changed] == [id(v), id(w)]

    values = {id(v): v.value(), id(w): w.value()}
    filled = jnp.arange(6.0)  # As the program returns it, with one element behind its end.
    apply_in_order([first, second, first], values, [filled, jnp.float32(2), filled])
    np.testing.assert_array_equal(values[id(v)], 2 * np.arange(5))
    assert float(values[id(w)]) == 3.0
    assert jax.tree.leaves(first.update.operand) == []
