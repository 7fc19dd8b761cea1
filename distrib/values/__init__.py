"""Values with one component for each replica."""

from distrib.values.arithmetic import ArrayOperators
from distrib.values.distributed_values import (
    DistributedValues,
    Layout,
    Mirrored,
    PerReplica,
    local_shards,
)
from distrib.values.grouping import (
    grouped,
    is_distributed,
    regroup,
    select_replica,
    ungrouped,
)
from distrib.values.indexed_slices import IndexedSlices, is_slices, map_apart
from distrib.values.value_context import ValueContext

__all__ = [
    "ArrayOperators",
    "DistributedValues",
    "IndexedSlices",
    "Layout",
    "Mirrored",
    "PerReplica",
    "ValueContext",
    "grouped",
    "is_distributed",
    "is_slices",
    "local_shards",
    "map_apart",
    "regroup",
    "select_replica",
    "ungrouped",
]
