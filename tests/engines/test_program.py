"""The program of one replica while it is traced: reads, updates, and the meeting of its context."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distrib
from distrib.engines.program import (
    Update,
    applied,
    force,
    share_of_total,
)
from distrib.errors import AggregationError, ContextError, NestedTraceError, VariableError
from tests.support.strategies import mirrored, on_two_replicas

SUM, MEAN = distrib.VariableAggregation.SUM, distrib.VariableAggregation.MEAN
ON_READ = distrib.VariableSynchronization.ON_READ


def variable(strategy, value=0.0, **kwargs):
    with strategy.scope():
        return distrib.Variable(value, **kwargs)


def context():
    return distrib.get_replica_context()


def local(strategy, value):
    return [np.asarray(part).tolist() for part in strategy.experimental_local_results(value)]


# Helpers.


def test_force():
    assert force(3) == 3
    assert force(lambda: 4) == 4


def test_applied_gives_each_value_the_form_of_its_variable():
    v = distrib.Variable(jnp.zeros(2), name="v")
    update = Update((v,), lambda olds, x: [olds[0] + x], jnp.ones(2))
    (new,) = applied(update, [jnp.ones(2)])
    assert (new.tolist(), new.dtype) == ([2, 2], jnp.float32)
    with pytest.raises(VariableError, match="'v': Shape mismatch"):
        applied(Update((v,), lambda olds, x: [jnp.ones(3)], None), [jnp.ones(2)])
    with pytest.raises(ValueError, match="zip"):
        applied(Update((v,), lambda olds, x: [], None), [jnp.ones(2)])


def test_the_share_of_a_total():
    strategy = mirrored(2)
    floating = variable(strategy, 0.0, synchronization=ON_READ, aggregation=SUM)
    whole = variable(strategy, 0, synchronization=ON_READ, aggregation=SUM, name="n")
    mean = variable(strategy, 0.0, synchronization=ON_READ, aggregation=MEAN)
    assert float(share_of_total(floating, "assign", 3.0, 2)) == 1.5
    assert float(share_of_total(whole, "assign", 3, 2)) == 1
    assert share_of_total(mean, "assign", 3.0, 2) == 3.0
    assert share_of_total(floating, "add", 3.0, 1) == 3.0
    message = "'n' is ON_READ with aggregation=SUM and does not support assign_add in cross-repl"
    with pytest.raises(AggregationError, match=message):
        share_of_total(whole, "add", 3, 2)


# Reads and updates.


@on_two_replicas
def test_assignments_show_at_once_and_in_order(make_strategy):
    strategy = make_strategy()
    v = variable(strategy, 1.0, aggregation=MEAN)

    def step():
        seen = [v.value()]
        seen.append(v.assign_add(2.0))
        seen.append(v.assign(v * 10))
        seen.append(v.assign_sub(5.0))
        return seen, v.value()

    seen, last = strategy.run(step)
    assert [local(strategy, x) for x in seen] == [[n, n] for n in (1, 3, 30, 25)]
    assert local(strategy, last) == [25, 25]
    assert float(v.numpy()) == 25


@on_two_replicas
def test_an_update_of_several_variables(make_strategy):
    strategy = make_strategy()
    v, w = variable(strategy, 1.0), variable(strategy, 10.0)

    def step():
        program = distrib.context.current_program()
        program.update([v, w], lambda olds, x: [olds[1], olds[0] + x], jnp.float32(5))
        return v.value(), w.value()

    seen = strategy.run(step)
    assert [local(strategy, x) for x in seen] == [[10, 10], [6, 6]]
    assert (float(v.numpy()), float(w.numpy())) == (10, 6)


def test_an_on_read_variable_is_aggregated_where_there_is_no_replica():
    strategy = mirrored(2)
    v = variable(strategy, 0.0, synchronization=ON_READ, aggregation=SUM)

    def step():
        v.assign(context().replica_id_in_sync_group + 1.0)
        return v.value(), context().merge_call(lambda _: v.value())

    own, total = strategy.run(step)
    assert local(strategy, own) == [1, 2]
    assert local(strategy, total) == [3, 3]


def test_without_aggregation_a_value_has_no_common_meaning():
    strategy = distrib.CentralStorageStrategy(["CPU:0", "CPU:1"])
    v = variable(strategy, 0.0, name="v")
    with pytest.raises(AggregationError, match="specify an aggregation method .* 'v'"):
        strategy.run(lambda: v.assign(jnp.float32(1)))


def test_a_python_number_cannot_be_summed():
    strategy = mirrored(2)
    v = variable(strategy, 0.0, aggregation=SUM, name="v")
    with pytest.raises(AggregationError, match="non-DistributedValues value 1.0.*jnp.asarray"):
        strategy.run(lambda: v.assign(1.0))
    assert float(v.numpy()) == 0


@pytest.mark.parametrize("transform", [jax.jit, jax.grad, jax.checkpoint])
def test_a_merge_call_inside_of_a_transformation(transform):
    def inner(x):
        context().merge_call(lambda _: None)
        return x

    with pytest.raises(NestedTraceError, match="merge_call was called inside a JAX transformation"):
        mirrored(2).run(lambda: transform(inner)(1.0))


def test_a_distributed_value_that_was_not_passed():
    strategy = mirrored(2)
    v = variable(strategy, 0.0, aggregation=MEAN)
    value = distrib.PerReplica([jnp.float32(1), jnp.float32(2)])
    with pytest.raises(ContextError, match="used inside a step without being passed to it"):
        strategy.run(lambda: v.assign(value))


def test_combine_and_global_examples_of_equal_batches():
    strategy = mirrored(2)

    def step(x):
        program = distrib.context.current_program()
        return (
            program.by_examples.combine(x, "MEAN"),
            program.by_examples.combine(x, "SUM"),
            program.by_examples.global_examples(3),
        )

    x = strategy.experimental_distribute_values_from_function(
        lambda c: jnp.float32(c.replica_id_in_sync_group)
    )
    mean, total, examples = strategy.run(step, args=(x,))
    assert (local(strategy, mean), local(strategy, total), examples) == ([0.5, 0.5], [1, 1], 6)


def test_combine_and_global_examples_of_unequal_batches():
    strategy = mirrored(2)
    seen = []

    def step(x):
        program = distrib.context.current_program()
        seen.append(program.by_examples.global_examples(x.shape[0]))
        return program.by_examples.combine(x.mean(), "MEAN"), program.by_examples.combine(
            x.sum(), "SUM"
        )

    (x,) = strategy.experimental_distribute_dataset([np.float32([1, 2, 6])])
    mean, total = strategy.run(step, args=(x,))
    assert (local(strategy, mean), local(strategy, total)) == ([3, 3], [9, 9])
    assert set(seen) == {3}
