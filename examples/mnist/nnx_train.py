"""Train a small CNN on MNIST with Flax NNX, on one device or on many.

    python nnx_train.py --strategy=mirrored --num_devices=2

NNX modules and optimizers are ordinary objects: they are passed to ``strategy.run``, and the step
changes them in place. The one line that NNX on one device does not have is the ``all_reduce``.
"""

import math
import time

import devices
import jax
import mnist_data
import optax
import progress
from absl import app, flags, logging
from flax import nnx

import distrib

_STRATEGIES = ("one_device", "mirrored", "central_storage")
_STRATEGY = flags.DEFINE_enum("strategy", "mirrored", _STRATEGIES, "How to spread the training.")
_DATA_DIR = flags.DEFINE_string("data_dir", None, "The four MNIST files; else they are fetched.")
_EPOCHS = flags.DEFINE_integer("epochs", 2, "How often to go through the data.", lower_bound=1)
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 120, "Examples a step, over all replicas.", 1)
_LEARNING_RATE = flags.DEFINE_float("learning_rate", 3e-3, "At the start; it falls to 0.", 0.0)
_SEED = flags.DEFINE_integer("seed", 0, "Of the weights, the shuffling and the dropout.", 0)
_TRAIN_EXAMPLES = flags.DEFINE_integer("train_examples", 0, "Use that many only; 0 for all.", 0)


class CNN(nnx.Module):
    """Two convolutions that halve the image each, and two dense layers."""

    def __init__(self, rngs: nnx.Rngs):
        self.conv1 = nnx.Conv(1, 32, (5, 5), strides=2, rngs=rngs)
        self.conv2 = nnx.Conv(32, 64, (5, 5), strides=2, rngs=rngs)
        self.dense1 = nnx.Linear(7 * 7 * 64, 128, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.dense2 = nnx.Linear(128, 10, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        x = nnx.relu(self.conv1(images))
        x = nnx.relu(self.conv2(x))
        x = nnx.relu(self.dense1(jax.lax.collapse(x, 1)))
        return self.dense2(self.dropout(x))


def make_strategy() -> distrib.Strategy:
    chosen = devices.from_flags()
    match _STRATEGY.value:
        case "one_device":
            return distrib.OneDeviceStrategy(chosen[0])
        case "central_storage":
            return distrib.CentralStorageStrategy(chosen)
        case _:
            return distrib.MirroredStrategy(chosen)


def train_step(
    model: CNN, optimizer: nnx.Optimizer, images: jax.Array, labels: jax.Array
) -> jax.Array:
    def mean_loss(model: CNN) -> tuple[jax.Array, jax.Array]:
        losses = optax.softmax_cross_entropy_with_integer_labels(model(images), labels)
        return losses.mean(), losses

    gradients, losses = nnx.grad(mean_loss, has_aux=True)(model)
    # Over the examples of all replicas; the train state of train.py does this by itself.
    gradients = distrib.nn.mean_over_examples(gradients)
    optimizer.update(model, gradients)
    return losses


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"nnx_train.py takes flags only, and got {argv[1:]}.")
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

    schedule = optax.cosine_decay_schedule(_LEARNING_RATE.value, _EPOCHS.value * steps)
    with strategy.scope():
        model = CNN(nnx.Rngs(_SEED.value))
        optimizer = nnx.Optimizer(model, optax.adam(schedule), wrt=nnx.Param)
        accuracy = distrib.metrics.Accuracy()

    def test_step(model: CNN, images: jax.Array, labels: jax.Array) -> None:
        accuracy.update_state(labels, model(images))

    for epoch in range(1, _EPOCHS.value + 1):
        model.train()
        start = time.perf_counter()
        for batch in progress.track(train_data, steps, f"Epoch {epoch}"):
            losses = strategy.run(train_step, args=(model, optimizer, *batch))
        loss = float(strategy.reduce("MEAN", losses, axis=0))
        speed = examples / (time.perf_counter() - start)

        model.eval()
        accuracy.reset_state()
        for batch in test_data:
            strategy.run(test_step, args=(model, *batch))
        result = f"test accuracy {accuracy.result():.2%}, {speed:,.0f} examples a second"
        logging.info("Epoch %d: loss %.4f, %s", epoch, loss, result)
    print(f"{strategy} ends with {result}")


if __name__ == "__main__":
    flags.FLAGS.set_default("verbosity", logging.INFO)
    app.run(main)
