"""Faults that users reported of other systems: randomness, with the right values.

Each must not exist here. The number is the row in the table of reports that the project keeps.
"""

import re

import flax.linen as nn
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import distrib
from tests.support.strategies import central, mirrored, on_every_strategy, on_two_replicas
from tests.support.training import run_epoch


def dropping(strategy):
    """Return a state with a dropout key, and a step that returns which of 1,000 ones it dropped."""
    with strategy.scope():
        state = distrib.TrainState.create(
            apply_fn=nn.Dropout(0.5, deterministic=False).apply,
            params={"w": 0.0},
            keys={"dropout": jax.random.key(7)},
            tx=optax.sgd(0.1),
        )

    def step():
        y = state.apply_fn({}, jnp.ones(1000), rngs=state.keys)
        state.apply_gradients(grads={"w": jnp.ones(())})
        return y == 0

    return state, step


def masks(strategy, step, count):
    """Return the masks of ``count`` steps, ``[step, replica, 1000]``."""
    results = [strategy.run(step) for _ in range(count)]
    return np.array(
        [[np.asarray(m) for m in strategy.experimental_local_results(r)] for r in results]
    )


@on_two_replicas
def test_dropout_masks_differ_by_replica_and_step_and_are_reproducible(make_strategy):
    """Row 26: one seed gave one mask everywhere."""
    strategy = make_strategy()
    _, step = dropping(strategy)
    three = masks(strategy, step, 3)
    assert 420 <= (three[0, 0] != three[0, 1]).sum() <= 580
    assert 420 <= (three[0, 0] != three[1, 0]).sum() <= 580
    assert 420 <= three[0, 0].sum() <= 580
    again, step_again = dropping(strategy)
    np.testing.assert_array_equal(masks(strategy, step_again, 1), three[:1])
    saved = flax.serialization.to_bytes(again)

    resumed, resumed_step = dropping(make_strategy())
    flax.serialization.from_bytes(resumed, saved)
    np.testing.assert_array_equal(
        masks(resumed.distributed_variables()[0].distribute_strategy, resumed_step, 2), three[1:]
    )


@on_every_strategy
def test_a_model_with_dropout_trains_and_its_counter_advances_once(make_strategy):
    """Row 27: the state of the seed had no aggregation rule."""
    strategy = make_strategy()
    with strategy.scope():
        state = distrib.TrainState.create(
            apply_fn=nn.Sequential([nn.Dense(3), nn.Dropout(0.5, deterministic=False)]).apply,
            params={"layers_0": {"kernel": jnp.ones((2, 3)), "bias": jnp.zeros(3)}},
            keys={"dropout": jax.random.key(7)},
            tx=optax.adam(0.1),
        )

    def step(x):
        def loss(params):
            return state.apply_fn({"params": params}, x, rngs=state.keys).mean()

        state.apply_gradients(grads=jax.grad(loss)(state.params))

    run_epoch(strategy, step, np.ones((4, 2), np.float32), 4)
    assert int(state.step) == 1
    assert np.isfinite(state.params["layers_0"]["kernel"]).all()
    for variable in state.distributed_variables():
        if not jnp.issubdtype(variable.dtype, jnp.inexact):
            assert variable.aggregation is distrib.VariableAggregation.ONLY_FIRST_REPLICA


@pytest.mark.parametrize("make_strategy", [mirrored, central])
@pytest.mark.parametrize("replicas", [2, 4])
def test_dropout_adds_no_collective(make_strategy, replicas):
    """Row 30: the generator was replicated and resharded, which made two devices slower than one.

    Nothing is gathered, and there are as many collectives with dropout as without.
    """
    strategy = make_strategy(replicas)

    def collectives(rate):
        layers = [nn.Dense(8), nn.Dropout(rate, deterministic=False), nn.Dense(2)]
        model = nn.Sequential(layers)
        key = jax.random.key(0)
        with strategy.scope():
            state = distrib.TrainState.create(
                apply_fn=model.apply,
                params=model.init({"params": key, "dropout": key}, jnp.ones((1, 4)))["params"],
                keys={"dropout": key},
                tx=optax.adam(0.1),
            )

        def step(x):
            def loss(params):
                return state.apply_fn({"params": params}, x, rngs=state.keys).mean()

            state.apply_gradients(grads=jax.grad(loss)(state.params))

        data = np.ones((8, 4), np.float32)
        (batch,) = strategy.experimental_distribute_dataset(data, batch_size=8)
        text = strategy.extended.compiled_text(step, (batch,))
        assert ("rng" in text or "xor" in text) == (rate > 0)  # The masks are drawn in the step.
        found = re.findall(r"\b(all-[a-z-]+|collective-[a-z-]+|reduce-scatter)\(", text)
        assert found
        assert not [name for name in found if name.startswith("all-gather")]
        return sorted(found)

    assert collectives(0.5) == collectives(0.0)
