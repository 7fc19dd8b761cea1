"""How replicas bring their values together."""

from distrib.collectives.algorithm import AllReduceAlgorithm, SumsOverReplicas
from distrib.collectives.choice import algorithm_for
from distrib.collectives.components import ComponentReducer, form
from distrib.collectives.compressing import CompressingOps
from distrib.collectives.compression import compression_named
from distrib.collectives.cross_device_ops import CrossDeviceOps, as_cross_device_ops
from distrib.collectives.hierarchical_copy import HierarchicalCopyAllReduce, hierarchy
from distrib.collectives.in_program import (
    all_gather,
    all_reduce,
    all_reduce_with_feedback,
    check_arrays,
    check_numbers,
    from_first_replica,
)
from distrib.collectives.nccl import NcclAllReduce
from distrib.collectives.one_sum import ONE_SUM_NAMES, is_one_sum, one_sum
from distrib.collectives.options import (
    CollectiveHints,
    CommunicationImplementation,
    CommunicationOptions,
    check_for_gather,
    check_no_timeout,
)
from distrib.collectives.packing import Packing, map_packed, packing_for, plan_packs
from distrib.collectives.reduction_to_one_device import ReductionToOneDevice
from distrib.collectives.ring import RingAllReduce, RingStep, ring_steps
from distrib.collectives.rows import (
    all_reduce_rows,
    all_rows,
    concatenated_rows,
    scaled_rows,
)
from distrib.collectives.scattering import (
    Scattered,
    ScatteringOps,
    gathered,
    is_scattered,
    reduce_scatter,
    scattering_ops,
)

__all__ = [
    "ONE_SUM_NAMES",
    "AllReduceAlgorithm",
    "CollectiveHints",
    "CommunicationImplementation",
    "CommunicationOptions",
    "ComponentReducer",
    "CompressingOps",
    "CrossDeviceOps",
    "HierarchicalCopyAllReduce",
    "NcclAllReduce",
    "Packing",
    "ReductionToOneDevice",
    "RingAllReduce",
    "RingStep",
    "Scattered",
    "ScatteringOps",
    "SumsOverReplicas",
    "algorithm_for",
    "all_gather",
    "all_reduce",
    "all_reduce_rows",
    "all_reduce_with_feedback",
    "all_rows",
    "as_cross_device_ops",
    "check_arrays",
    "check_for_gather",
    "check_no_timeout",
    "check_numbers",
    "compression_named",
    "concatenated_rows",
    "form",
    "from_first_replica",
    "gathered",
    "hierarchy",
    "is_one_sum",
    "is_scattered",
    "map_packed",
    "one_sum",
    "packing_for",
    "plan_packs",
    "reduce_scatter",
    "ring_steps",
    "scaled_rows",
    "scattering_ops",
]
