"""How replicas bring their values together."""

from distrib.collectives.cross_device_ops import CrossDeviceOps, NcclAllReduce
from distrib.collectives.hierarchical_copy import HierarchicalCopyAllReduce, hierarchy
from distrib.collectives.in_program import (
    all_gather,
    all_reduce,
    check_arrays,
    check_numbers,
    from_first_replica,
)
from distrib.collectives.one_sum import is_one_sum, one_sum
from distrib.collectives.options import CommunicationOptions
from distrib.collectives.packing import map_packed, plan_packs
from distrib.collectives.reduction_to_one_device import ReductionToOneDevice
from distrib.collectives.ring import RingAllReduce, RingStep, ring_steps

__all__ = [
    "CommunicationOptions",
    "CrossDeviceOps",
    "HierarchicalCopyAllReduce",
    "NcclAllReduce",
    "ReductionToOneDevice",
    "RingAllReduce",
    "RingStep",
    "all_gather",
    "all_reduce",
    "check_arrays",
    "check_numbers",
    "from_first_replica",
    "hierarchy",
    "is_one_sum",
    "map_packed",
    "one_sum",
    "plan_packs",
    "ring_steps",
]
