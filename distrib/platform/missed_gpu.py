"""A word to whoever has a GPU that JAX does not use."""

from __future__ import annotations

import functools
from pathlib import Path

import jax
from absl import logging

_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


@functools.cache
def warn_of_missed_gpu(driver: Path = _NVIDIA_DRIVER) -> None:
    """Log, once in a process, that JAX runs on the CPU though there is the driver of a GPU.

    Nothing is said where the CPU was chosen, by ``JAX_PLATFORMS`` or ``jax_platforms``. Looks up
    the devices.

    Args:
      driver: a file that NVIDIA's driver makes.
    """
    chosen = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
    if chosen or jax.default_backend() != "cpu" or not driver.exists():
        return
    logging.warning(
        "distrib: this machine has the driver of an NVIDIA GPU (%s), but JAX sees no GPU, so that "
        'strategies run on the CPU. Install JAX with CUDA: pip install "distrib[cuda12]". Set '
        "JAX_PLATFORMS=cpu if the CPU is what you want.",
        driver,
    )
