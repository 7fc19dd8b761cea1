"""How replicas bring their values together."""

from distrib.collectives.cross_device_ops import (
    CrossDeviceOps,
    NcclAllReduce,
    ReductionToOneDevice,
)
from distrib.collectives.in_program import (
    all_gather,
    all_reduce,
    check_arrays,
    check_numbers,
    from_first_replica,
)
from distrib.collectives.options import CommunicationOptions
from distrib.collectives.packing import map_packed, plan_packs
from distrib.collectives.scattering import (
    Scattered,
    ScatteringOps,
    gathered,
    is_scattered,
    reduce_scatter,
)

__all__ = [
    "CommunicationOptions",
    "CrossDeviceOps",
    "NcclAllReduce",
    "ReductionToOneDevice",
    "Scattered",
    "ScatteringOps",
    "all_gather",
    "all_reduce",
    "check_arrays",
    "check_numbers",
    "from_first_replica",
    "gathered",
    "is_scattered",
    "map_packed",
    "plan_packs",
    "reduce_scatter",
]
