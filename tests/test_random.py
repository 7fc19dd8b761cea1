"""Keys differ by replica and step, and depend on nothing else."""

import jax
import numpy as np
import pytest

import distrib
from tests.support.strategies import central, mirrored, on_every_strategy, on_two_replicas


def data(key):
    return np.asarray(jax.random.key_data(key))


def per_replica(strategy, value):
    return [np.asarray(part) for part in strategy.experimental_local_results(value)]


@on_every_strategy
@pytest.mark.parametrize("step", [0, 7])
def test_replica_key_folds_in_step_and_replica(make_strategy, step):
    key = jax.random.key(3)
    strategy = make_strategy()

    def draw(step):
        return jax.random.key_data(distrib.random.replica_key(key, step))

    for replica, mine in enumerate(per_replica(strategy, strategy.run(draw, args=(step,)))):
        expected = jax.random.fold_in(jax.random.fold_in(key, step), replica)
        np.testing.assert_array_equal(mine, data(expected))


def test_outside_of_every_strategy_it_is_the_key_of_replica_0():
    key = jax.random.key(3)
    expected = data(jax.random.fold_in(jax.random.fold_in(key, 2), 0))
    np.testing.assert_array_equal(data(distrib.random.replica_key(key, 2)), expected)
    with mirrored(2).scope():
        np.testing.assert_array_equal(data(distrib.random.replica_key(key, 2)), expected)


def test_a_raw_key_stays_raw():
    raw = jax.random.PRNGKey(3)
    folded = distrib.random.replica_key(raw, 1)
    assert (folded.shape, folded.dtype) == (raw.shape, raw.dtype)
    np.testing.assert_array_equal(folded, data(distrib.random.replica_key(jax.random.key(3), 1)))


def test_no_two_replicas_or_steps_share_a_key():
    strategy = mirrored(8)
    key = jax.random.key(0)

    def draw(step):
        return jax.random.key_data(distrib.random.replica_key(key, step))

    seen = {
        tuple(mine)
        for step in range(8)
        for mine in per_replica(strategy, strategy.run(draw, args=(step,)))
    }
    assert len(seen) == 64


@pytest.mark.parametrize("make_strategy", [mirrored, central])
def test_the_first_replica_draws_what_one_device_draws(make_strategy):
    def first_draw(strategy):
        key = jax.random.key(1)
        value = strategy.run(lambda: jax.random.normal(distrib.random.replica_key(key, 4), (3,)))
        return per_replica(strategy, value)[0]

    np.testing.assert_array_equal(first_draw(make_strategy(4)), first_draw(make_strategy(1)))


@on_two_replicas
def test_a_traced_step_and_a_key_as_an_argument(make_strategy):
    strategy = make_strategy()
    with strategy.scope():
        count = distrib.Variable(0, aggregation=distrib.VariableAggregation.ONLY_FIRST_REPLICA)

    def draw(key):
        mine = distrib.random.replica_key(key, count.value())
        count.assign_add(1)
        return jax.random.key_data(mine)

    key = jax.random.key(2)
    for step in range(3):
        for replica, mine in enumerate(strategy.run(draw, args=(key,)).values):
            expected = jax.random.fold_in(jax.random.fold_in(key, step), replica)
            np.testing.assert_array_equal(mine, data(expected))
