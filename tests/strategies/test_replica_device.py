"""The device that a replica context names."""

import jax
import pytest

from distrib.strategies.replica_device import device_of_any_replica

CPUS = jax.devices("cpu")
TASK = "/job:localhost/replica:0/task:0/device:CPU"


@pytest.mark.parametrize(
    ("devices", "name"),
    [
        (CPUS[:1], f"{TASK}:0"),
        (CPUS[5:6], f"{TASK}:5"),
        (CPUS[3:5], f"{TASK}:*"),
        (CPUS, f"{TASK}:*"),
    ],
)
def test_with_an_index_or_for_all(devices, name):
    assert device_of_any_replica(devices) == name
