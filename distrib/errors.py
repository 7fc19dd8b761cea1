"""The errors that distrib raises itself.

Each is also the built-in error that a Python user would expect for that kind of fault, so that
``except ValueError`` and ``except RuntimeError`` keep their meaning.
"""

from __future__ import annotations


class DistribError(Exception):
    """The base of every error that distrib defines."""


class DeviceError(DistribError, ValueError):
    """A device was named that does not exist, or a list of devices is not usable."""


class VirtualDevicesError(DistribError, RuntimeError):
    """Virtual devices were asked for after JAX had started."""


class ContextError(DistribError, RuntimeError):
    """A function was called in the wrong context: replica, cross-replica, or another strategy's."""


class TracedValueError(DistribError, TypeError):
    """Python code branched on, or converted, a value that exists only when the step runs."""


class NestedTraceError(DistribError, RuntimeError):
    """A variable was changed, or ``run`` called, where a JAX transformation cannot carry it."""


class OutputError(DistribError, TypeError):
    """A step returned something that no replica can hand back."""


class NotMirroredError(DistribError, ValueError):
    """Copies of one value that must agree differ, or a value that must be mirrored is not."""


class UnevenReplicasError(DistribError, ValueError):
    """Replicas of unequal shape reached an operation that needs equal shapes."""


class MeetingError(DistribError, RuntimeError):
    """Replicas that run eagerly made different collective calls."""


class ReplicaDeadlineError(DistribError, TimeoutError):
    """A replica that runs eagerly neither returned nor met the others in time."""


class InputError(DistribError, ValueError):
    """A dataset cannot be distributed as it was given."""


class OutOfRangeError(DistribError, IndexError):
    """``get_next`` was called on an iterator that has ended."""


class PerReplicaError(DistribError, ValueError, TypeError):
    """A per-replica value was used as if it were one array."""


class VariableError(DistribError, ValueError):
    """A variable was created, read or assigned in a way that its definition does not allow."""


class NonFiniteError(DistribError, FloatingPointError):
    """A step gave NaN or infinity while ``distrib.config.enable_check_numerics()`` was on."""


class AggregationError(DistribError, ValueError):
    """A value cannot be combined over the replicas in the way that was asked for."""


class SlicesError(DistribError, ValueError):
    """Rows and indices of an ``IndexedSlices`` do not fit one another, or the table they are of."""


class UnsupportedError(DistribError, NotImplementedError):
    """An operation has no meaning for this kind of variable, or none that is agreed on."""
