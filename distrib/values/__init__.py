"""Values with one component for each replica."""

from distrib.values.distributed_values import (
    DistributedValues,
    Layout,
    Mirrored,
    PerReplica,
    local_shards,
)
from distrib.values.grouping import is_distributed, regroup, select_replica
from distrib.values.indexed_slices import IndexedSlices, is_slices, map_apart
from distrib.values.value_context import ValueContext

__all__ = [
    "DistributedValues",
    "IndexedSlices",
    "Layout",
    "Mirrored",
    "PerReplica",
    "ValueContext",
    "is_distributed",
    "is_slices",
    "local_shards",
    "map_apart",
    "regroup",
    "select_replica",
]
