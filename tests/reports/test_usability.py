"""Faults that users reported of other systems: usability, with the right values.

Each must not exist here. The number is the row in the table of reports that the project keeps.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import distrib
from tests.support.strategies import central, mirrored, on_every_strategy
from tests.support.training import run_epoch


@on_every_strategy
def test_a_mirrored_variable_reads_the_same_in_both_contexts(make_strategy):
    """Row 82: it was unclear what is read where."""
    strategy = make_strategy()
    with strategy.scope():
        v = distrib.Variable([1.0, 2.0], aggregation=distrib.VariableAggregation.MEAN)

    def step(x):
        v.assign_add(x)
        return v.read_value()

    for expected in ([2.0, 3.0], [3.0, 4.0]):
        parts = strategy.experimental_local_results(strategy.run(step, args=(jnp.ones(2),)))
        assert len(parts) == strategy.num_replicas_in_sync
        for part in parts:
            np.testing.assert_array_equal(part, expected)
        np.testing.assert_array_equal(v.read_value(), expected)
        for part in strategy.experimental_local_results(v):
            np.testing.assert_array_equal(part, expected)


class Ordinary(nn.Module):
    """A layer of each ordinary kind."""

    @nn.compact
    def __call__(self, images, words):
        x = nn.Conv(4, (3, 3), strides=2)(images)
        x = nn.BatchNorm(use_running_average=False, axis_name=distrib.REPLICA_AXIS)(x)
        x = jnp.concatenate([nn.relu(x).mean((1, 2)), nn.Embed(10, 4)(words).mean(1)], axis=-1)
        return nn.Dense(3)(x)


def trained(strategy):
    """Return the state after three steps over 12 examples in batches of 4."""
    model = Ordinary()
    rng = np.random.default_rng(0)
    images = rng.normal(size=(12, 6, 6, 1)).astype(np.float32)
    words = rng.integers(0, 10, (12, 5), np.int32)
    labels = rng.integers(0, 3, 12, np.int32)
    with mirrored(1).scope():
        variables = model.clone().init(jax.random.key(0), images[:1], words[:1])
    with strategy.scope():
        state = distrib.TrainState.create(
            apply_fn=model.apply,
            params=variables["params"],
            batch_stats=variables["batch_stats"],
            tx=optax.sgd(0.1, momentum=0.9),
        )

    def step(batch):
        images, words, labels = batch

        def loss(params):
            logits, updates = state.apply_fn(
                {"params": params, "batch_stats": state.batch_stats},
                images,
                words,
                mutable=["batch_stats"],
            )
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            return losses.mean(), updates["batch_stats"]

        (_, statistics), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
        state.apply_gradients(grads=grads, batch_stats=statistics)

    run_epoch(strategy, step, (images, words, labels), 4)
    return state


@pytest.mark.parametrize("replicas", [2, 3])
def test_central_storage_runs_ordinary_layers_on_one_device(replicas):
    """Row 83: it failed with ordinary layers. Variables stay on the one device for storage."""
    strategy = central(replicas)
    state, reference = trained(strategy), trained(mirrored(replicas))
    for got, expected in zip(
        jax.tree.leaves((state.params, state.batch_stats)),
        jax.tree.leaves((reference.params, reference.batch_stats)),
        strict=True,
    ):
        np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6)
    home = jax.devices("cpu")[0]
    for variable in state.distributed_variables():
        (copy,) = variable.values
        assert copy.devices() == {home}, variable.name
