"""``reduce``: over replicas, and over an axis as well."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

import distrib
from tests.conformance.table import (
    Raises,
    case,
    mirrored,
    mirrored_value,
    outcome,
    plain,
    rid,
    values,
    variable,
)

CANNOT_ADD = Raises(ValueError, "cannot be added with axis=")
ONE_FOR_ALL = Raises(ValueError, "A non-DistributedValues value .* cannot be reduced")


@case(
    "reduce-uneven-axis0",
    {"sum0": 36.0, "mean0": 7.2, "mean_neg1": 7.2, "sum_none": CANNOT_ADD, "mean_none": CANNOT_ADD},
)
def reduce_uneven_axis0() -> Any:
    strategy = mirrored()
    x = values(strategy, lambda i: jnp.array([[1.0, 2.0, 3.0], [10.0, 20.0]][i]))
    return {
        "sum0": strategy.reduce("SUM", x, axis=0),
        "mean0": strategy.reduce("MEAN", x, axis=0),
        "mean_neg1": strategy.reduce("MEAN", x, axis=-1),
        "sum_none": outcome(lambda: strategy.reduce("SUM", x, axis=None)),
        "mean_none": outcome(lambda: strategy.reduce("MEAN", x, axis=None)),
    }


NO_AXIS = Raises(ValueError, "reduce over axis 2 got components of rank 2")
NO_LIST = Raises(TypeError, "give an int, a tuple of ints, or None")


@case(
    "reduce-axis0-matrix",
    {
        "SUM axis=0": [9.0, 12.0],
        "SUM axis=-2": [9.0, 12.0],
        "SUM axis=1": CANNOT_ADD,
        "SUM axis=-1": CANNOT_ADD,
        "SUM axis=(0,)": [9.0, 12.0],
        "SUM axis=(0, 1)": 21.0,
        "SUM axis=[0]": NO_LIST,
        "SUM axis=(0, -1)": 21.0,
        "SUM axis=2": NO_AXIS,
        "MEAN axis=0": [3.0, 4.0],
        "MEAN axis=-2": [3.0, 4.0],
        "MEAN axis=1": CANNOT_ADD,
        "MEAN axis=-1": CANNOT_ADD,
        "MEAN axis=(0,)": [3.0, 4.0],
        "MEAN axis=(0, 1)": 3.5,
        "MEAN axis=[0]": NO_LIST,
        "MEAN axis=(0, -1)": 3.5,
        "MEAN axis=2": NO_AXIS,
    },
)
def reduce_axis0_matrix() -> Any:
    strategy = mirrored()
    x = values(strategy, lambda i: jnp.array([[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0]]][i]))
    axes: list[Any] = [0, -2, 1, -1, (0,), (0, 1), [0], (0, -1), 2]
    return {
        f"{op} axis={axis!r}": outcome(lambda op=op, axis=axis: strategy.reduce(op, x, axis=axis))
        for op in ("SUM", "MEAN")
        for axis in axes
    }


@case(
    "reduce-plain-tensor",
    {
        "sum_t": ONE_FOR_ALL,
        "mean_t": 3.0,
        "sum_py": ONE_FOR_ALL,
        "mean_py": 3.0,
        "sum_int": ONE_FOR_ALL,
        "zero": 0,
        "sum_ax0": 6.0,
        "mean_ax0": 1.5,
        "np_sum": ONE_FOR_ALL,
    },
    differs={"zero": "0 is the sum of any number of zeros, as the note of the case allows"},
)
def reduce_plain_tensor() -> Any:
    reduce = mirrored().reduce
    return {
        "sum_t": outcome(lambda: reduce("SUM", jnp.float32(3), None)),
        "mean_t": reduce("MEAN", jnp.float32(3), None),
        "sum_py": outcome(lambda: reduce("SUM", 3.0, None)),
        "mean_py": reduce("MEAN", 3.0, None),
        "sum_int": outcome(lambda: reduce("SUM", 3, None)),
        "zero": reduce("SUM", 0, None),
        "sum_ax0": reduce("SUM", jnp.array([1.0, 2.0]), 0),
        "mean_ax0": reduce("MEAN", jnp.array([1.0, 2.0]), 0),
        "np_sum": outcome(lambda: reduce("SUM", np.array([1.0, 2.0]), None)),
    }


@case(
    "reduce-int-mean",
    {"none": [1.5, "float32"], "ax0": [7 / 3, "float32"], "sum0": [7, "int32"]},
    differs={
        "none.1": "JAX's floating dtype is float32 unless doubles are enabled",
        "ax0.1": "JAX's floating dtype is float32 unless doubles are enabled",
    },
)
def reduce_int_mean() -> Any:
    strategy = mirrored()
    x = values(strategy, lambda i: jnp.int32(i + 1))
    y = values(strategy, lambda i: jnp.array([[1, 2], [4]][i], jnp.int32))

    def with_dtype(array: Any) -> list[Any]:
        return [array, array.dtype.name]

    return {
        "none": with_dtype(strategy.reduce("MEAN", x, None)),
        "ax0": with_dtype(strategy.reduce("MEAN", y, 0)),
        "sum0": with_dtype(strategy.reduce("SUM", y, 0)),
    }


@case("reduce-nested", {"a": 3.0, "b": [3.0, 3.0]})
def reduce_nested() -> Any:
    strategy = mirrored()
    x = values(strategy, lambda i: jnp.float32(i + 1))
    return strategy.reduce("SUM", {"a": x, "b": [x, x]}, None)


@case("reduce-4-replicas", {"sum": 10.0, "mean": 2.5, "sum0": 17.0, "mean0": 17 / 6})
def reduce_4_replicas() -> Any:
    strategy = mirrored(4)
    x = values(strategy, lambda i: jnp.float32(i + 1))
    y = values(strategy, lambda i: jnp.ones([[1, 2, 0, 3][i]]) * (i + 1))
    return {
        "sum": strategy.reduce("SUM", x, None),
        "mean": strategy.reduce("MEAN", x, None),
        "sum0": strategy.reduce("SUM", y, 0),
        "mean0": strategy.reduce("MEAN", y, 0),
    }


@case(
    "reduce-variable",
    {"sum": ONE_FOR_ALL, "mean": 3.0, "w": [1.0, 2.0], "onread_sum": 3.0, "onread_mean": 1.5},
)
def reduce_variable() -> Any:
    strategy = mirrored()
    v = variable(strategy, 3.0)
    w = variable(
        strategy,
        0.0,
        synchronization=distrib.VariableSynchronization.ON_READ,
        aggregation=distrib.VariableAggregation.SUM,
    )
    strategy.run(lambda: w.assign(1.0 + rid()))
    return {
        "sum": outcome(lambda: strategy.reduce("SUM", v, None)),
        "mean": strategy.reduce("MEAN", v, None),
        "w": strategy.experimental_local_results(w),
        "onread_sum": strategy.reduce("SUM", w, None),
        "onread_mean": strategy.reduce("MEAN", w, None),
    }


@case(
    "reduce-to",
    {
        "var": mirrored_value(4.0, 4.0),
        "dev": 2.0,
        "devname": 4.0,
        "lst": Raises(ValueError, r"destinations is \['CPU:0', 'CPU:1'\], and must be"),
        "pr": mirrored_value(4.0, 4.0),
        "none": Raises(ValueError, "destinations is None, and must be"),
        "other_dev": 4.0,
    },
)
def reduce_to() -> Any:
    strategy = mirrored()
    v = variable(strategy, 0.0)
    x = values(strategy, lambda i: jnp.float32(1 + 2 * i))
    to = strategy.extended.reduce_to
    return {
        "var": to("SUM", x, v),
        "dev": to(distrib.ReduceOp.MEAN, x, "CPU:0"),
        "devname": to(distrib.ReduceOp.SUM, x, "/device:CPU:1"),
        "lst": outcome(lambda: to(distrib.ReduceOp.SUM, x, ["CPU:0", "CPU:1"])),
        "pr": to(distrib.ReduceOp.SUM, x, x),
        "none": outcome(lambda: to(distrib.ReduceOp.SUM, x, None)),
        "other_dev": to(distrib.ReduceOp.SUM, x, "CPU:3"),
    }


@case(
    "batch-reduce-to",
    {
        "s": [mirrored_value(4.0, 4.0), mirrored_value([3.0, 6.0], [3.0, 6.0])],
        "m": [mirrored_value(2.0, 2.0), mirrored_value([1.5, 3.0], [1.5, 3.0])],
        "empty": [],
        "bad": Raises(ValueError, "'PROD' is not a valid ReduceOp"),
    },
    differs={"empty": "nothing to reduce gives nothing"},
)
def batch_reduce_to() -> Any:
    strategy = mirrored()
    v = variable(strategy, 0.0)
    x = values(strategy, lambda i: jnp.float32(1 + 2 * i))
    y = values(strategy, lambda i: jnp.array([1.0, 2.0]) * (i + 1))
    to = strategy.extended.batch_reduce_to
    return {
        "s": to("SUM", [(x, v), (y, "CPU:0")]),
        "m": to(distrib.ReduceOp.MEAN, [(x, v), (y, v)]),
        "empty": to(distrib.ReduceOp.SUM, []),
        "bad": outcome(lambda: to("PROD", [(x, v)])),
    }


@case(
    "default-strategy-ops",
    {
        "run": [2.0, 4.0],
        "sn": [1.0, 3.0],
        "mn": [1.0, 3.0],
        "s0": 4.0,
        "m0": 2.0,
        "g": [1.0, 3.0],
        "has": False,
        "cross": False,
        "rc_none": False,
        "local": [[1.0, 3.0]],
    },
)
def default_strategy_ops() -> Any:
    strategy = distrib.get_strategy()
    t = jnp.array([1.0, 3.0])
    with strategy.scope():
        facts = {
            "has": distrib.has_strategy(),
            "cross": distrib.in_cross_replica_context(),
            "rc_none": distrib.get_replica_context() is None,
        }
    return facts | {
        "run": strategy.run(lambda a: a + 1.0, (t,)),
        "sn": strategy.reduce("SUM", t, None),
        "mn": strategy.reduce("MEAN", t, None),
        "s0": strategy.reduce("SUM", t, 0),
        "m0": strategy.reduce("MEAN", t, 0),
        "g": strategy.gather(t, 0),
        "local": strategy.experimental_local_results(t),
    }


@case("reduce-in-function-uneven", [2.0, [0.0, 1.0, 2.0, 3.0, 4.0], 10.0])
def reduce_in_function_uneven() -> Any:
    strategy = mirrored()
    dataset = strategy.experimental_distribute_dataset(np.arange(5, dtype=np.float32), batch_size=5)
    (x,) = dataset
    return plain(
        (
            strategy.reduce("MEAN", x, axis=0),
            strategy.gather(x, 0),
            strategy.reduce("SUM", x, axis=0),
        )
    )
