"""A training loop with its input, against the loop that someone would write by hand.

By hand: a NumPy permutation, slices of it, ``device_put`` to a ``NamedSharding``, and the jitted
step. Ours: ``experimental_distribute_dataset`` and ``run``. Target: at most 1.0 times as long,
since a thread loads ahead. A time is that of one epoch: shuffled batches of 128, the last, short
one dropped.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import models
import numpy as np
import optax
from alternating import Comparison, alternate, parser, report
from fresh_process import run_fresh
from jax.sharding import NamedSharding, PartitionSpec

import distrib

RATIO_AT_MOST = 1.0
MODELS = {"mlp": (models.mlp, models.mlp_params), "cnn": (models.cnn, models.cnn_params)}


def main() -> None:
    beside = Path(__file__).resolve().parents[2] / "shared" / "data" / "mnist"
    flags = parser(__doc__)
    flags.add_argument(
        "--data_dir",
        type=Path,
        default=beside if beside.is_dir() else None,
        help="folder of the gzipped IDX files of MNIST; random images without one",
    )
    flags.add_argument("--devices", default="1,2", help="numbers of virtual CPU devices, by commas")
    flags.add_argument("--models", default="mlp,cnn", help=f"of {', '.join(MODELS)}, by commas")
    flags.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = flags.parse_args()
    if args.child:
        print(json.dumps(epoch_time(args).as_json()))
        return
    print("images:", "random" if args.data_dir is None else f"MNIST in {args.data_dir}", flush=True)
    common = [__file__, "--child"]
    if args.quick:
        common.append("--quick")
    if args.data_dir is not None:
        common.append(f"--data_dir={args.data_dir}")
    results = [
        run_fresh([*common, f"--models={model}", f"--devices={count}"])
        for model, count in itertools.product(args.models.split(","), args.devices.split(","))
    ]
    report(results, args.json)


def epoch_time(args: argparse.Namespace) -> Comparison:
    """Compare a model's epochs on so many devices."""
    count = int(args.devices)
    distrib.config.set_logical_devices("CPU", count)
    strategy = distrib.MirroredStrategy([f"CPU:{i}" for i in range(count)])
    if args.data_dir is None:
        images, labels = models.random_images(60_000)
    else:
        images, labels = mnist(args.data_dir)
    # Shorter epochs give more rounds in the same time.
    examples = models.BATCH * (4 if args.quick else 200)
    images, labels = images[:examples], labels[:examples]
    apply, make_params = MODELS[args.models]
    loss, tx = models.mean_loss(apply), optax.sgd(models.LEARNING_RATE)
    compared = alternate(
        f"an epoch of {len(labels) // models.BATCH} steps, {args.models.upper()}, "
        f"{count} device{'s' if count > 1 else ''}",
        our_epochs(strategy, loss, tx, make_params(), images, labels),
        epochs_by_hand(strategy.extended.mesh, loss, tx, make_params(), images, labels),
        rounds=2 if args.quick else {"mlp": 60, "cnn": 12}[args.models],
        calls=1,
        most=None if args.quick else RATIO_AT_MOST,
    )
    print(compared.line(), flush=True)
    return compared


def our_epochs(
    strategy: distrib.Strategy,
    loss: models.Loss,
    tx: optax.GradientTransformation,
    params: models.Params,
    images: np.ndarray,
    labels: np.ndarray,
) -> Callable[[int], float]:
    """Return a function that trains for so many epochs and returns the seconds they took."""
    with strategy.scope():
        state = distrib.TrainState.create(apply_fn=None, params=params, tx=tx)
    dataset = strategy.experimental_distribute_dataset(
        (images, labels), batch_size=models.BATCH, shuffle=True, seed=0, drop_remainder=True
    )

    def step(x: Any, y: Any) -> jax.Array:
        value, grads = jax.value_and_grad(loss)(state.params, x, y)
        state.apply_gradients(grads=grads)
        return value

    def train(epochs: int) -> float:
        start = time.perf_counter()
        value = None
        for _ in range(epochs):
            for batch in dataset:
                value = strategy.run(step, args=batch)
        jax.block_until_ready(getattr(value, "whole", value))
        return time.perf_counter() - start

    return train


def epochs_by_hand(
    mesh: jax.sharding.Mesh,
    loss: models.Loss,
    tx: optax.GradientTransformation,
    params: models.Params,
    images: np.ndarray,
    labels: np.ndarray,
) -> Callable[[int], float]:
    """Return the same, written by hand."""
    everywhere = NamedSharding(mesh, PartitionSpec())
    split = NamedSharding(mesh, PartitionSpec(models.AXIS))
    step = models.hand_written_step(loss, tx, mesh)
    params = jax.device_put(params, everywhere)
    opt_state = jax.device_put(tx.init(params), everywhere)
    draw = np.random.default_rng(0)

    def train(epochs: int) -> float:
        nonlocal params, opt_state
        start = time.perf_counter()
        losses = None
        for _ in range(epochs):
            order = draw.permutation(len(labels))
            for begin in range(0, len(labels) - models.BATCH + 1, models.BATCH):
                rows = order[begin : begin + models.BATCH]
                x, y = jax.device_put((images[rows], labels[rows]), split)
                params, opt_state, losses = step(params, opt_state, x, y)
        jax.block_until_ready(losses)
        return time.perf_counter() - start

    return train


def mnist(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return the training images ``[60000, 784]`` from 0 to 1 and labels of MNIST."""
    with gzip.open(folder / "train-images-idx3-ubyte.gz") as file:
        images = np.frombuffer(file.read(), np.uint8, offset=16).reshape(-1, 784)
    with gzip.open(folder / "train-labels-idx1-ubyte.gz") as file:
        labels = np.frombuffer(file.read(), np.uint8, offset=8)
    return images.astype(np.float32) / 255, labels.astype(np.int32)


if __name__ == "__main__":
    main()
