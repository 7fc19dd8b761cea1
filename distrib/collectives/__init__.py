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
from distrib.collectives.rows import (
    all_reduce_rows,
    all_rows,
    concatenated_rows,
    scaled_rows,
)

__all__ = [
    "CommunicationOptions",
    "CrossDeviceOps",
    "NcclAllReduce",
    "ReductionToOneDevice",
    "all_gather",
    "all_reduce",
    "all_reduce_rows",
    "all_rows",
    "check_arrays",
    "check_numbers",
    "concatenated_rows",
    "from_first_replica",
    "map_packed",
    "plan_packs",
    "scaled_rows",
]
