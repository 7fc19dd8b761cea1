"""The cost of an uneven last batch, in ordinary steps.

A step over batches of 128 is trained until it is warm; then come batches of other sizes, whose
pieces differ by replica. Three figures, each over the median time of an ordinary step: the first
such call in the process, that of a further size (both with their compilation), and a later call of
a size that is known. Targets: at most 20 ordinary steps the first time, and 5 later.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import models
import numpy as np
import optax
from alternating import parser, report, timed
from fresh_process import run_fresh

import distrib

FIRST_AT_MOST = 20.0
LATER_AT_MOST = 5.0
# None divides over 2 or 4 replicas. The first is the last batch of MNIST, and one example.
SIZES = (97, 101, 89)
ENGINES = ("compiled", "threads", "threads, jitted gradient")


class Cnn(nn.Module):
    """The network of ``examples/mnist/train.py``, without its dropout."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Return logits ``[batch, 10]`` of images ``[batch, 784]``."""
        x = x.reshape(x.shape[0], 28, 28, 1)
        x = nn.relu(nn.Conv(32, (5, 5), strides=2)(x))
        x = nn.relu(nn.Conv(64, (5, 5), strides=2)(x))
        x = nn.relu(nn.Dense(128)(jax.lax.collapse(x, 1)))
        return nn.Dense(10)(x)


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--devices", default="2,4", help="numbers of virtual CPU devices, by commas")
    flags.add_argument("--models", default="mlp,cnn", help="of mlp, cnn, by commas")
    flags.add_argument(
        "--engine", default="compiled", choices=ENGINES, help="what runs the uneven batches"
    )
    flags.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = flags.parse_args()
    if args.child:
        print(json.dumps(measure(args)))
        return
    common = [__file__, "--child", f"--engine={args.engine}"]
    common += ["--quick"] if args.quick else []
    results = [
        run_fresh([*common, f"--models={model}", f"--devices={count}"])
        for model, count in itertools.product(args.models.split(","), args.devices.split(","))
    ]
    report(results, args.json)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Time one model on one number of devices, in a process of its own."""
    count, jits = int(args.devices), args.engine.endswith("jitted gradient")
    distrib.config.set_logical_devices("CPU", count)
    strategy = distrib.MirroredStrategy([f"CPU:{i}" for i in range(count)])
    step, state = training(strategy, args.models, jits=jits)
    ordinary, *uneven = (batch(strategy, size) for size in (models.BATCH, *SIZES))
    calls, rounds = (3, 2) if args.quick else (20, 15)

    def seconds(element: Any, calls: int) -> float:
        """Return what a call takes in a loop, from idle devices to idle devices."""
        jax.block_until_ready(state.params)
        run = timed(
            lambda: strategy.run(step, args=element), lambda _: jax.block_until_ready(state.params)
        )
        return run(calls) / calls

    for _ in range(2):
        seconds(ordinary, calls)
    step_time = statistics.median(seconds(ordinary, calls) for _ in range(rounds))
    distrib.config.run_functions_eagerly(args.engine.startswith("threads"))
    first, *further = (seconds(element, 1) for element in uneven)
    later = statistics.median(seconds(e, 1) for _ in range(rounds) for e in uneven)
    distrib.config.run_functions_eagerly(False)

    result = {
        "name": f"{args.engine}, {args.models.upper()}, {count} devices",
        "ordinary": step_time,
        "first": first,
        "further": statistics.median(further),
        "later": later,
    }
    steps = {name: result[name] / step_time for name in ("first", "further", "later")}
    print(
        f"{result['name']}: ordinary {step_time * 1e3:.2f} ms; "
        + ", ".join(
            f"{name} {result[name] * 1e3:.1f} ms = {steps[name]:.1f} steps" for name in steps
        )
        + f" (targets: first {verdict(steps['first'], FIRST_AT_MOST)}, later "
        f"{verdict(steps['later'], LATER_AT_MOST)})",
        flush=True,
    )
    return result


def training(
    strategy: distrib.Strategy, model: str, *, jits: bool
) -> tuple[Callable[..., Any], distrib.TrainState]:
    """Return a training step of a model, and its state."""
    apply: Callable[..., Any] = models.mlp
    params: Any = models.mlp_params()
    if model == "cnn":
        params = Cnn().init(jax.random.key(0), np.zeros((1, 784), np.float32))
        apply = Cnn().apply
    with strategy.scope():
        state = distrib.TrainState.create(
            apply_fn=apply, params=params, tx=optax.sgd(models.LEARNING_RATE)
        )
    gradient = jax.value_and_grad(models.mean_loss(apply))
    if jits:
        gradient = jax.jit(gradient)

    def step(x: Any, y: Any) -> jax.Array:
        value, grads = gradient(state.params, x, y)
        state.apply_gradients(grads=grads)
        return value

    return step, state


def batch(strategy: distrib.Strategy, size: int) -> Any:
    """Return one distributed batch of random images and labels."""
    data = models.random_images(size)
    return next(iter(strategy.experimental_distribute_dataset(data, batch_size=size)))


def verdict(steps: float, most: float) -> str:
    """Tell whether a target is met."""
    return f"at most {most:.0f} {'met' if steps <= most else 'MISSED'}"


if __name__ == "__main__":
    main()
