"""Device strings, as tf.distribute writes them, and the ``jax.Device`` that each names.

The number in a device string is the position among the devices of that kind that belong to this
process, as in TensorFlow; it is not ``jax.Device.id``, which counts over all processes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import jax

from distrib import errors
from distrib.platform.jax_compat import Device
from distrib.platform.missed_gpu import warn_of_missed_gpu

# JAX says "gpu" for both vendors' devices, but "cuda" and "rocm" in its settings.
_KIND_OF_PLATFORM = {"cuda": "GPU", "rocm": "GPU"}
_PREFIX_PART = re.compile(r"(job|replica|task):(\w+)", re.IGNORECASE | re.ASCII)
_DEVICE_PART = re.compile(r"(?:device:)?([a-z]\w*)(?::([0-9]+))?", re.IGNORECASE | re.ASCII)


def resolve_device(spec: str | Device) -> Device:
    """Return the device that ``spec`` names.

    >>> resolve_device("/cpu:1")
    CpuDevice(id=1)
    >>> resolve_device("/job:localhost/replica:0/task:0/device:CPU:1")
    CpuDevice(id=1)

    Args:
      spec: a ``jax.Device``, returned as it is, or a string: ``"GPU:0"``, ``"/cpu:1"``,
        ``"/device:CPU:0"`` or the full form with job, replica and task. The kind is read in any
        letter case, ``"GPU"`` matches CUDA and ROCm devices, and a missing number means 0.

    Raises:
      DeviceError: if ``spec`` is malformed, names another task, or no such device exists.
    """
    if isinstance(spec, Device):
        return spec
    if not isinstance(spec, str):
        raise errors.DeviceError(
            f"{spec!r} is not a device: pass a jax.Device or a string such as 'GPU:0' or 'CPU:1'."
        )
    *prefix, last = spec.removeprefix("/").split("/")
    match = _DEVICE_PART.fullmatch(last)
    if match is None:
        raise _malformed(spec)
    _check_is_this_task(spec, prefix)
    kind = _kind(match[1])
    index = int(match[2] or 0)
    devices = local_devices(kind)
    if index < len(devices):
        return devices[index]
    count = len(devices)
    existing = f"This process has {_existing()}."
    if kind == "CPU" and devices:
        advice = (
            f'For more CPU devices call distrib.config.set_logical_devices("CPU", {index + 1}) '
            "before JAX starts, that is, before the first array or device look-up."
        )
    elif kind == "CPU":
        advice = "JAX_PLATFORMS or jax_platforms leaves the CPU out: add 'cpu' to it."
    elif count:
        advice = f"{kind} numbers go from 0 to {count - 1}: use one of these."
    else:
        advice = (
            f"JAX sees no {kind}: use one of these, or install the JAX that supports it (and check "
            "JAX_PLATFORMS)."
        )
    raise errors.DeviceError(f"There is no device {spec!r}. {existing} {advice}")


def resolve_devices(specs: Sequence[str | Device] | None = None) -> tuple[Device, ...]:
    """Return the devices that a strategy is to run on.

    >>> resolve_devices(["CPU:0", "CPU:1"])
    (CpuDevice(id=0), CpuDevice(id=1))

    Args:
      specs: devices, each as in ``resolve_device``. None or an empty sequence means all local
        devices of JAX's default platform; if that is the CPU of a machine with an NVIDIA GPU, one
        line is logged.

    Raises:
      DeviceError: if ``specs`` is a single string or device, or one of its devices does not exist,
        is listed twice, or is of another platform than the first.
    """
    if specs is None:
        return _default_devices()
    if isinstance(specs, str | Device):
        text = specs if isinstance(specs, str) else short_device_string(specs)
        raise errors.DeviceError(
            f"devices is {specs!r}, and must be a list of devices: pass [{text!r}]."
        )
    if not isinstance(specs, Iterable):
        raise errors.DeviceError(
            f"devices is {specs!r}, and must be a list of devices, such as ['CPU:0', 'CPU:1']. To "
            'have more CPU devices call distrib.config.set_logical_devices("CPU", 4) first.'
        )
    devices = tuple(resolve_device(spec) for spec in specs)
    if not devices:
        return _default_devices()
    seen: set[Device] = set()
    for device in devices:
        if device in seen:
            raise errors.DeviceError(
                f"{device_string(device)} is listed twice in {list(specs)!r}: each replica needs a "
                "device of its own, so list each device once."
            )
        seen.add(device)
    kinds = sorted({_kind(device.platform) for device in devices})
    if len(kinds) > 1:
        raise errors.DeviceError(
            f"{[short_device_string(device) for device in devices]} mixes {' and '.join(kinds)} "
            "devices: the replicas run as one SPMD program, which is compiled for one platform. "
            f"List only {' or only '.join(kinds)} devices."
        )
    return devices


def device_string(device: Device) -> str:
    """Return the full name of a device, as TensorFlow writes it.

    The task is the index of the device's process. The job is ``localhost`` in a run of one process
    and ``worker`` in a run of several.

    >>> device_string(resolve_device("CPU:1"))
    '/job:localhost/replica:0/task:0/device:CPU:1'
    """
    return (
        f"/job:{_job()}/replica:0/task:{device.process_index}/device:{short_device_string(device)}"
    )


def short_device_string(device: Device) -> str:
    """Return the kind of a device and its number within its process.

    >>> short_device_string(resolve_device("/job:localhost/replica:0/task:0/device:CPU:1"))
    'CPU:1'
    """
    peers = jax.local_devices(process_index=device.process_index, backend=device.platform)
    return f"{_kind(device.platform)}:{peers.index(device)}"


def local_devices(kind: str) -> list[Device]:
    """Return this process's devices of one kind, in the order that their numbers follow.

    >>> local_devices("cpu")[:2]
    [CpuDevice(id=0), CpuDevice(id=1)]
    >>> local_devices("abacus")
    []
    """
    try:
        return jax.local_devices(backend=kind.lower())
    except RuntimeError:  # JAX has no such platform, or none of its devices.
        return []


def _default_devices() -> tuple[Device, ...]:
    warn_of_missed_gpu()
    return tuple(jax.local_devices())


def _kind(platform: str) -> str:
    return _KIND_OF_PLATFORM.get(platform.lower(), platform.upper())


def _job() -> str:
    return "localhost" if jax.process_count() == 1 else "worker"


def _existing() -> str:
    """Describe the devices of this process, those of the default platform first."""
    # Only these are asked for: asking for a platform that is not there can be slow (TPU).
    kinds = dict.fromkeys([_kind(jax.default_backend()), "GPU", "CPU"])
    return ", ".join(short_device_string(d) for kind in kinds for d in local_devices(kind))


def _check_is_this_task(spec: str, prefix: list[str]) -> None:
    """Raise unless each of the parts before the device names this process."""
    here = {"job": _job(), "replica": "0", "task": str(jax.process_index())}
    for part in prefix:
        match = _PREFIX_PART.fullmatch(part)
        if match is None:
            raise _malformed(spec)
        if here[match[1].lower()] != match[2]:
            raise errors.DeviceError(
                f"{spec!r} names a device of another task: this process is "
                f"/job:{here['job']}/replica:0/task:{here['task']}, with {_existing()}. Name a "
                "local device, which needs no job or task, such as 'CPU:0'."
            )


def _malformed(spec: str) -> errors.DeviceError:
    return errors.DeviceError(
        f"{spec!r} is not a device string: write KIND:NUMBER, such as 'GPU:0', '/cpu:1' or "
        f"'/job:localhost/replica:0/task:0/device:CPU:0'. This process has {_existing()}."
    )
