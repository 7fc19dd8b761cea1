"""The algorithm of one call: the strategy's, unless the options of the call say otherwise."""

from __future__ import annotations

from distrib.collectives.compressing import CompressingOps
from distrib.collectives.cross_device_ops import CrossDeviceOps
from distrib.collectives.nccl import NcclAllReduce
from distrib.collectives.options import CommunicationImplementation, CommunicationOptions
from distrib.collectives.ring import RingAllReduce

_BY_NAME = {
    CommunicationImplementation.RING: RingAllReduce,
    CommunicationImplementation.NCCL: NcclAllReduce,
}


def algorithm_for(ops: CrossDeviceOps, options: CommunicationOptions | None) -> CrossDeviceOps:
    """Return the algorithm of a call.

    An ``implementation`` replaces the strategy's algorithm and keeps its compression; a
    ``compression`` replaces that.

    >>> options = CommunicationOptions(implementation="RING", compression="bfloat16")
    >>> type(algorithm_for(NcclAllReduce(), options)).__name__
    'RingAllReduce'

    Raises:
      ValueError: for a compression, if the algorithm cannot compress.
    """
    if options is None:
        return ops
    if options.implementation is not CommunicationImplementation.AUTO:
        compression = ops.compression if isinstance(ops, CompressingOps) else None
        ops = _BY_NAME[options.implementation](compression=compression)
    return ops if options.compression is None else ops.with_compression(options.compression)
