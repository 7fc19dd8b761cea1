"""The reference of ``tf_mirrored.py``: tf.distribute's MirroredStrategy, driven over stdin.

Runs in an interpreter that has TensorFlow and need not have JAX. Arguments: the number of replicas,
and ``loop``, ``keras`` or ``lean``. Prints ``ready VERSION``; then for each line with a number of
steps, the seconds that so many steps took.

All steps are a perceptron 784-128-10 with SGD, batch 128, in one ``tf.function``. ``keras`` is the
one of TensorFlow's tutorial on custom training: a Keras model and optimizer. ``loop`` is the
tutorial's loop around it: a shuffled ``tf.data`` pipeline of arrays, and the losses reduced in each
step. ``lean`` is the fastest step found: plain variables with aggregation MEAN, which reduce what
each replica subtracts.
"""

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import tensorflow as tf  # noqa: E402 - reads the level of its log when it is imported

BATCH = 128
LEARNING_RATE = 0.1
LOOP_EXAMPLES = 100 * BATCH

Step = Callable[[Any, Any], Any]


def keras_step(strategy: tf.distribute.Strategy) -> Step:
    with strategy.scope():
        model = tf.keras.Sequential(
            [
                tf.keras.Input((784,)),
                tf.keras.layers.Dense(128, activation="relu"),
                tf.keras.layers.Dense(10),
            ]
        )
        optimizer = tf.keras.optimizers.SGD(LEARNING_RATE)
        optimizer.build(model.trainable_variables)

    def step(x, y):
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x, training=True))
            loss = tf.nn.compute_average_loss(losses, global_batch_size=BATCH)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    return step


def lean_step(strategy: tf.distribute.Strategy) -> Step:
    draw = np.random.default_rng(0)
    with strategy.scope():
        w1, b1, w2, b2 = variables = [
            tf.Variable(
                draw.normal(scale=0.05, size=shape).astype(np.float32),
                aggregation=tf.VariableAggregation.MEAN,
            )
            for shape in ((784, 128), (128,), (128, 10), (10,))
        ]

    def step(x, y):
        with tf.GradientTape() as tape:
            logits = tf.nn.relu(x @ w1 + b1) @ w2 + b2
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits)
            loss = tf.reduce_mean(losses)
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(LEARNING_RATE * gradient)
        return loss

    return step


def main() -> None:
    replicas, kind = int(sys.argv[1]), sys.argv[2]
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration() for _ in range(replicas)],
    )
    strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])
    step = {"lean": lean_step}.get(kind, keras_step)(strategy)

    @tf.function
    def distributed_step(x, y):
        losses = strategy.run(step, args=(x, y))
        return strategy.reduce("SUM", losses, axis=None) if kind == "loop" else losses

    examples = LOOP_EXAMPLES if kind == "loop" else BATCH
    draw = np.random.default_rng(0)
    images = draw.random((examples, 784), np.float32)
    labels = draw.integers(0, 10, examples, np.int32)
    dataset = tf.data.Dataset.from_tensor_slices((images, labels))
    if kind == "loop":
        dataset = dataset.shuffle(examples)
    distributed = strategy.experimental_distribute_dataset(dataset.batch(BATCH))
    batches = endless(distributed)
    batch = next(batches)
    print("ready", tf.__version__, flush=True)
    for line in sys.stdin:
        result = None
        start = time.perf_counter()
        for _ in range(int(line)):
            result = distributed_step(*(next(batches) if kind == "loop" else batch))
        for loss in strategy.experimental_local_results(result):
            loss.numpy()
        print(time.perf_counter() - start, flush=True)


def endless(dataset: Iterable[Any]) -> Iterator[Any]:
    while True:
        yield from dataset


if __name__ == "__main__":
    main()
