"""Train a small network on MNIST with nothing but ``distrib.Variable``: no Flax, no Optax.

    python custom_loop.py --strategy=mirrored --num_devices=2

Where ``train.py`` leaves the update to a train state, this script writes it out: the replicas add
their gradients, and each assigns the same new values.
"""

import math
import time

import devices
import jax
import jax.numpy as jnp
import mnist_data
import numpy as np
import progress
from absl import app, flags, logging

import distrib

_STRATEGIES = ("one_device", "mirrored", "central_storage")
_STRATEGY = flags.DEFINE_enum("strategy", "mirrored", _STRATEGIES, "How to spread the training.")
_DATA_DIR = flags.DEFINE_string("data_dir", None, "The four MNIST files; else they are fetched.")
_EPOCHS = flags.DEFINE_integer("epochs", 2, "How often to go through the data.", lower_bound=1)
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 120, "Examples a step, over all replicas.", 1)
_LEARNING_RATE = flags.DEFINE_float("learning_rate", 0.2, "At the start; it falls to 0.", 0.0)
_MOMENTUM = flags.DEFINE_float("momentum", 0.9, "How much of the last update goes on.", 0.0)
_SEED = flags.DEFINE_integer("seed", 0, "Of the weights and the shuffling.", 0)
_TRAIN_EXAMPLES = flags.DEFINE_integer("train_examples", 0, "Use that many only; 0 for all.", 0)

_SIZES = (784, 128, 10)


def initial_params(seed: int) -> dict[str, np.ndarray]:
    """Draw weights of He's variance, and zero biases."""
    rng = np.random.default_rng(seed)
    params = {}
    for i, (inputs, outputs) in enumerate(zip(_SIZES, _SIZES[1:], strict=False)):
        params[f"w{i}"] = rng.normal(0, math.sqrt(2 / inputs), (inputs, outputs)).astype("float32")
        params[f"b{i}"] = np.zeros(outputs, np.float32)
    return params


def network(params: dict[str, jax.Array], images: jax.Array) -> jax.Array:
    """Return the logits ``[batch, 10]`` of ``images``."""
    hidden = jax.nn.relu(jax.lax.collapse(images, 1) @ params["w0"] + params["b0"])
    return hidden @ params["w1"] + params["b1"]


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the loss of each example."""
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1)[:, 0]


def make_strategy() -> distrib.Strategy:
    chosen = devices.from_flags()
    match _STRATEGY.value:
        case "one_device":
            return distrib.OneDeviceStrategy(chosen[0])
        case "central_storage":
            return distrib.CentralStorageStrategy(chosen)
        case _:
            return distrib.MirroredStrategy(chosen)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"custom_loop.py takes flags only, and got {argv[1:]}.")
    strategy = make_strategy()
    digits = mnist_data.load(_DATA_DIR.value)
    examples = min(_TRAIN_EXAMPLES.value or math.inf, len(digits.train_labels))
    steps = math.ceil(examples / _BATCH_SIZE.value)
    logging.info("%s trains on %s examples of %s", strategy, f"{examples:,}", digits.source)

    train_data = strategy.experimental_distribute_dataset(
        (digits.train_images[:examples], digits.train_labels[:examples]),
        batch_size=_BATCH_SIZE.value,
        shuffle=True,
        seed=_SEED.value,
    )
    test_data = strategy.experimental_distribute_dataset(
        (digits.test_images, digits.test_labels), batch_size=1000
    )

    # The replicas may assign different values, so a variable has to know what to make of them.
    def variable(name: str, value: np.ndarray) -> distrib.Variable:
        return distrib.Variable(value, name=name, aggregation=distrib.VariableAggregation.MEAN)

    with strategy.scope():
        initial = initial_params(_SEED.value)
        params = {name: variable(name, value) for name, value in initial.items()}
        velocity = {name: variable(name, np.zeros_like(v)) for name, v in initial.items()}
        accuracy = distrib.metrics.Accuracy()

    def train_step(images: jax.Array, labels: jax.Array, learning_rate: jax.Array) -> jax.Array:
        # This replica's part of the mean over the whole batch: the parts add up to the mean, also
        # where the replicas have unequally many examples.
        def loss_part(params: dict[str, jax.Array]) -> jax.Array:
            return distrib.nn.compute_average_loss(cross_entropy(network(params, images), labels))

        # To jax.grad a variable is its value.
        loss, gradients = jax.value_and_grad(loss_part)(params)
        gradients = distrib.get_replica_context().all_reduce("SUM", gradients)
        for name, gradient in gradients.items():
            velocity[name].assign(_MOMENTUM.value * velocity[name] + gradient)
            params[name].assign_sub(learning_rate * velocity[name])
        return loss

    def test_step(images: jax.Array, labels: jax.Array) -> None:
        accuracy.update_state(labels, network(params, images))

    step = 0
    for epoch in range(1, _EPOCHS.value + 1):
        start = time.perf_counter()
        for images, labels in progress.track(train_data, steps, f"Epoch {epoch}"):
            part_left = 1 - step / (_EPOCHS.value * steps)
            learning_rate = _LEARNING_RATE.value * part_left
            loss = strategy.run(train_step, args=(images, labels, learning_rate))
            step += 1
        loss = float(strategy.reduce("SUM", loss, axis=None))
        speed = examples / (time.perf_counter() - start)

        accuracy.reset_state()
        for batch in test_data:
            strategy.run(test_step, args=batch)
        result = f"test accuracy {accuracy.result():.2%}, {speed:,.0f} examples a second"
        logging.info("Epoch %d: loss %.4f, %s", epoch, loss, result)
    print(f"{strategy} ends with {result}")


if __name__ == "__main__":
    flags.FLAGS.set_default("verbosity", logging.INFO)
    app.run(main)
