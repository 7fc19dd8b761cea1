"""The cost of ``strategy.run``, against the same step as a hand-written jitted ``shard_map``.

Targets: the step of a perceptron 784-128-10, batch 128, takes at most 1.05 times as long, on 1, 2
and 4 devices; and a call with 200 variables takes at most 30 us more of Python.
"""

from __future__ import annotations

import argparse
import cProfile
import itertools
import json
import pstats
from collections.abc import Callable
from typing import Any

import jax
import models
import numpy as np
import optax
from alternating import Comparison, alternate, parser, report, timed
from fresh_process import run_fresh
from jax.sharding import NamedSharding, PartitionSpec

import distrib

RATIO_AT_MOST = 1.05
PYTHON_AT_MOST = 30e-6
NUM_VARIABLES = 200


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--devices", default="1,2,4", help="numbers of devices, by commas")
    flags.add_argument("--kind", default="CPU", help="the kind of device; CPU devices are virtual")
    flags.add_argument(
        "--profile", action="store_true", help="always show where Python spends time"
    )
    flags.add_argument("--child", choices=("step", "python"), help=argparse.SUPPRESS)
    args = flags.parse_args()
    if args.child:
        measure = {"step": step_time, "python": python_time}[args.child]
        print(json.dumps(measure(args).as_json()))
        return
    common = [__file__, f"--kind={args.kind}"]
    common += [f"--{name}" for name in ("quick", "profile") if getattr(args, name)]
    results = [
        run_fresh([*common, "--child=step", f"--devices={count}"])
        for count in args.devices.split(",")
    ]
    results.append(run_fresh([*common, "--child=python", "--devices=1"]))
    report(results, args.json)


def step_time(args: argparse.Namespace) -> Comparison:
    """Compare the loop over one batch that lies on the devices already."""
    count = int(args.devices)
    strategy = mirrored(args.kind, count)
    loss = models.mean_loss(models.mlp)
    tx = optax.sgd(models.LEARNING_RATE)
    images, labels = models.random_images(models.BATCH)
    with strategy.scope():
        state = distrib.TrainState.create(apply_fn=models.mlp, params=models.mlp_params(), tx=tx)

    def step(x: Any, y: Any) -> jax.Array:
        value, grads = jax.value_and_grad(loss)(state.params, x, y)
        state.apply_gradients(grads=grads)
        return value

    dataset = strategy.experimental_distribute_dataset((images, labels), batch_size=models.BATCH)
    batch = next(iter(dataset))

    mesh = strategy.extended.mesh
    by_hand = models.hand_written_step(loss, tx, mesh)
    everywhere = NamedSharding(mesh, PartitionSpec())
    params = jax.device_put(models.mlp_params(), everywhere)
    opt_state = jax.device_put(tx.init(params), everywhere)
    x, y = jax.device_put((images, labels), NamedSharding(mesh, PartitionSpec(models.AXIS)))

    def reference() -> jax.Array:
        nonlocal params, opt_state
        params, opt_state, losses = by_hand(params, opt_state, x, y)
        return losses

    compared = alternate(
        f"run, MLP, {count} {args.kind} device{'s' if count > 1 else ''}",
        timed(lambda: strategy.run(step, args=batch), wait_for),
        timed(reference, wait_for),
        rounds=2 if args.quick else 200,
        calls=5 if args.quick else 40,
        most=None if args.quick else RATIO_AT_MOST,
    )
    print(compared.line(), flush=True)
    return compared


def python_time(args: argparse.Namespace) -> Comparison:
    """Compare what the calling thread spends on a step that changes 200 small variables."""
    strategy = mirrored(args.kind, 1)
    tx = optax.sgd(models.LEARNING_RATE)
    # TrainState adds a variable of its own, the step; SGD has no state.
    values = {f"v{i:03}": np.zeros((), np.float32) for i in range(NUM_VARIABLES)}
    with strategy.scope():
        state = distrib.TrainState.create(apply_fn=None, params=values, tx=tx)

    def step(x: jax.Array) -> jax.Array:
        state.apply_gradients(grads=jax.tree.map(lambda p: p + x, state.params))
        return x

    everywhere = NamedSharding(strategy.extended.mesh, PartitionSpec())
    x = jax.device_put(np.float32(1.0), everywhere)
    params = jax.device_put(values, everywhere)
    opt_state = jax.device_put(tx.init(params), everywhere)
    steps = jax.device_put(np.int32(0), everywhere)

    def step_by_hand(params: Any, opt_state: Any, steps: Any, x: Any) -> tuple[Any, ...]:
        grads = jax.tree.map(lambda p: p + x, params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, steps + 1, x

    none = PartitionSpec()
    mapped = jax.shard_map(
        step_by_hand,
        mesh=strategy.extended.mesh,
        in_specs=(none,) * 4,
        out_specs=(none,) * 4,
        check_vma=False,
    )
    by_hand = jax.jit(mapped, donate_argnums=(0, 1, 2))

    def reference() -> jax.Array:
        nonlocal params, opt_state, steps
        params, opt_state, steps, out = by_hand(params, opt_state, steps, x)
        return out

    def ours() -> jax.Array:
        return strategy.run(step, args=(x,))

    compared = alternate(
        f"Python of a call, {NUM_VARIABLES} variables",
        timed(ours, wait_for, each=True),
        timed(reference, wait_for, each=True),
        rounds=2 if args.quick else 200,
        calls=5 if args.quick else 40,
        difference_most=None if args.quick else PYTHON_AT_MOST,
    )
    print(compared.line(), flush=True)
    if args.profile or compared.met is False:
        show_profile(ours, calls=2000)
    return compared


def mirrored(kind: str, count: int) -> distrib.Strategy:
    """Return a MirroredStrategy of ``count`` devices, virtual ones if they are CPUs."""
    if kind.upper() == "CPU":
        distrib.config.set_logical_devices("CPU", count)
    return distrib.MirroredStrategy([f"{kind}:{i}" for i in range(count)])


def wait_for(result: Any) -> None:
    """Block until an output of a step is there."""
    jax.block_until_ready(getattr(result, "whole", result))


def show_profile(call: Callable[[], Any], calls: int) -> None:
    """Print where a call spends its Python time; the profiler itself makes it look slower."""
    profile = cProfile.Profile()
    for _ in range(calls):
        profile.enable()
        result = call()
        profile.disable()
        wait_for(result)
    print("Own time a call under cProfile, the 15 largest:")
    stats: Any = pstats.Stats(profile)
    by_own_time = sorted(stats.stats.items(), key=lambda item: -item[1][2])
    for (path, line, name), (_, count, own, _, _) in itertools.islice(by_own_time, 15):
        place = "/".join(path.rsplit("/", 2)[-2:])
        print(f"  {own / calls * 1e6:7.2f} us  {count / calls:6.1f} calls  {name} ({place}:{line})")


if __name__ == "__main__":
    main()
