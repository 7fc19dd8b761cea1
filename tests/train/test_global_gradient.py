"""Optimizers in a train state see the gradient of all replicas, not of one."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import distrib
from tests.support.strategies import on_every_strategy, on_two_replicas

pytestmark = pytest.mark.usefixtures("engine")


def create(strategy, tx, w):
    with strategy.scope():
        return distrib.TrainState.create(apply_fn=None, params={"w": w}, tx=tx)


def run(strategy, step, data):
    (batch,) = strategy.experimental_distribute_dataset(data, batch_size=len(data))
    return strategy.run(step, args=(batch,))


@on_every_strategy
def test_clip_by_global_norm(make_strategy):
    """Row 3 of the reports: the mean of [30, 0] and [0, 4] is clipped, not each of them."""
    strategy = make_strategy()
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
    state = create(strategy, tx, jnp.zeros(2))
    data = np.repeat(np.array([[30, 0], [0, 4]], np.float32), 2, axis=0)
    run(strategy, lambda x: state.apply_gradients(grads={"w": x.mean(0)}), data)
    np.testing.assert_allclose(state.params["w"], [-0.9912, -0.1322], atol=5e-5)


@on_every_strategy
def test_multi_steps(make_strategy):
    """Row 8: step means 1 and 3, on two replicas out of 0 and 2, and 2 and 4."""
    strategy = make_strategy()
    state = create(strategy, optax.MultiSteps(optax.sgd(0.1), 2), 0.0)
    adam = create(strategy, optax.MultiSteps(optax.adam(0.1), 2), 0.0)

    def step(x):
        grads = {"w": x.mean()}
        state.apply_gradients(grads=grads)
        adam.apply_gradients(grads=grads)

    run(strategy, step, np.array([0, 0, 2, 2], np.float32))
    assert float(state.params["w"]) == 0.0
    run(strategy, step, np.array([2, 2, 4, 4], np.float32))
    assert float(state.params["w"]) == pytest.approx(-0.2)
    assert int(adam.opt_state.inner_opt_state[0].count) == 1
    assert int(adam.step) == 2


@on_two_replicas
@pytest.mark.parametrize("where", [0, 3])
def test_apply_if_finite(make_strategy, where):
    """What is not finite on one replica alone skips the update on all of them."""
    strategy = make_strategy()
    state = create(strategy, optax.apply_if_finite(optax.adam(0.5), 5), 1.0)

    def step(x):
        state.apply_gradients(grads={"w": x.mean()})

    bad = np.ones(4, np.float32)
    bad[where] = np.nan
    run(strategy, step, bad)
    assert float(state.params["w"]) == 1.0
    assert int(state.opt_state.total_notfinite) == 1
    assert int(state.opt_state.inner_state[0].count) == 0
    strategy.extended.assert_mirrored(state)
    run(strategy, step, np.ones(4, np.float32))
    assert float(state.params["w"]) == pytest.approx(0.5, abs=1e-4)
    assert int(state.opt_state.inner_state[0].count) == 1
    strategy.extended.assert_mirrored(state)
