"""Layers of every kind on batches that leave replicas with fewer examples, or with none.

Parameters after two steps equal those of one device. With dropout, which each replica draws for
itself, they are finite.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import distrib
from tests.support.strategies import central, mirrored

INPUT = (6,)


def embedded(x):
    ids = (jnp.abs(x[:, :3]) * 3).astype(jnp.int32) % 7
    return nn.Embed(7, 5)(ids).mean(1)


def convolved(x):
    x = nn.relu(nn.Conv(3, (3,))(x[..., None]))
    return jax.lax.collapse(nn.max_pool(x, (2,), (2,)), 1)


def recurrent(x):
    return nn.RNN(nn.LSTMCell(4))(x.reshape(x.shape[0], 2, 3))[:, -1]


def scanned(x):
    return jax.lax.scan(lambda c, _: (jnp.tanh(c * 0.5), None), nn.Dense(6)(x), None, length=3)[0]


LAYERS = {
    "embedding": embedded,
    "convolution": convolved,
    "recurrent": recurrent,
    "scan": scanned,
    "layer norm": lambda x: nn.LayerNorm()(nn.Dense(6)(x)),
    "group norm": lambda x: nn.GroupNorm(2)(nn.Dense(6)(x)),
    "weight norm": lambda x: nn.WeightNorm(nn.Dense(6))(x),
    "rematerialised": lambda x: nn.remat(nn.Dense)(6)(x),
    "unit length": lambda x: nn.Dense(6)(x / jnp.linalg.norm(x, axis=-1, keepdims=True)),
}


class Model(nn.Module):
    """Some layer, and a classifier."""

    layer: str
    axis_name: str | None = None

    @nn.compact
    def __call__(self, x):
        if self.layer == "batch norm":
            x = nn.Dense(6, use_bias=False)(x)
            x = nn.BatchNorm(use_running_average=False, axis_name=self.axis_name)(x)
        elif self.layer == "dropout":
            x = nn.Dropout(0.5, deterministic=False)(nn.Dense(6)(x))
        else:
            x = LAYERS[self.layer](x)
        return nn.Dense(4)(x)


def trained(strategy, layer, examples, axis_name=None):
    """Return parameters and batch statistics after two steps over one batch."""
    key = jax.random.key(0)
    variables = Model(layer).init({"params": key, "dropout": key}, jnp.ones((2, *INPUT)))
    model = Model(layer, axis_name)
    with strategy.scope():
        state = distrib.TrainState.create(
            apply_fn=model.apply,
            params=variables["params"],
            batch_stats=variables.get("batch_stats"),
            keys={"dropout": key},
            tx=optax.sgd(0.5),
        )

    def step(x, y):
        def loss(params):
            fixed = {} if state.batch_stats is None else {"batch_stats": state.batch_stats}
            logits, updates = state.apply_fn(
                {"params": params, **fixed}, x, rngs=state.keys, mutable=["batch_stats"]
            )
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
            return losses.mean(), updates

        grads, updates = jax.grad(loss, has_aux=True)(state.params)
        state.apply_gradients(grads=grads, **updates)

    rng = np.random.default_rng(0)
    x = rng.normal(size=(examples, *INPUT)).astype(np.float32)
    y = rng.integers(0, 4, examples, np.int32)
    (batch,) = strategy.experimental_distribute_dataset([(x, y)])
    for _ in range(2):
        strategy.run(step, args=batch)
    strategy.extended.assert_mirrored(state)
    return jax.device_get((state.params, state.batch_stats))


@functools.cache
def expected(layer, examples):
    return trained(distrib.OneDeviceStrategy("CPU:0"), layer, examples)


def assert_close(got, reference):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(reference), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("layer", [*LAYERS, "batch norm"])
def test_layers_train_as_on_one_device(layer):
    """Five examples over four replicas: 2, 2, 1 and none."""
    axis_name = distrib.REPLICA_AXIS if layer == "batch norm" else None
    assert_close(trained(mirrored(4), layer, 5, axis_name), expected(layer, 5))


@pytest.mark.parametrize("layer", ["convolution", "unit length"])
def test_layers_train_with_central_storage_on_one_example(layer):
    assert_close(trained(central(4), layer, 1), expected(layer, 1))


@pytest.mark.parametrize("layer", ["convolution", "unit length"])
def test_layers_train_in_threads_as_on_one_device(layer, request):
    """Three examples over four replicas: one each, and none."""
    reference = expected(layer, 3)
    request.getfixturevalue("eagerly")
    assert_close(trained(mirrored(4), layer, 3), reference)


@pytest.mark.parametrize("examples", [1, 3])
def test_dropout_stays_finite(examples):
    for leaf in jax.tree.leaves(trained(mirrored(4), "dropout", examples)):
        assert np.isfinite(leaf).all()
