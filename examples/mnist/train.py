"""Train a small CNN on MNIST with Flax, on one device or on many.

    python train.py --strategy=mirrored --num_devices=2

One line decides where the training runs: the one that makes the strategy. All else is the same for
one device, for many, and for variables that live on another device than the replicas.
"""

import math
import time

import devices
import flax.linen as nn
import jax
import mnist_data
import optax
import progress
from absl import app, flags, logging

import distrib

_STRATEGIES = ("one_device", "mirrored", "central_storage")
_STRATEGY = flags.DEFINE_enum("strategy", "mirrored", _STRATEGIES, "How to spread the training.")
_DATA_DIR = flags.DEFINE_string("data_dir", None, "The four MNIST files; else they are fetched.")
_EPOCHS = flags.DEFINE_integer("epochs", 2, "How often to go through the data.", lower_bound=1)
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 120, "Examples a step, over all replicas.", 1)
_LEARNING_RATE = flags.DEFINE_float("learning_rate", 3e-3, "At the start; it falls to 0.", 0.0)
_SEED = flags.DEFINE_integer("seed", 0, "Of the weights, the shuffling and the dropout.", 0)
_TRAIN_EXAMPLES = flags.DEFINE_integer("train_examples", 0, "Use that many only; 0 for all.", 0)


class CNN(nn.Module):
    """Two convolutions that halve the image each, and two dense layers."""

    @nn.compact
    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        x = nn.relu(nn.Conv(32, (5, 5), strides=2)(images))
        x = nn.relu(nn.Conv(64, (5, 5), strides=2)(x))
        x = nn.relu(nn.Dense(128)(jax.lax.collapse(x, 1)))
        x = nn.Dropout(0.3, deterministic=not train)(x)
        return nn.Dense(10)(x)


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
        raise app.UsageError(f"train.py takes flags only, and got {argv[1:]}.")
    strategy = make_strategy()
    digits = mnist_data.load(_DATA_DIR.value)
    examples = min(_TRAIN_EXAMPLES.value or math.inf, len(digits.train_labels))
    steps = math.ceil(examples / _BATCH_SIZE.value)
    logging.info("%s trains on %s examples of %s", strategy, f"{examples:,}", digits.source)

    # Each batch is cut into a piece for each replica. Each loop over a dataset is an epoch.
    train_data = strategy.experimental_distribute_dataset(
        (digits.train_images[:examples], digits.train_labels[:examples]),
        batch_size=_BATCH_SIZE.value,
        shuffle=True,
        seed=_SEED.value,
    )
    test_data = strategy.experimental_distribute_dataset(
        (digits.test_images, digits.test_labels), batch_size=1000
    )

    # Variables made in the scope live where the strategy puts them.
    init_key, dropout_key = jax.random.split(jax.random.key(_SEED.value))
    model = CNN()
    schedule = optax.cosine_decay_schedule(_LEARNING_RATE.value, _EPOCHS.value * steps)
    with strategy.scope():
        state = distrib.TrainState.create(
            apply_fn=model.apply,
            params=model.init(init_key, digits.test_images[:1], train=False)["params"],
            tx=optax.adam(schedule),
            keys={"dropout": dropout_key},
        )
        accuracy = distrib.metrics.Accuracy()

    # A step is what one replica does with its piece of a batch.
    def train_step(images: jax.Array, labels: jax.Array) -> jax.Array:
        def mean_loss(params: dict) -> tuple[jax.Array, jax.Array]:
            logits = state.apply_fn({"params": params}, images, train=True, rngs=state.keys)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            return losses.mean(), losses

        gradients, losses = jax.grad(mean_loss, has_aux=True)(state.params)
        state.apply_gradients(grads=gradients)  # Their mean over the replicas.
        return losses

    def test_step(images: jax.Array, labels: jax.Array) -> None:
        accuracy.update_state(labels, state.apply_fn({"params": state.params}, images, train=False))

    for epoch in range(1, _EPOCHS.value + 1):
        start = time.perf_counter()
        for batch in progress.track(train_data, steps, f"Epoch {epoch}"):
            losses = strategy.run(train_step, args=batch)
        # What a replica returned is its own: reduce brings the replicas together.
        loss = float(strategy.reduce("MEAN", losses, axis=0))
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
