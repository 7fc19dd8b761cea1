"""Containers that hold one component for each replica.

Between the strategy and the user a value that differs by replica is a :class:`PerReplica`, and a
value whose copies agree is a :class:`Mirrored`. The components of a per-replica value that came out
of a compiled step lie in one `jax.Array`, the *whole*, split over the devices; they are cut out of
it only when somebody asks for them.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from distrib.errors import PerReplicaError
from distrib.platform import ends_with_users_line
from distrib.platform.jax_compat import uncommitted
from distrib.values.arithmetic import ArrayOperators


class Layout(enum.Enum):
    """How the components of a per-replica value lie in its whole."""

    COMPONENTS = "components"
    """There is no whole: the components are separate objects, and their shapes may differ."""
    STACKED = "stacked"
    """Whole ``[replica, ...]``; a component is one row, without the replica axis."""
    CONCATENATED = "concatenated"
    """Whole ``[replica * k, ...]``; a component is ``k`` consecutive rows, as in a batch."""
    LOCAL = "local"
    """Inside a step that is being traced: the value of whichever replica runs the program."""


@jax.jit
def _drop_replica_axis(component: jax.Array) -> jax.Array:
    return component.reshape(component.shape[1:])


class DistributedValues:
    """Base of the values that have one component for each replica of this process."""

    @property
    def values(self) -> tuple[Any, ...]:
        """The components, in the order of the replicas of this process."""
        raise TypeError(f"{type(self).__name__} holds no components of its own")

    def __repr__(self) -> str:
        lines = ",\n".join(f"  {i}: {value!r}" for i, value in enumerate(self.values))
        return f"{type(self).__name__}:{{\n{lines}\n}}"


class PerReplica(DistributedValues):
    """One value for each replica.

    It is not an array: pass it to ``strategy.run``, which hands each replica its component, or
      bring
    it together with ``strategy.reduce`` or ``strategy.gather``.

    Args:
      values: the components, one for each replica of this process, in order.

    >>> PerReplica([1, 2]).values
    (1, 2)
    """

    __slots__ = ("_values", "layout", "local", "signature", "whole")

    def __init__(self, values: Sequence[Any]):
        self._values: tuple[Any, ...] | None = tuple(values)
        self.layout = Layout.COMPONENTS
        self.whole: jax.Array | None = None
        self.local: Any = None
        self.signature: tuple[Any, ...] | None = None

    @classmethod
    def stacked(cls, whole: jax.Array) -> PerReplica:
        """Wrap ``[replica, ...]``, a row on each replica's device."""
        return cls._from_whole(whole, Layout.STACKED)

    @classmethod
    def concatenated(cls, whole: jax.Array) -> PerReplica:
        """Wrap ``[replica * k, ...]``, ``k`` rows on each replica's device."""
        return cls._from_whole(whole, Layout.CONCATENATED)

    @classmethod
    def _from_whole(cls, whole: jax.Array, layout: Layout) -> PerReplica:
        self = cls.__new__(cls)
        self._values = None
        self.whole = whole
        self.layout = layout
        self.local = None
        self.signature = (layout, whole.shape, whole.dtype, whole.sharding.mesh)  # pyright: ignore[reportAttributeAccessIssue]
        return self

    @classmethod
    def from_local(cls, local: Any) -> PerReplica:
        """Wrap the traced value of the replica whose program is being built."""
        self = cls.__new__(cls)
        self._values = None
        self.whole = None
        self.layout = Layout.LOCAL
        self.local = local
        self.signature = None
        return self

    @property
    def values(self) -> tuple[Any, ...]:
        """The components in the order of this process's replicas.

        Inside a ``merge_call`` of a compiled step they are traced: reading them gathers the value
        from every replica.
        """
        if self._values is None:
            if self.layout is Layout.LOCAL:
                gathered = jax.lax.all_gather(self.local, "replica")
                return tuple(gathered[i] for i in range(gathered.shape[0]))
            self._values = tuple(self._cut())
        return self._values

    def _cut(self) -> list[jax.Array]:
        whole = self.whole
        if whole is None:
            raise TypeError("a per-replica value without components has no whole to cut")
        pieces = [shard.data for shard in local_shards(whole)]
        if self.layout is Layout.STACKED:
            # While they are committed: an uncommitted piece would be computed with on device 0.
            pieces = [_drop_replica_axis(piece) for piece in pieces]
        return [uncommitted(piece) for piece in pieces]

    @ends_with_users_line
    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise PerReplicaError(
            "A PerReplica is one value for each replica, and was used as one number or array "
            "outside of a replica. Use it inside strategy.run, or combine it first: "
            'strategy.reduce("MEAN", value, axis=None), strategy.gather(value, axis=0), or '
            "strategy.experimental_local_results(value) for the components."
        )

    __array__ = __float__ = __int__ = __bool__ = __getitem__ = __len__ = __iter__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __truediv__ = __rtruediv__ = __matmul__ = __rmatmul__ = __pow__ = __neg__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = item = mean = sum = _refuse

    def __format__(self, specification: str) -> str:
        return self._refuse() if specification else repr(self)


class Mirrored(DistributedValues, ArrayOperators):
    """One value of which every replica holds an equal copy. It reads as an array.

    Args:
      values: the copies, one for each replica of this process, in order. The first is the value
        that NumPy and JAX functions read.

    >>> float(np.asarray(Mirrored([3.0, 3.0])))
    3.0
    """

    __slots__ = ("_values", "whole")

    def __init__(self, values: Sequence[Any]):
        self._values: tuple[Any, ...] | None = tuple(values)
        self.whole: jax.Array | None = None

    @classmethod
    def from_whole(cls, whole: jax.Array) -> Mirrored:
        """Wrap an array that every device holds entire."""
        self = cls.__new__(cls)
        self._values = None
        self.whole = whole
        return self

    @property
    def values(self) -> tuple[Any, ...]:
        """The copies in the order of this process's replicas."""
        if self._values is None:
            if self.whole is None:
                raise TypeError("a Mirrored has neither copies nor a whole")
            self._values = tuple(uncommitted(shard.data) for shard in local_shards(self.whole))
        return self._values

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the value."""
        return self.value().shape

    @property
    def dtype(self) -> Any:
        """The dtype of the value."""
        return self.value().dtype

    @property
    def ndim(self) -> int:
        """The number of axes of the value."""
        return self.value().ndim

    def value(self) -> jax.Array:
        """Return the first replica's copy."""
        return jax.numpy.asarray(self.values[0])

    def numpy(self) -> np.ndarray:
        """Copy the first replica's value to the host."""
        return np.array(self.values[0])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.values[0], dtype=dtype)

    def __jax_array__(self) -> jax.Array:
        return self.value()


def local_shards(whole: jax.Array) -> list[Any]:
    """Return this process's shards of ``whole``, in the order of the mesh's devices."""
    position = {device: i for i, device in enumerate(whole.sharding.mesh.devices.flat)}  # pyright: ignore[reportAttributeAccessIssue]
    return sorted(whole.addressable_shards, key=lambda shard: position[shard.device])
