"""What ``run`` takes and returns."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

import distrib
from tests.conformance.table import (
    Raises,
    case,
    context,
    mirrored,
    outcome,
    per_replica,
    plain,
    rid,
    values,
    variable,
)


@case("run-outside-scope", per_replica(2.0, 4.0))
def run_outside_scope() -> Any:
    strategy = mirrored()
    x = values(strategy, lambda i: jnp.float32(i + 1))
    return strategy.run(lambda v: v * 2, args=(x,))


@case(
    "run-nested-structure",
    {
        "type": "dict",
        "a_type": "tuple",
        "a0": per_replica(0, 1),
        "a1": per_replica(0, 10),
        "b": None,
    },
)
def run_nested_structure() -> Any:
    def step() -> Any:
        i = context().replica_id_in_sync_group
        return {"a": (i, i * 10), "b": None}

    result = mirrored().run(step)
    return {
        "type": type(result).__name__,
        "a_type": type(result["a"]).__name__,
        "a0": result["a"][0],
        "a1": result["a"][1],
        "b": result["b"],
    }


@case(
    "run-order-of-python",
    {"with_merge": ["a0", "a1", "a2", "m", "b0", "b1", "b2"], "without": [0, 1, 2]},
    eagerly="a compiled step runs the Python code once, for all replicas",
)
def run_order_of_python() -> Any:
    strategy = mirrored(3)
    with_merge: list[str] = []
    without: list[int] = []

    def step() -> None:
        i = int(context().replica_id_in_sync_group)
        with_merge.append(f"a{i}")
        context().merge_call(lambda st: with_merge.append("m"))
        with_merge.append(f"b{i}")

    strategy.run(step)
    strategy.run(lambda: without.append(int(context().replica_id_in_sync_group)))
    return {"with_merge": with_merge, "without": without}


@case("run-returns-none", {"r": None})
def run_returns_none() -> Any:
    return {"r": mirrored().run(lambda: None)}


@case("run-plain-arg-broadcast", per_replica(15.0, 16.0))
def run_plain_arg_broadcast() -> Any:
    return mirrored().run(
        lambda a, b: a * b + rid(), args=(jnp.float32(5),), kwargs={"b": jnp.float32(3)}
    )


@case("run-list-of-distributed", per_replica(10.0, 11.0))
def run_list_of_distributed() -> Any:
    strategy = mirrored()
    x = values(strategy, lambda i: jnp.float32(i))
    return strategy.run(lambda d: d["k"][0] + d["k"][1], args=({"k": [x, jnp.float32(10)]},))


@case(
    "run-one-device-types",
    {
        "is_dv": False,
        "v": 4.0,
        "local_type": "tuple",
        "local": [4.0],
        "red": 4.0,
        "n": 1,
        "m1": False,
    },
    differs={"m1": "the class of arrays is JAX's: asked is whether it is a distributed value"},
)
def run_one_device_types() -> Any:
    strategy = distrib.OneDeviceStrategy("/cpu:0")
    result = strategy.run(lambda: jnp.float32(4))
    local = strategy.experimental_local_results(result)
    return {
        "is_dv": isinstance(result, distrib.DistributedValues),
        "v": result,
        "local_type": type(local).__name__,
        "local": local,
        "red": strategy.reduce("SUM", result, None),
        "n": strategy.num_replicas_in_sync,
        "m1": isinstance(mirrored(1).run(lambda: jnp.float32(4)), distrib.DistributedValues),
    }


@case("scope-yields", {"same": True})
def scope_yields() -> Any:
    strategy = mirrored()
    with strategy.scope() as yielded:
        return {"same": yielded is strategy}


@case(
    "local-results",
    {
        "pr": [1, 2],
        "var": [3.0, 3.0],
        "tensor": [9],
        "pyint": [5],
        "lst_len": 2,
        "lst_kind": "list",
        "tuple_type": "tuple",
    },
)
def local_results() -> Any:
    strategy = mirrored()
    v = variable(strategy, 3.0)
    x = values(strategy, lambda i: jnp.int32(i + 1))
    results = strategy.experimental_local_results
    return {
        "pr": results(x),
        "var": results(v),
        "tensor": results(jnp.int32(9)),
        "pyint": results(5),
        "lst_len": len(results([x, x])),
        "lst_kind": type(results([x, x])[0]).__name__,
        "tuple_type": type(results(x)).__name__,
    }


@case(
    "one-device",
    {
        "sn": [1.0, 2.0, 6.0],
        "mn": [1.0, 2.0, 6.0],
        "s0": 9.0,
        "m0": 3.0,
        "py": 5,
        "var": "Variable",
        "dev": "device:CPU:1",
        "add": 4.0,
        "ar": 2.0,
        "mc": 2.0,
        "upd": None,
        "v": 9.0,
        "bad": Raises(ValueError, "None is not a device"),
        "bad2": 1.0,
    },
    differs={
        "var": "there is one class of variables",
        "bad": "a device that does not exist is an error when the strategy is made",
    },
)
def one_device() -> Any:
    strategy = distrib.OneDeviceStrategy("/cpu:1")
    t = jnp.array([1.0, 2.0, 6.0])
    v = variable(strategy, 3.0, aggregation=distrib.VariableAggregation.SUM)

    def add() -> Any:
        strategy.run(lambda: v.assign_add(1.0))
        return v

    return {
        "sn": strategy.reduce("SUM", t, None),
        "mn": strategy.reduce("MEAN", t, None),
        "s0": strategy.reduce("SUM", t, 0),
        "m0": strategy.reduce("MEAN", t, 0),
        "py": strategy.reduce("SUM", 5, None),
        "var": type(v).__name__,
        "dev": v.device.split("/")[-1],
        "add": outcome(add),
        "ar": strategy.run(lambda: context().all_reduce("SUM", jnp.float32(2))),
        "mc": strategy.run(lambda: context().merge_call(lambda st, x: x + 1.0, args=(1.0,))),
        "upd": outcome(lambda: strategy.extended.update(v, lambda w: w.assign(9.0)) and None),
        "v": plain(v),
        "bad": outcome(lambda: distrib.OneDeviceStrategy(None)),
        "bad2": distrib.OneDeviceStrategy("CPU:7").run(lambda: jnp.float32(1)),
    }
