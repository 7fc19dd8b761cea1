"""The device that a replica context names."""

from __future__ import annotations

from collections.abc import Sequence

from distrib.platform import Device, device_string


def device_of_any_replica(devices: Sequence[Device]) -> str:
    """Return the device string of a replica; where one program serves several, with index ``*``."""
    first = device_string(devices[0])
    return first if len(devices) == 1 else f"{first.rpartition(':')[0]}:*"
