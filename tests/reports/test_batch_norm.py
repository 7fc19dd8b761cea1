"""Faults that users reported of other systems: batch normalisation, with the right values.

Each must not exist here. The number is the row in the table of reports that the project keeps.
"""

import flax.linen as nn
import flax.serialization
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import distrib
from tests.support.strategies import central, mirrored, on_every_strategy, on_two_replicas
from tests.support.training import run_epoch


def normalizing(strategy, axis_name, **options):
    """Return a state with batch statistics 0 and 1, and a step that updates them."""
    model = nn.BatchNorm(use_running_average=False, momentum=0.9, axis_name=axis_name, **options)
    with strategy.scope():
        state = distrib.TrainState.create(
            apply_fn=model.apply,
            params={"scale": jnp.ones(1), "bias": jnp.zeros(1)},
            batch_stats={"mean": jnp.zeros(1), "var": jnp.ones(1)},
            tx=optax.sgd(0.1),
        )

    def step(x):
        variables = {"params": state.params, "batch_stats": state.batch_stats}
        y, updates = state.apply_fn(variables, x, mutable=["batch_stats"])
        state.replace(batch_stats=updates["batch_stats"])
        return y

    return state, step


FOUR = np.array([[0], [2], [4], [6]], np.float32)


def moving(state):
    return [float(state.batch_stats[name][0]) for name in ("mean", "var")]


@on_every_strategy
def test_synchronised_batch_statistics(make_strategy):
    """Row 22: mean 3 and variance 5 of all examples, however they are split."""
    strategy = make_strategy()
    state, step = normalizing(strategy, distrib.REPLICA_AXIS)
    (y,) = run_epoch(strategy, step, FOUR, 4)
    expected = (FOUR - 3) / np.sqrt(5 + 1e-5)
    np.testing.assert_allclose(strategy.gather(y, axis=0), expected, rtol=1e-5)
    assert moving(state) == pytest.approx([0.3, 1.4])


@on_two_replicas
def test_local_batch_statistics_are_averaged(make_strategy):
    """Row 22: local means 1 and 5, variances 1 and 1."""
    strategy = make_strategy()
    state, step = normalizing(strategy, None)
    (y,) = run_epoch(strategy, step, FOUR, 4)
    np.testing.assert_allclose(strategy.gather(y, axis=0).ravel(), [-1, 1, -1, 1], rtol=1e-4)
    assert moving(state) == pytest.approx([0.3, 1.0])


@on_two_replicas
def test_saved_batch_statistics_are_the_aggregate(make_strategy):
    """Row 23: it was unclear whose moving statistics were saved; never replica 0's 0.1."""
    strategy = make_strategy()
    state, step = normalizing(strategy, None)
    run_epoch(strategy, step, FOUR, 4)
    strategy.extended.assert_mirrored(state)
    strategy.extended.assert_mirrored(state.batch_stats)
    saved = flax.serialization.to_bytes(state)

    one = distrib.OneDeviceStrategy("CPU:0")
    restored, _ = normalizing(one, None)
    flax.serialization.from_bytes(restored, saved)
    assert moving(restored) == pytest.approx([0.3, 1.0])


@pytest.mark.parametrize("make_strategy", [mirrored, central])
def test_batch_statistics_of_groups_of_replicas(make_strategy):
    """Row 25: groups of two of four replicas have the means [1, 1, 5, 5]."""
    strategy = make_strategy(4)
    pairs = [[0, 1], [2, 3]]
    state, step = normalizing(strategy, distrib.REPLICA_AXIS, axis_index_groups=pairs)
    (y,) = run_epoch(strategy, step, FOUR, 4)
    # The variance of each pair is 1, so that what was taken off is left.
    means = FOUR - np.asarray(strategy.gather(y, axis=0)) * np.sqrt(1 + 1e-5)
    np.testing.assert_allclose(means.ravel(), [1, 1, 5, 5], rtol=1e-5)
    assert moving(state) == pytest.approx([0.3, 1.0])
    strategy.extended.assert_mirrored(state)
