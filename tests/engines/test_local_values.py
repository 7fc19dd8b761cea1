import jax
import jax.numpy as jnp
import pytest

import distrib
from distrib.engines.local_values import as_per_replica, is_kept, local_tree, local_value
from distrib.errors import ContextError


def test_local_value():
    assert local_value(distrib.PerReplica.from_local(7)) == 7
    assert local_value(distrib.Mirrored([1, 1])) == 1
    with pytest.raises(ContextError, match="PerReplica was used inside a step without being pass"):
        local_value(distrib.PerReplica([1, 2]))


def test_trees():
    v = distrib.Variable(1.0)
    tree = {"a": distrib.Mirrored([1, 1]), "v": v, "x": 2}
    assert local_tree(tree) == {"a": 1, "v": v, "x": 2}
    assert is_kept(v) and is_kept(tree["a"]) and not is_kept(2)
    wrapped = as_per_replica((jnp.ones(1), 3, v))
    assert isinstance(wrapped[0], distrib.PerReplica) and wrapped[0].local.tolist() == [1]
    assert wrapped[1] == 3 and wrapped[2] is v
    assert jax.tree.leaves(local_tree(wrapped)[0])[0].tolist() == [1]
