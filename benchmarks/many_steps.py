"""``train_loop``, which runs many steps in one program, against one call of ``run`` a step.

Target: at the size of MNIST (a perceptron 784-128-10), on 1 and 2 devices, at least 1.5 times the
steps a second. What can be saved is what a step costs beside its arithmetic, so batches of 32,
where that counts, have the target, and batches of 128 stand beside them.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import jax
import models
import optax
from alternating import Comparison, alternate, parser, report, timed
from fresh_process import run_fresh

import distrib

RATIO_AT_MOST = 1 / 1.5
STEPS = 50
CALLS = 4


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--devices", default="1,2", help="numbers of devices, by commas")
    flags.add_argument("--batches", default="32,128", help="global batch sizes, by commas")
    flags.add_argument("--kind", default="CPU", help="the kind of device; CPU devices are virtual")
    flags.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = flags.parse_args()
    if args.child:
        print(json.dumps(steps_time(args).as_json()))
        return
    common = [__file__, f"--kind={args.kind}", "--child", *(["--quick"] if args.quick else [])]
    results = [
        run_fresh([*common, f"--devices={count}", f"--batches={batch}"])
        for batch in args.batches.split(",")
        for count in args.devices.split(",")
    ]
    report(results, args.json)


def steps_time(args: argparse.Namespace) -> Comparison:
    """Compare loops over a dataset, input included; times are those of an epoch of 4 calls."""
    count, batch = int(args.devices), int(args.batches)
    if args.kind.upper() == "CPU":
        distrib.config.set_logical_devices("CPU", count)
    strategy = distrib.MirroredStrategy([f"{args.kind}:{i}" for i in range(count)])
    loss = models.mean_loss(models.mlp)
    tx = optax.sgd(models.LEARNING_RATE)
    with strategy.scope():
        state = distrib.TrainState.create(apply_fn=models.mlp, params=models.mlp_params(), tx=tx)

    def step(images_and_labels: Any) -> jax.Array:
        value, grads = jax.value_and_grad(loss)(state.params, *images_and_labels)
        state.apply_gradients(grads=grads)
        return value

    steps = 4 if args.quick else STEPS
    data = models.random_images(batch * steps * CALLS)
    dataset = strategy.experimental_distribute_dataset(data, batch_size=batch)

    def in_one_program() -> Any:
        iterator, result = iter(dataset), None
        for _ in range(CALLS):
            result = distrib.train_loop(step, iterator, steps)
        return result

    def one_by_one() -> Any:
        result = None
        for element in dataset:
            result = strategy.run(step, args=(element,))
        return result

    in_one_program(), one_by_one()
    compared = alternate(
        f"{CALLS} times {steps} steps, batch {batch}, {count} {args.kind} device"
        + ("s" if count > 1 else ""),
        timed(in_one_program, wait_for),
        timed(one_by_one, wait_for),
        rounds=2 if args.quick else 60,
        calls=1,
        most=RATIO_AT_MOST if batch <= 32 and not args.quick else None,
    )
    print(compared.line(), flush=True)
    return compared


def wait_for(result: Any) -> None:
    """Block until an output of a step is there."""
    jax.block_until_ready(getattr(result, "whole", result))


if __name__ == "__main__":
    main()
