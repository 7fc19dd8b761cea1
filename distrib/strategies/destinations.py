"""Where the result of ``extended.reduce_to`` is put."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.core import Tracer

from distrib.platform import Device, resolve_device, uncommitted
from distrib.values import DistributedValues, Mirrored
from distrib.variables import Variable


def destination_devices(destinations: Any, replica_devices: Sequence[Device]) -> list[Device]:
    """Return the devices that ``destinations`` names.

    Args:
      destinations: a variable: where its copies live; a distributed value: a device for each
        replica; a device string or an array: its device.
      replica_devices: the devices of the replicas.

    Returns:
      The devices; none for a value that lies wherever JAX puts it.

    Raises:
      ValueError: if it is something else.
      DeviceError: if there is no such device.
    """
    if isinstance(destinations, Variable):
        return list(destinations.distribute_strategy.extended.variable_devices)
    if isinstance(destinations, DistributedValues):
        return list(replica_devices)
    if isinstance(destinations, Tracer):
        return []
    if isinstance(destinations, jax.Array):
        return sorted(destinations.devices(), key=lambda device: device.id)[:1]
    if isinstance(destinations, str | Device):
        return [resolve_device(destinations)]
    raise ValueError(
        f"destinations is {destinations!r}, and must be a distributed value, a distrib.Variable, "
        "an array or a device string: the result is put where that lives."
    )


def put_on(value: Any, devices: Sequence[Device]) -> Any:
    """Return a value on a device, or a :class:`distrib.Mirrored` with a copy on each of several.

    In a compiled step the compiler decides, and every replica has the value.
    """
    if not isinstance(value, jax.Array) or isinstance(value, Tracer) or not devices:
        return value
    copies = [uncommitted(jax.device_put(value, device)) for device in devices]
    return Mirrored(copies) if len(copies) > 1 else copies[0]
