"""Values with one component for each replica."""

from distrib.values.distributed_values import (
    DistributedValues,
    Layout,
    Mirrored,
    PerReplica,
    local_shards,
)
from distrib.values.grouping import is_distributed, regroup, select_replica
from distrib.values.value_context import ValueContext

__all__ = [
    "DistributedValues",
    "Layout",
    "Mirrored",
    "PerReplica",
    "ValueContext",
    "is_distributed",
    "local_shards",
    "regroup",
    "select_replica",
]
