"""The synchronous strategies, each on as many replicas as tests try."""

from collections.abc import Callable

import pytest

import distrib


def devices(count: int) -> list[str]:
    """Return the names of the first ``count`` virtual devices."""
    return [f"CPU:{i}" for i in range(count)]


def mirrored(count: int) -> distrib.MirroredStrategy:
    """Return a mirrored strategy of ``count`` replicas."""
    return distrib.MirroredStrategy(devices(count))


def central(count: int) -> distrib.CentralStorageStrategy:
    """Return a central storage strategy of ``count`` replicas."""
    return distrib.CentralStorageStrategy(devices(count))


STRATEGIES: dict[str, Callable[[], distrib.Strategy]] = {
    "OneDevice": lambda: distrib.OneDeviceStrategy("CPU:0"),
    "Mirrored-1": lambda: mirrored(1),
    "Mirrored-2": lambda: mirrored(2),
    "Mirrored-4": lambda: mirrored(4),
    "CentralStorage-1": lambda: central(1),
    "CentralStorage-2": lambda: central(2),
    "CentralStorage-4": lambda: central(4),
}

on_every_strategy = pytest.mark.parametrize("make_strategy", STRATEGIES.values(), ids=STRATEGIES)
"""Calls a test with ``make_strategy``, once for each strategy and number of replicas."""

on_two_replicas = pytest.mark.parametrize(
    "make_strategy",
    [STRATEGIES["Mirrored-2"], STRATEGIES["CentralStorage-2"]],
    ids=["Mirrored-2", "CentralStorage-2"],
)
"""The same for the strategies of two replicas."""
