"""N replicas compute what one device does: parameters after 50 steps, in float32.

The reference is plain JAX, Flax and Optax on one device, without distrib. Relative means: the
largest difference in a tensor over the largest value in it.
"""

import functools
import gzip
import math
import pathlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import distrib

STEPS = 50
TOLERANCE = 1e-5
EXAMPLES = 240

STRATEGIES = {
    "OneDevice": lambda n: distrib.OneDeviceStrategy("CPU:0"),
    "Mirrored": lambda n: distrib.MirroredStrategy([f"CPU:{i}" for i in range(n)]),
    "CentralStorage": lambda n: distrib.CentralStorageStrategy([f"CPU:{i}" for i in range(n)]),
}
OPTIMIZERS = {
    "SGD": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.02, momentum=0.9),
    "Adam": lambda: optax.adam(3e-3),
}
EVERY_OPTIMIZER = pytest.mark.parametrize("optimizer", OPTIMIZERS)
EVEN = [
    ("OneDevice", 1),
    *((name, n) for name in ("Mirrored", "CentralStorage") for n in (1, 2, 3, 4, 8)),
]


def flat(x):
    # With -1 for the length, a replica without examples would leave it undetermined.
    return x.reshape(x.shape[0], math.prod(x.shape[1:]))


class Mlp(nn.Module):
    """Two layers."""

    axis_name: str | None

    @nn.compact
    def __call__(self, x, train):
        x = nn.relu(nn.Dense(32)(flat(x)))
        return nn.Dense(10)(x)


class Cnn(nn.Module):
    """Two convolutions, each normalised over the batch, which is all replicas' examples.

    Nothing before a normalisation adds a constant: no bias, and no layer whose inputs do not vary
    with the image, as MNIST's black border. The true gradient of its weight would be zero, and
    Adam, which divides by the gradient's size, would make whole steps of the rounding error in its
    place.
    """

    axis_name: str | None

    @nn.compact
    def __call__(self, x, train):
        for features in (4, 8):
            x = nn.Conv(features, (3, 3), strides=2, use_bias=False)(x)
            x = nn.BatchNorm(use_running_average=not train, momentum=0.9, axis_name=self.axis_name)(
                x
            )
            x = nn.relu(x)
        return nn.Dense(10)(flat(x))


MODELS = {"MLP": Mlp, "CNN": Cnn}


def mnist_or_noise():
    """Return images ``[240, 14, 14, 1]`` and labels: MNIST's first, where it is at hand."""
    folder = pathlib.Path(__file__).resolve().parents[2] / "shared" / "data" / "mnist"
    if not folder.is_dir():
        rng = np.random.default_rng(0)
        images = rng.uniform(size=(EXAMPLES, 14, 14, 1)).astype(np.float32)
        return images, rng.integers(0, 10, EXAMPLES)
    with gzip.open(folder / "train-images-idx3-ubyte.gz") as file:
        file.read(16)
        pixels = np.frombuffer(file.read(EXAMPLES * 28 * 28), np.uint8)
    with gzip.open(folder / "train-labels-idx1-ubyte.gz") as file:
        file.read(8)
        labels = np.frombuffer(file.read(EXAMPLES), np.uint8)
    blocks = pixels.reshape(EXAMPLES, 14, 2, 14, 2, 1).astype(np.float32)
    return blocks.mean((2, 4)) / 255, labels.astype(np.int32)


@functools.cache
def dataset(size):
    images, labels = mnist_or_noise()
    return images[:size], labels[:size]


@functools.cache
def initial(model):
    return model(None).init(jax.random.key(0), dataset(EXAMPLES)[0][:1], train=False)


def loss_and_statistics(model, params, statistics, x, y, mean=jnp.mean):
    variables = {"params": params, **({"batch_stats": statistics} if statistics else {})}
    logits, updates = model.apply(variables, x, train=True, mutable=["batch_stats"])
    loss = mean(optax.softmax_cross_entropy_with_integer_labels(logits, y))
    return loss, updates.get("batch_stats")


@functools.cache
def on_one_device(model_name, optimizer, size, batch_size):
    """Train without distrib; return parameters, batch statistics and the loss of each step."""
    model, tx = MODELS[model_name](None), OPTIMIZERS[optimizer]()
    variables = initial(MODELS[model_name])
    params, statistics = variables["params"], variables.get("batch_stats")
    opt_state = tx.init(params)

    @jax.jit
    def step(params, statistics, opt_state, x, y):
        (loss, new_statistics), grads = jax.value_and_grad(
            lambda p: loss_and_statistics(model, p, statistics, x, y), has_aux=True
        )(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), new_statistics, opt_state, loss

    images, labels = dataset(size)
    losses = []
    while len(losses) < STEPS:
        for start in range(0, size, batch_size):
            batch = slice(start, start + batch_size)
            params, statistics, opt_state, loss = step(
                params, statistics, opt_state, images[batch], labels[batch]
            )
            losses.append(loss)
            if len(losses) == STEPS:
                break
    return jax.device_get((params, statistics, losses))


def on_replicas(strategy, model_name, optimizer, size, batch_size):
    """Train under a strategy; return the state and the loss of each step."""
    model = MODELS[model_name](distrib.REPLICA_AXIS)
    variables = initial(MODELS[model_name])
    with strategy.scope():
        state = distrib.TrainState.create(
            apply_fn=model.apply,
            params=variables["params"],
            batch_stats=variables.get("batch_stats"),
            tx=OPTIMIZERS[optimizer](),
        )

    def step(x, y):
        (loss, statistics), grads = jax.value_and_grad(
            lambda p: loss_and_statistics(model, p, state.batch_stats, x, y), has_aux=True
        )(state.params)
        changes = {} if statistics is None else {"batch_stats": statistics}
        state.apply_gradients(grads=grads, **changes)
        # Each replica's part of the mean over all examples, the last, uneven batch too.
        return distrib.nn.compute_average_loss(jnp.full(x.shape[:1], loss))

    batches = strategy.experimental_distribute_dataset(dataset(size), batch_size=batch_size)
    losses = []
    while len(losses) < STEPS:
        for batch in batches:
            losses.append(strategy.reduce("SUM", strategy.run(step, args=batch), axis=None))
            if len(losses) == STEPS:
                break
    return state, jax.device_get(losses)


def assert_close(got, expected, what):
    for (path, mine), theirs in zip(
        jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(expected), strict=True
    ):
        relative = np.abs(np.asarray(mine) - theirs).max() / np.abs(theirs).max()
        assert relative <= TOLERANCE, f"{what}{jax.tree_util.keystr(path)}: {relative:.1e}"


def check(kind, replicas, model, optimizer, size, batch_size):
    strategy = STRATEGIES[kind](replicas)
    assert strategy.num_replicas_in_sync == replicas
    state, losses = on_replicas(strategy, model, optimizer, size, batch_size)
    params, statistics, expected_losses = on_one_device(model, optimizer, size, batch_size)
    strategy.extended.assert_mirrored(state)
    strategy.extended.assert_mirrored((state.params, state.opt_state, state.batch_stats))
    assert int(state.step) == STEPS
    assert_close(state.params, params, "params")
    assert_close(state.batch_stats, statistics, "batch_stats")
    assert_close(losses, expected_losses, "loss of step ")
    assert np.abs(losses[0] - losses[-1]) > 0.1  # It does train.


@EVERY_OPTIMIZER
@pytest.mark.parametrize(("kind", "replicas"), EVEN)
def test_mlp(kind, replicas, optimizer):
    check(kind, replicas, "MLP", optimizer, EXAMPLES, 24)


@EVERY_OPTIMIZER
@pytest.mark.parametrize(("kind", "replicas"), EVEN)
def test_cnn_with_synchronised_batch_norm(kind, replicas, optimizer):
    check(kind, replicas, "CNN", optimizer, EXAMPLES, 24)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("replicas", [3, 8])
@pytest.mark.parametrize("kind", ["Mirrored", "CentralStorage"])
def test_batches_that_do_not_divide(kind, replicas, model):
    # Batches of 20, 20 and 10: 7, 7, 6 and 4, 4, 2 examples on three replicas; on eight
    # 3, 3, 3, 3, 3, 3, 2, 0 and 2, 2, 2, 2, 2, 0, 0, 0.
    check(kind, replicas, model, "momentum", 50, 20)


@pytest.mark.parametrize("replicas", [1, 3, 8])
@pytest.mark.parametrize("kind", ["Mirrored", "CentralStorage"])
@pytest.mark.parametrize(("last_batch", "counted"), [("drop", 40), ("pad", 50)])
def test_last_batches_that_are_dropped_or_padded(kind, replicas, last_batch, counted):
    """Batches of 20, 20 and 10, of which the last is left out, or filled up to 20."""
    strategy = STRATEGIES[kind](replicas)
    model = Mlp(distrib.REPLICA_AXIS)
    params = initial(Mlp)["params"]
    with strategy.scope():
        state = distrib.TrainState.create(
            apply_fn=model.apply, params=params, tx=OPTIMIZERS["momentum"]()
        )

    def step(batch, mask):
        def loss(params):
            mean = functools.partial(distrib.nn.masked_mean, mask=mask)
            return loss_and_statistics(
                model, params, None, *batch, jnp.mean if mask is None else mean
            )

        (value, _), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
        state.apply_gradients(grads=grads)
        return distrib.nn.mean_over_examples(value)

    options = distrib.InputOptions(last_batch=last_batch)
    batches = strategy.experimental_distribute_dataset(dataset(50), options, batch_size=20)
    losses = []
    while len(losses) < STEPS:
        for element in batches:
            args = element if last_batch == "pad" else (element, None)
            losses.append(strategy.experimental_local_results(strategy.run(step, args=args))[0])
            if len(losses) == STEPS:
                break
    params, _, expected_losses = on_one_device("MLP", "momentum", counted, 20)
    strategy.extended.assert_mirrored(state)
    assert_close(state.params, params, "params")
    assert_close(jax.device_get(losses), expected_losses, "loss of step ")
