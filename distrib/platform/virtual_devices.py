"""Virtual CPU devices, and the thread pool that they need.

Why the thread pool matters. XLA runs the replicas of a CPU program on one pool with as many threads
as the machine has cores. Each replica that waits in a collective keeps a thread, so with N virtual
devices and few cores the pool runs dry before the last replica arrives: the program hangs, and XLA
aborts the process after 40 s. Measured on two cores with 2, 4 and 8 devices: four threads a device,
and at least 16, cure it; turning asynchronous dispatch off or single-threaded Eigen does not. XLA
reads the size from the environment (``PJRT_NPROC``, else ``NPROC``) once, when JAX looks up its
devices for the first time.

One device has nobody to wait for and is left alone: a worker process with a single device is faster
with a small pool.
"""

from __future__ import annotations

import os
import re

import jax
from absl import logging

from distrib import errors
from distrib.platform import jax_compat

_THREADS_PER_DEVICE = 4
_FEWEST_THREADS = 16
_XLA_FLAG = re.compile(r"--xla_force_host_platform_device_count=(\d+)")

_warned = False


def set_logical_devices(kind: str, count: int) -> None:
    """Split the CPU into ``count`` virtual devices and give XLA's pool enough threads for them.

    Looks up no device. An explicit count wins over ``JAX_NUM_CPU_DEVICES`` and over
    ``--xla_force_host_platform_device_count`` in ``XLA_FLAGS``, as it does in JAX itself; a
    different count in ``XLA_FLAGS`` is logged. For two devices or more ``PJRT_NPROC`` is set to
    four threads a device, but no fewer than 16 or than the cores of the machine; a value of the
    user's own is kept when it is enough for four a device, else raised, which is logged.

    Args:
      kind: ``"CPU"``, in any letter case.
      count: the number of devices, at least 1.

    Raises:
      ValueError: if ``kind`` is not the CPU or ``count`` is not a positive int.
      VirtualDevicesError: if JAX has started with another number of CPU devices.
    """
    if not isinstance(kind, str) or kind.upper() != "CPU":
        raise ValueError(
            f"set_logical_devices({kind!r}, {count!r}): only 'CPU' can be split into virtual "
            "devices. For other kinds the real devices are used; choose among them by name."
        )
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ValueError(
            f"set_logical_devices({kind!r}, {count!r}): the count must be an int of at least 1."
        )
    if jax_compat.backends_initialized():
        existing = _existing_cpu_devices()
        if existing != count:
            raise errors.VirtualDevicesError(
                f"{count} virtual CPU devices were asked for, but JAX has started already, with "
                f"{existing}, and the number cannot change afterwards. Call "
                f'distrib.config.set_logical_devices("CPU", {count}) first thing in the program, '
                "before the first array or device look-up; in a notebook, restart the kernel and "
                "run it in the first cell."
            )
        return
    in_flags = _count_in_xla_flags()
    if in_flags is not None and in_flags != count:
        logging.warning(
            "XLA_FLAGS asks for %d CPU devices and set_logical_devices for %d: there will be %d.",
            in_flags,
            count,
            count,
        )
    jax.config.update("jax_num_cpu_devices", count)
    _set_thread_pool(count)


def ensure_thread_pool() -> None:
    """Give XLA's pool enough threads for virtual devices made without ``set_logical_devices``.

    Strategies call this before they look up a device. It covers ``jax_num_cpu_devices``, its
    variable ``JAX_NUM_CPU_DEVICES``, and ``--xla_force_host_platform_device_count`` in
    ``XLA_FLAGS``. Where JAX has started with too small a pool, nothing can be done, and one warning
    a process says so. Looks up no device, unless JAX has started.
    """
    global _warned
    if not jax_compat.backends_initialized():
        _set_thread_pool(_requested_cpu_devices())
        return
    if _warned:
        return
    count = _existing_cpu_devices()
    if count > 1 and _pool_threads() < _THREADS_PER_DEVICE * count:
        _warned = True
        logging.warning(
            "JAX has started with %d virtual CPU devices and a pool of %d threads: a step with "
            "collectives may deadlock, and XLA then aborts the process. Make the devices with "
            'distrib.config.set_logical_devices("CPU", %d) before JAX starts, or export '
            "PJRT_NPROC=%d before Python does.",
            count,
            _pool_threads(),
            count,
            _enough_threads(count),
        )


def _set_thread_pool(count: int) -> None:
    """Set ``PJRT_NPROC`` for ``count`` devices, unless the user's own value is large enough."""
    own = _threads_in_environment()
    if count <= 1 or (own is not None and own >= _THREADS_PER_DEVICE * count):
        return
    enough = _enough_threads(count)
    if own is not None:
        logging.warning(
            "PJRT_NPROC was %d, and %d virtual CPU devices need %d threads or they may deadlock "
            "in a collective: it is now %d.",
            own,
            count,
            _THREADS_PER_DEVICE * count,
            enough,
        )
    os.environ["PJRT_NPROC"] = str(enough)


def _enough_threads(count: int) -> int:
    return max(_FEWEST_THREADS, _THREADS_PER_DEVICE * count, _cores())


def _pool_threads() -> int:
    """Return the number of threads that XLA gives its pool in this environment."""
    own = _threads_in_environment()
    return _cores() if own is None else own


def _threads_in_environment() -> int | None:
    for name in ("PJRT_NPROC", "NPROC"):
        try:
            return max(0, int(os.environ[name]))
        except (KeyError, ValueError):  # XLA ignores what is not a number, too.
            continue
    return None


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _requested_cpu_devices() -> int:
    """Return the number of CPU devices that JAX will make when it starts."""
    configured = jax_compat.configured_cpu_devices()
    if configured >= 0:
        return configured
    return _count_in_xla_flags() or 1


def _count_in_xla_flags() -> int | None:
    counts = _XLA_FLAG.findall(os.environ.get("XLA_FLAGS", ""))
    return int(counts[-1]) if counts else None


def _existing_cpu_devices() -> int:
    """Return the number of this process's CPU devices, once JAX has started."""
    try:
        return len(jax.local_devices(backend="cpu"))
    except RuntimeError:  # JAX_PLATFORMS leaves the CPU out.
        return 0
