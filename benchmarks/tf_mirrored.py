"""A training step under our MirroredStrategy, against tf.distribute's.

Target: at least 3 times its steps a second. Measured three times: ``loop``, the training loop of
TensorFlow's tutorial on custom training, with its input and the reduction of the losses; ``keras``,
the step of that tutorial alone, on a batch that lies on the devices already; and ``lean``, without
a target, the leanest TensorFlow step that we know, likewise. TensorFlow lives in a process of its
own, which stands still while ours runs, and may be another interpreter's (``--tf_python``).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import models
import optax
from alternating import Comparison, alternate, parser, report, timed
from fresh_process import run_fresh

import distrib

RATIO_AT_MOST = 1 / 3
LOOP_BATCHES = 100
REFERENCES = ("loop", "keras", "lean")


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--tf_python", default=sys.executable, help="an interpreter with TensorFlow")
    flags.add_argument("--devices", default="2", help="numbers of virtual CPU devices, by commas")
    flags.add_argument("--child", choices=(*REFERENCES, "none"), help=argparse.SUPPRESS)
    args = flags.parse_args()
    if args.child:
        print(json.dumps(step_time(args).as_json()))
        return
    references = REFERENCES
    if not has_tensorflow(args.tf_python):
        print(f"{args.tf_python} has no TensorFlow (see --tf_python): ours only.", flush=True)
        references = ("none",)
    common = [__file__, f"--tf_python={args.tf_python}"]
    if args.quick:
        common.append("--quick")
    results = [
        run_fresh([*common, f"--devices={count}", f"--child={reference}"])
        for count in args.devices.split(",")
        for reference in references
    ]
    report(results, args.json)


def has_tensorflow(python: str) -> bool:
    """Tell whether an interpreter can find TensorFlow; it is not imported."""
    program = "import importlib.util, sys; sys.exit(importlib.util.find_spec('tensorflow') is None)"
    return subprocess.run([python, "-c", program], check=False).returncode == 0


def step_time(args: argparse.Namespace) -> Comparison:
    """Time our step, and TensorFlow's unless ``--child=none``."""
    count = int(args.devices)
    distrib.config.set_logical_devices("CPU", count)
    strategy = distrib.MirroredStrategy([f"CPU:{i}" for i in range(count)])
    loss = models.mean_loss(models.mlp)
    with strategy.scope():
        state = distrib.TrainState.create(
            apply_fn=None, params=models.mlp_params(), tx=optax.sgd(models.LEARNING_RATE)
        )

    def step(x: Any, y: Any) -> jax.Array:
        value, grads = jax.value_and_grad(loss)(state.params, x, y)
        state.apply_gradients(grads=grads)
        return value

    in_loop = args.child == "loop"
    dataset = strategy.experimental_distribute_dataset(
        models.random_images(models.BATCH * (LOOP_BATCHES if in_loop else 1)),
        batch_size=models.BATCH,
        shuffle=in_loop,
    )
    batches = endless(dataset)
    batch = next(batches)

    def loop_call() -> Any:
        return strategy.reduce("MEAN", strategy.run(step, args=next(batches)), axis=None)

    def step_call() -> Any:
        return strategy.run(step, args=batch)

    def wait_for(result: Any) -> None:
        jax.block_until_ready(getattr(result, "whole", result))

    ours = timed(loop_call if in_loop else step_call, wait_for)
    rounds, calls = (2, 5) if args.quick else (60, 50)
    name = f"MLP step, {count} CPU device{'s' if count > 1 else ''}"
    if args.child == "none":
        ours(calls)
        compared = Comparison(name, [ours(calls) / calls for _ in range(rounds)], ())
    else:
        with TensorFlow(args.tf_python, count, args.child) as tensorflow:
            compared = alternate(
                f"{name}, {args.child} of TensorFlow {tensorflow.version}",
                ours,
                tensorflow.seconds,
                rounds=rounds,
                calls=calls,
                most=None if args.quick or args.child == "lean" else RATIO_AT_MOST,
            )
    line = compared.line()
    if compared.reference:
        line += f"; {1 / compared.ratio:.2f} times its steps a second"
    print(line, flush=True)
    return compared


def endless(dataset: Iterable[Any]) -> Iterator[Any]:
    """Go through the epochs of a dataset for ever."""
    while True:
        yield from dataset


class TensorFlow:
    """The process of the reference, for the length of a ``with`` block.

    Args:
      python: its interpreter.
      replicas: how many replicas it trains.
      step: which step, see ``tf_worker.py``.
    """

    def __init__(self, python: str, replicas: int, step: str):
        worker = Path(__file__).with_name("tf_worker.py")
        self._process = subprocess.Popen(
            [python, str(worker), str(replicas), step],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.version = self._answer().removeprefix("ready ")

    def seconds(self, calls: int) -> float:
        """Run so many steps and return the seconds they took."""
        stdin = self._process.stdin
        if stdin is None:
            raise RuntimeError("the TensorFlow process has no stdin")
        stdin.write(f"{calls}\n")
        stdin.flush()
        return float(self._answer())

    def _answer(self) -> str:
        stdout = self._process.stdout
        line = stdout.readline() if stdout else ""
        if not line:
            raise RuntimeError(f"the TensorFlow process ended with status {self._process.wait()}")
        return line.strip()

    def __enter__(self) -> TensorFlow:
        return self

    def __exit__(self, *_: Any) -> None:
        self._process.communicate()  # closes its stdin, at which it ends


if __name__ == "__main__":
    main()
