"""The devices that the examples train on, from the flag ``--num_devices``."""

import logging

import jax
from absl import flags

import distrib

_NUM_DEVICES = flags.DEFINE_integer(
    "num_devices",
    0,
    "How many devices to use; 0 for all local ones. Where there is no GPU or TPU, several are "
    "virtual devices, into which the CPU is split.",
    lower_bound=0,
)


def from_flags() -> list[jax.Device]:
    """Return the devices that the flag asks for. Call it before JAX starts.

    Raises:
      SystemExit: if there are fewer; the message says how many.
    """
    count = _NUM_DEVICES.value
    if count > 1:
        # Beside GPUs this makes CPU devices that nobody uses.
        distrib.config.set_logical_devices("CPU", count)
    # Else JAX tells, at INFO, of each kind of device that is not there.
    logging.getLogger("jax").setLevel(logging.WARNING)
    distrib.config.logical_devices("CPU")  # Starts JAX, with threads enough for virtual devices.
    devices = jax.local_devices()
    if count > len(devices):
        raise SystemExit(f"--num_devices={count}, but there are {len(devices)}: {devices}")
    return devices[:count] if count else devices
