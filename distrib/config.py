"""The switches of distrib: what is decided for the whole process, once, before anything runs."""

from __future__ import annotations

from distrib.platform import devices, virtual_devices

__all__ = [
    "check_numerics_enabled",
    "disable_check_numerics",
    "enable_check_numerics",
    "functions_run_eagerly",
    "logical_devices",
    "run_functions_eagerly",
    "set_logical_devices",
]

_eagerly = False
_checks_numerics = False


def set_logical_devices(kind: str, count: int) -> None:
    """Split the CPU into ``count`` virtual devices, so that a laptop can run many replicas.

    Call it first thing in the program, before the first array or device look-up; importing JAX or
    distrib is not a look-up. It also gives XLA enough threads, without which virtual devices can
    deadlock in a collective (``PJRT_NPROC``; a sufficient value of your own is kept). Calling it
    again with the number of devices that exist does nothing.

    Example::

        import distrib

        distrib.config.set_logical_devices("CPU", 4)
        distrib.config.logical_devices("CPU")  # ['CPU:0', 'CPU:1', 'CPU:2', 'CPU:3']
        strategy = distrib.MirroredStrategy()  # four replicas

    Args:
      kind: ``"CPU"``. GPUs and TPUs are not split: their real devices are used.
      count: the number of devices, at least 1.

    Raises:
      ValueError: if ``kind`` is not ``"CPU"`` or ``count`` is not a positive int.
      VirtualDevicesError: if JAX has started with another number of CPU devices.
    """
    virtual_devices.set_logical_devices(kind, count)


def logical_devices(kind: str | None = None) -> list[str]:
    """Return the names of this process's devices of one kind, real or virtual.

    Looks up the devices, which starts JAX.

    >>> logical_devices("CPU")[:2]
    ['CPU:0', 'CPU:1']
    >>> logical_devices("abacus")
    []

    Args:
      kind: ``"CPU"``, ``"GPU"``, ``"TPU"``, ..., in any letter case; None for the kind that a
        strategy uses by default.
    """
    virtual_devices.ensure_thread_pool()
    found = devices.resolve_devices(None) if kind is None else devices.local_devices(kind)
    return [devices.short_device_string(device) for device in found]


def run_functions_eagerly(eagerly: bool) -> None:
    """Choose whether ``strategy.run`` runs its function eagerly, for debugging, or compiled.

    Eagerly, each replica runs in a Python thread of its own, on its own device, one after the
    other up to each collective. Replica ids are numbers, `print` and debuggers work, Python may
    branch on values, and the numbers are those of the compiled step, much later. Collectives of
    `jax.lax` over the mesh axis have no meaning there: use the replica context's.

    Args:
      eagerly: True for threads, False (the default) for compiled programs.

    Raises:
      TypeError: if it is not a bool.
    """
    global _eagerly
    if not isinstance(eagerly, bool):
        raise TypeError(f"run_functions_eagerly takes True or False, and got {eagerly!r}.")
    _eagerly = eagerly


def functions_run_eagerly() -> bool:
    """Return whether ``strategy.run`` runs its function eagerly.

    >>> functions_run_eagerly()
    False
    """
    return _eagerly


def enable_check_numerics() -> None:
    """Make every step check that its numbers are finite, from the next call of ``run`` on.

    A step that gives NaN or infinity then raises :class:`distrib.errors.NonFiniteError`, which
    names the argument it came in with, the gradient, variable or output, the replica, and how many
    elements; no variable has changed. What is checked: what a replica adds to the others' values
    (gradients of ``apply_gradients``, operands of all-reduces), new values of variables, and what
    the step returns. Inside of a loop or a transformation nothing is checked by itself.

    Steps are compiled anew with the checks in them, keep the old values of variables until they
    are over, and are waited for, so this is for debugging.

    >>> enable_check_numerics()
    >>> check_numerics_enabled()
    True
    >>> disable_check_numerics()
    """
    global _checks_numerics
    _checks_numerics = True


def disable_check_numerics() -> None:
    """Stop checking: from the next call of ``run`` on, steps are what they were before."""
    global _checks_numerics
    _checks_numerics = False


def check_numerics_enabled() -> bool:
    """Return whether steps check that their numbers are finite.

    >>> check_numerics_enabled()
    False
    """
    return _checks_numerics
