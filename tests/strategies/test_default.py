import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distrib
from distrib.errors import ContextError
from tests.conformance.table import mirrored


def test_run_calls_the_function_as_it_is():
    seen = []
    result = distrib.get_strategy().run(lambda x, y=1: seen.append(x) or x + y, (2,), {"y": 5})
    assert (result, seen) == (7, [2])
    assert distrib.get_strategy().run(lambda: object) is object


def test_run_may_stand_inside_jit():
    strategy = distrib.get_strategy()
    assert float(jax.jit(lambda x: strategy.run(lambda y: y * 2, (x,)))(3.0)) == 6.0


def test_scope_changes_nothing():
    strategy = distrib.get_strategy()
    with strategy.scope() as yielded:
        assert yielded is strategy
        assert not distrib.has_strategy()
        assert distrib.get_replica_context() is not None


def test_variables_are_plain():
    v = distrib.Variable([1.0, 2.0], synchronization=distrib.VariableSynchronization.NONE)
    v.assign_add([1.0, 1.0])
    assert v.numpy().tolist() == [2.0, 3.0]
    assert len(v.values) == 1
    assert v.distribute_strategy is distrib.get_strategy()


def test_a_variable_with_aggregation_is_assigned_once():
    v = distrib.Variable(1.0, aggregation=distrib.VariableAggregation.SUM)
    distrib.get_strategy().run(lambda: v.assign_add(2.0))
    assert float(v.numpy()) == 3.0


def test_collectives():
    replica = distrib.get_replica_context()
    x = jnp.array([1.0, 2.0])
    np.testing.assert_array_equal(replica.all_reduce("MEAN", x), x)
    np.testing.assert_array_equal(replica.all_gather(x, 0), x)

    def merge(strategy, y):
        assert strategy is distrib.get_strategy()
        assert distrib.in_cross_replica_context()
        return strategy.reduce("SUM", y, axis=0)

    assert float(replica.merge_call(merge, args=(x,))) == 3.0


def test_unknown_op():
    with pytest.raises(ValueError, match="not a valid ReduceOp"):
        distrib.get_replica_context().all_reduce("PROD", jnp.ones(1))


def test_datasets():
    dataset = distrib.get_strategy().experimental_distribute_dataset(np.arange(5), batch_size=2)
    assert [batch.tolist() for batch in dataset] == [[0, 1], [2, 3], [4]]


def test_its_scope_is_refused_in_that_of_another():
    strategy, default = mirrored(), distrib.get_strategy()
    with default.scope() as entered:
        assert entered is default
    with strategy.scope():
        with pytest.raises(ContextError, match="Mixing different"):
            with default.scope():
                pass


def test_it_compiles_nothing():
    with pytest.raises(TypeError, match="compiles nothing"):
        distrib.get_strategy().extended.compiled_text(lambda: 1)


def test_experimental_set_strategy():
    strategy = mirrored()
    distrib.experimental_set_strategy(strategy)
    try:
        assert distrib.get_strategy() is strategy
        v = distrib.Variable(1.0)
        with strategy.scope():
            with pytest.raises(ContextError, match="leave the `with` block first"):
                distrib.experimental_set_strategy(None)
        assert [float(x) for x in strategy.run(v.value).values] == [1.0, 1.0]
    finally:
        distrib.experimental_set_strategy(None)
    assert v.distribute_strategy is strategy
    assert not distrib.has_strategy()
