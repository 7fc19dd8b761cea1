"""``CentralStorageStrategy``: one copy of the variables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

import distrib
from tests.conformance.table import (
    Raises,
    case,
    central,
    context,
    outcome,
    per_replica,
    rid,
    values,
    variable,
)

_CPU = "/job:localhost/replica:0/task:0/device:CPU:"


@case(
    "central-basic",
    {
        "n": 2,
        "cls": "Variable",
        "workers": [f"{_CPU}0", f"{_CPU}1"],
        "params": [f"{_CPU}0"],
        "r": per_replica(4.0, 5.0),
        "red": 9.0,
        "dev": "device:CPU:0",
        "local": 1,
        "v": 4.0,
    },
    differs={
        "cls": "there is one class of variables",
        "params.0": "devices are named in full, as the workers are",
    },
)
def central_basic() -> Any:
    strategy = central()
    with strategy.scope():
        v = distrib.Variable(10.0)
        v.assign(4.0)
    result = strategy.run(lambda: v + rid())
    return {
        "n": strategy.num_replicas_in_sync,
        "cls": type(v).__name__,
        "workers": strategy.extended.worker_devices,
        "params": strategy.extended.parameter_devices,
        "r": result,
        "red": strategy.reduce("SUM", result, None),
        "dev": v.device.split("/")[-1],
        "local": len(strategy.experimental_local_results(v)),
        "v": v,
    }


NO_AGGREGATION = Raises(ValueError, "You must specify an aggregation method to update")


@case(
    "central-aggregation",
    {
        "NONE": {"assign": NO_AGGREGATION, "add": NO_AGGREGATION},
        "SUM": {"assign": 3.0, "add": 13.0},
        "MEAN": {"assign": 1.5, "add": 11.5},
        "ONLY_FIRST_REPLICA": {"assign": 1.0, "add": 11.0},
    },
    omits={
        f"{mode}.cls": "there is one class of variables"
        for mode in ("NONE", "SUM", "MEAN", "ONLY_FIRST_REPLICA")
    },
)
def central_aggregation() -> Any:
    strategy = central()

    def changed(mode: Any, change: Callable[[distrib.Variable], Any]) -> Any:
        v = variable(strategy, aggregation=mode)
        strategy.run(lambda: change(v))
        return v

    return {
        mode.name: {
            "assign": outcome(lambda mode=mode: changed(mode, lambda v: v.assign(rid() + 1.0))),
            "add": outcome(lambda mode=mode: changed(mode, lambda v: v.assign_add(rid() + 1.0))),
        }
        for mode in distrib.VariableAggregation
    }


@case(
    "central-reduce-gather-update",
    {
        "m": 7.2,
        "g": [1.0, 2.0, 3.0, 10.0, 20.0],
        "ar": per_replica(3.0, 3.0),
        "ag": per_replica([0.0, 1.0], [0.0, 1.0]),
        "up": 3.0,
        "mc": per_replica(3.0, 3.0),
        "plain": Raises(ValueError, "A non-DistributedValues value"),
        "default_n": 8,
    },
    differs={
        "mc": "what a step computes is a per-replica value, even where the replicas agree",
        "default_n": "by default every device of the default platform computes, CPUs too",
    },
)
def central_reduce_gather_update() -> Any:
    strategy = central()
    x = values(strategy, lambda i: jnp.array([[1.0, 2.0, 3.0], [10.0, 20.0]][i]))
    v = variable(strategy, 1.0)
    strategy.extended.update(v, lambda w, y: w.assign_add(y), args=(2.0,))

    def merged() -> Any:
        return context().merge_call(lambda st, y: st.reduce("SUM", y, None), args=(rid() + 1.0,))

    return {
        "m": strategy.reduce("MEAN", x, 0),
        "g": strategy.gather(x, 0),
        "ar": strategy.run(lambda: context().all_reduce("SUM", rid() + 1.0)),
        "ag": strategy.run(lambda: context().all_gather(jnp.ones([1]) * rid(), 0)),
        "up": v,
        "mc": strategy.run(merged),
        "plain": outcome(lambda: strategy.reduce("SUM", jnp.float32(2), None)),
        "default_n": distrib.CentralStorageStrategy().num_replicas_in_sync,
    }
