"""The algorithms of the all-reduce, and strategies that use them."""

from collections.abc import Sequence
from typing import Any

import pytest

import distrib

ALGORITHMS = {
    "nccl": distrib.NcclAllReduce,
    "one-device": distrib.ReductionToOneDevice,
    "hierarchical": distrib.HierarchicalCopyAllReduce,
    "ring": distrib.RingAllReduce,
}

every_algorithm = pytest.mark.parametrize("make", ALGORITHMS.values(), ids=ALGORITHMS)
"""Calls a test with ``make``, once for each class."""


def mirrored(count: int, ops: Any = None) -> distrib.MirroredStrategy:
    """Return a mirrored strategy of ``count`` replicas that adds by ``ops``."""
    return distrib.MirroredStrategy([f"CPU:{i}" for i in range(count)], cross_device_ops=ops)


def per_replica(strategy: distrib.Strategy, values: Sequence[Any]) -> Any:
    """Return a per-replica value; the value itself if there is one replica."""
    return strategy.experimental_distribute_values_from_function(
        lambda context: values[context.replica_id_in_sync_group]
    )


def summed(x: Any) -> Any:
    """Return the sum over the replicas, inside of a step."""
    return distrib.get_replica_context().all_reduce("SUM", x)
