"""Cross-device ops: given to a strategy, and called directly."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

import distrib
from distrib import ReduceOp
from tests.conformance.table import Raises, case, context, mirrored, outcome, values

NOT_A_MEMBER = Raises(ValueError, "reduce_op is 'SUM', and must be ReduceOp.SUM or ReduceOp.MEAN")
QUIRK = "tf.distribute's hierarchical copy leaves out the third replica; ours does not"


def mirrored_copies(component: Any, size: int) -> dict[str, Any]:
    """Return the plain form of a mirrored value."""
    return {"type": "Mirrored", "per_replica": [component] * size}


def algorithm_case(ops: distrib.CrossDeviceOps, size: int) -> Any:
    """Do everything that can be done with the values 1, 2, 4, the first of them."""
    strategy = mirrored(size, cross_device_ops=ops)
    x = values(strategy, lambda i: jnp.float32(2**i))
    rows = values(strategy, lambda i: jnp.array([[1.0, 2.0]]) * 2**i)

    def mean_id() -> Any:
        return context().all_reduce("MEAN", context().replica_id_in_sync_group)

    def gathered() -> Any:
        own = jnp.asarray(context().replica_id_in_sync_group, jnp.float32)[None]
        return context().all_gather(own, axis=0)

    three = jnp.float32(3)
    return {
        "sum": strategy.reduce("SUM", x, axis=None),
        "mean": strategy.reduce("MEAN", rows, axis=0),
        "ar": strategy.run(mean_id),
        "direct": ops.reduce(ReduceOp.SUM, x, x),
        "direct_dev": ops.reduce(ReduceOp.MEAN, x, "CPU:0"),
        "batch": ops.batch_reduce(ReduceOp.SUM, [(x, x), (rows, rows)]),
        "bc": ops.broadcast(jnp.float32(9), x),
        "sum_tensor": ops.reduce(ReduceOp.SUM, three, x),
        "mean_tensor": ops.reduce(ReduceOp.MEAN, three, x),
        "bad_op": outcome(lambda: ops.reduce("SUM", x, x)),  # pyright: ignore[reportArgumentType]
        "all_gather": strategy.run(gathered),
    }


def of_algorithm(size: int) -> dict[str, Any]:
    """Return what :func:`algorithm_case` must give."""
    total = 2**size - 1
    ids = [float(i) for i in range(size)]
    return {
        "sum": total,
        "mean": [total / size, 2 * total / size],
        "ar": {"type": "PerReplica", "per_replica": [(size - 1) / 2] * size},
        "direct": mirrored_copies(total, size),
        "direct_dev": total / size,
        "batch": [mirrored_copies(total, size), mirrored_copies([[total, 2.0 * total]], size)],
        "bc": mirrored_copies(9.0, size),
        "sum_tensor": 3.0,
        "mean_tensor": 3.0,
        "bad_op": NOT_A_MEMBER,
        "all_gather": {"type": "PerReplica", "per_replica": [ids] * size},
    }


@case("cdo-one-3", of_algorithm(3))
def one_3() -> Any:
    return algorithm_case(distrib.ReductionToOneDevice(), 3)


@case(
    "cdo-hier-3",
    of_algorithm(3),
    differs={
        **{f"ar.per_replica.{i}": QUIRK for i in range(3)},
        **{f"batch.0.per_replica.{i}": QUIRK for i in range(3)},
        **{f"batch.1.per_replica.{i}.0.{j}": QUIRK for i in range(3) for j in range(2)},
    },
)
def hier_3() -> Any:
    return algorithm_case(distrib.HierarchicalCopyAllReduce(), 3)


@case("cdo-hier-2", of_algorithm(2))
def hier_2() -> Any:
    return algorithm_case(distrib.HierarchicalCopyAllReduce(), 2)


@case(
    "cdo-reduction-options",
    {
        "custom_sum": mirrored_copies(4.0, 3),
        "custom_mean": mirrored_copies(4 / 3, 3),
        "bad": Raises(TypeError, "cross_device_ops is 'hier', which has no sum_over_replicas"),
        "packs0": None,
        "packsneg": Raises(ValueError, "HierarchicalCopy requires num_packs >= 0, but -1 is"),
    },
    differs={"bad": "tf.distribute takes a string, and fails at the first reduction"},
    omits={
        "default_kind": "the name of a class that is not public",
        "collective": "the name of a class that is not public",
    },
)
def reduction_options() -> Any:
    strategy = mirrored(3)
    x = values(strategy, lambda i: jnp.float32(2**i))
    ops = distrib.ReductionToOneDevice("CPU:1", lambda parts: jnp.stack(parts).max(0))
    bad: Any = "hier"
    return {
        "custom_sum": ops.reduce(ReduceOp.SUM, x, x),
        "custom_mean": ops.reduce(ReduceOp.MEAN, x, x),
        "bad": outcome(lambda: mirrored(2, cross_device_ops=bad) and None),
        "packs0": outcome(lambda: distrib.HierarchicalCopyAllReduce(num_packs=0) and None),
        "packsneg": outcome(lambda: distrib.HierarchicalCopyAllReduce(num_packs=-1) and None),
    }
