"""What compressed gradients cost in accuracy: MNIST after the same steps, with and without.

Two replicas by default, a perceptron 784-128-10, batch 128 and SGD, from the same parameters and in
the same order of examples. ``bfloat16`` and ``int8`` are as ``cross_device_ops`` compresses;
``int8, no feedback`` reduces by a bare ``all_reduce``, which keeps nothing from step to step.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import models
import numpy as np
import optax
from alternating import parser, report

import distrib

ALGORITHMS = {
    "nccl": distrib.NcclAllReduce,
    "hierarchical": distrib.HierarchicalCopyAllReduce,
    "ring": distrib.RingAllReduce,
    "one_device": distrib.ReductionToOneDevice,
}
NO_FEEDBACK = "int8, no feedback"
RUNS = ("none", "bfloat16", "int8", NO_FEEDBACK)

Batch = tuple[np.ndarray, np.ndarray]


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--data_dir", help="the files of MNIST; else the example looks for them")
    flags.add_argument("--steps", type=int, default=400, help="training steps")
    flags.add_argument("--devices", type=int, default=2, help="replicas, on virtual CPU devices")
    flags.add_argument("--algorithm", choices=ALGORITHMS, default="nccl", help="of the all-reduce")
    flags.add_argument("--seeds", type=int, default=3, help="repetitions, of other parameters")
    args = flags.parse_args()
    if args.quick:
        args.steps, args.seeds = min(args.steps, 5), 1
    distrib.config.set_logical_devices("CPU", args.devices)
    train, test = read(args)
    results = [measure(name, train, test, args) for name in RUNS]
    print(
        f"{args.steps} steps, {args.devices} replicas, {args.algorithm}, {args.seeds} seeds:\n"
        f"{'compression':18} {'accuracy':>8} {'loss':>8} {'away':>8} {'us a step':>9}"
    )
    exact = results[0]["params"]
    for result in results:
        result["away"] = distance(result.pop("params"), exact)
        print(
            f"{result['name']:18} {result['accuracy']:8.4f} {result['loss']:8.4f} "
            f"{result['away']:8.1e} {result['step'] * 1e6:9.0f}"
        )
    print("away: the distance of the parameters from those without compression, over their norm")
    report(results, args.json)


def measure(name: str, train: Batch, test: Batch, args: argparse.Namespace) -> dict[str, Any]:
    """Train with one compression, once for each seed."""
    runs = [trained(name, seed, train, args) for seed in range(args.seeds)]
    tested = [evaluated(params, *test) for params, _ in runs]
    return {
        "name": name,
        "accuracy": float(np.mean([accuracy for accuracy, _ in tested])),
        "loss": float(np.mean([loss for _, loss in tested])),
        "step": float(np.median([seconds for _, seconds in runs])),
        "params": [params for params, _ in runs],
    }


def trained(
    name: str, seed: int, train: Batch, args: argparse.Namespace
) -> tuple[models.Params, float]:
    """Train; return the parameters, and the seconds that a step took on average."""
    compression = None if name == "none" else name.partition(",")[0]
    strategy = distrib.MirroredStrategy(
        [f"CPU:{i}" for i in range(args.devices)],
        cross_device_ops=ALGORITHMS[args.algorithm](compression=compression),
    )
    loss = models.mean_loss(models.mlp)
    with strategy.scope():
        state = distrib.TrainState.create(
            apply_fn=models.mlp,
            params=models.mlp_params(seed),
            tx=optax.sgd(models.LEARNING_RATE),
        )

    def step(x: Any, y: Any) -> jax.Array:
        value, grads = jax.value_and_grad(loss)(state.params, x, y)
        if name == NO_FEEDBACK:
            grads = distrib.get_replica_context().all_reduce("MEAN", grads)
            state.apply_gradients(grads=grads, aggregation=None)
        else:
            state.apply_gradients(grads=grads)
        return value

    seconds = timed_steps(strategy, step, batches(train, seed), args.steps)
    return jax.device_get(state.params), seconds


def timed_steps(
    strategy: distrib.Strategy, step: Callable[..., Any], data: Iterator[Batch], steps: int
) -> float:
    """Run steps, the first of which compiles and is not timed."""
    start = time.perf_counter()
    for i in range(steps):
        x, y = next(data)
        dataset = strategy.experimental_distribute_dataset((x, y), batch_size=models.BATCH)
        (batch,) = dataset
        value = strategy.run(step, args=batch)
        if i == 0:
            jax.block_until_ready(value.values)
            start = time.perf_counter()
    jax.block_until_ready(value.values)
    return (time.perf_counter() - start) / max(1, steps - 1)


def batches(train: Batch, seed: int) -> Iterator[Batch]:
    """Yield batches of shuffled examples, for ever."""
    images, labels = train
    draw = np.random.default_rng(seed)
    while True:
        order = draw.permutation(len(images))
        for start in range(0, len(order) - models.BATCH + 1, models.BATCH):
            chosen = order[start : start + models.BATCH]
            yield images[chosen], labels[chosen]


@jax.jit
def _logits(params: models.Params, images: jax.Array) -> jax.Array:
    return models.mlp(params, images)


def evaluated(params: models.Params, images: np.ndarray, labels: np.ndarray) -> tuple[float, float]:
    """Return accuracy and mean loss on the test set."""
    logits = _logits(params, jnp.asarray(images))
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.asarray(labels))
    return float((logits.argmax(-1) == labels).mean()), float(losses.mean())


def distance(params: list[models.Params], exact: list[models.Params]) -> float:
    """Return how far parameters are from others, relative to their norm, over all seeds."""
    off = [
        optax.global_norm(jax.tree.map(np.subtract, mine, theirs)) / optax.global_norm(theirs)
        for mine, theirs in zip(params, exact, strict=True)
    ]
    return float(np.mean(off))


def read(args: argparse.Namespace) -> tuple[Batch, Batch]:
    """Return the training and the test set, images as rows ``[784]``; noise for ``--quick``."""
    if args.quick and args.data_dir is None:
        return models.random_images(1024), models.random_images(256, seed=1)
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples" / "mnist"))
    import mnist_data

    data = mnist_data.load(args.data_dir)
    print(data.source)
    return (
        (data.train_images.reshape(-1, 784), data.train_labels),
        (data.test_images.reshape(-1, 784), data.test_labels),
    )


if __name__ == "__main__":
    main()
