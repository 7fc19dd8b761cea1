"""``Mean`` and ``Sum``: the states are aggregated over the replicas, never the results."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distrib
from tests.support.strategies import central, mirrored, on_every_strategy


def make(strategy, kind=distrib.metrics.Mean):
    with strategy.scope():
        return kind()


def feed(strategy, fn, data, batch_size):
    for batch in strategy.experimental_distribute_dataset(data, batch_size=batch_size):
        strategy.run(fn, args=batch if isinstance(batch, tuple) else (batch,))


@pytest.mark.parametrize("make_strategy", [mirrored, central])
@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
@pytest.mark.parametrize("batch_size", [10, 4, 3])
def test_ten_values_on_any_number_of_replicas(make_strategy, replicas, batch_size):
    strategy = make_strategy(replicas)
    mean, total = make(strategy), make(strategy, distrib.metrics.Sum)

    def step(x):
        mean.update_state(x)
        total.update_state(x)

    feed(strategy, step, np.arange(10, dtype=np.float32), batch_size)
    assert float(mean.result()) == 4.5
    assert float(total.result()) == 45.0
    assert float(mean.count) == 10.0


@on_every_strategy
def test_valid_counts_that_differ_by_replica(make_strategy):
    strategy = make_strategy()
    mean = make(strategy)
    # On two replicas: three of three right, and none of one.
    right = np.array([1, 1, 1, 0, 0, 0, 0, 0], np.float32)
    valid = np.array([1, 1, 1, 0, 1, 0, 0, 0], np.float32)
    feed(strategy, mean.update_state, (right, valid), 8)
    assert float(mean.result()) == 0.75


def test_a_hundred_losses_of_one_and_ten_of_two():
    strategy = mirrored(2)
    mean = make(strategy)

    def step():
        replica = distrib.get_replica_context().replica_id_in_sync_group
        mean.update_state(1.0 + replica, sample_weight=jnp.where(replica == 0, 100.0, 10.0))

    strategy.run(step)
    assert float(mean.result()) == pytest.approx(1.0909, abs=5e-5)


@on_every_strategy
def test_before_there_are_values_and_after_a_reset(make_strategy):
    strategy = make_strategy()
    mean, total = make(strategy), make(strategy, distrib.metrics.Sum)
    assert (float(mean.result()), float(total.result())) == (0.0, 0.0)
    feed(strategy, mean.update_state, np.array([1, 2, 3, 6], np.float32), 4)
    assert float(mean.result()) == 3.0
    mean.reset_state()
    assert float(mean.result()) == 0.0
    feed(strategy, mean.update_state, np.array([5, 7], np.float32), 4)
    assert float(mean.result()) == 6.0


@on_every_strategy
def test_weights_of_zero(make_strategy):
    strategy = make_strategy()
    mean = make(strategy)
    feed(strategy, mean.update_state, (np.ones(4, np.float32), np.zeros(4, np.float32)), 4)
    assert float(mean.result()) == 0.0


@on_every_strategy
def test_a_scalar_counts_once_for_each_replica(make_strategy):
    strategy = make_strategy()
    mean, total = make(strategy), make(strategy, distrib.metrics.Sum)

    def step():
        mean.update_state(2.0)
        total.update_state(2.0)

    strategy.run(step)
    assert float(mean.result()) == 2.0
    assert float(total.result()) == 2.0 * strategy.num_replicas_in_sync


def test_weights_broadcast_from_the_first_axis():
    mean = distrib.metrics.Mean()
    mean.update_state(jnp.array([[1.0, 2.0], [3.0, 5.0]]), sample_weight=jnp.array([1.0, 3.0]))
    assert float(mean.result()) == (3 + 24) / 8
    mean.update_state(jnp.array([True, False]))
    assert float(mean.result()) == pytest.approx(28 / 10)


@on_every_strategy
def test_outside_of_a_step_on_one_replica_and_in_a_step_under_grad_on_all(make_strategy):
    strategy = make_strategy()
    mean = make(strategy)

    def step(x):
        value, gradient = jax.value_and_grad(lambda w: (w * x).sum())(2.0)
        mean.update_state(value)
        return gradient

    feed(strategy, step, np.ones(4, np.float32), 4)
    assert float(mean.result()) == 8.0 / strategy.num_replicas_in_sync


def test_outside_of_every_strategy():
    mean = distrib.metrics.Mean(name="loss")
    mean.update_state([1.0, 3.0])
    mean.update_state(5.0)
    assert float(mean.result()) == 3.0
    assert [v.name for v in mean.distributed_variables()] == ["loss/total", "loss/count"]
    mean.reset_state()
    assert float(mean.result()) == 0.0


def test_the_metric_may_be_an_argument():
    strategy = mirrored(2)
    traces = []

    def step(metric, x):
        traces.append(metric)
        metric.update_state(x)

    first, second = make(strategy), make(strategy)
    for metric in (first, second, first):
        strategy.run(step, args=(metric, jnp.ones(3)))
    assert float(first.count) == 12.0
    assert float(second.count) == 6.0
    assert len(traces) == 2
