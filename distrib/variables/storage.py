"""Where the value of a variable lives: one storage class for each answer.

A storage owns a :class:`Cell`, which holds one `jax.Array`: a copy on each device (mirrored), a row
on each device (on-read), or an array on one device (placed). A compiled step takes the arrays out
of the cells it reads, is given the buffers of those it writes (donation), and puts the new arrays
back. Split over the devices: :mod:`distrib.variables.sharded_storage`.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from distrib.errors import ContextError, VariableError
from distrib.platform.jax_compat import uncommitted
from distrib.platform.mesh import replicated, split
from distrib.platform.shards import Shards
from distrib.values import DistributedValues, IndexedSlices, Mirrored, PerReplica, local_shards
from distrib.variables.change import combined_at_once
from distrib.variables.synchronization import VariableAggregation

_LOCK_SECONDS = 60.0
_cells_lock = threading.RLock()
_changes_lock = threading.RLock()


@contextlib.contextmanager
def changes_held() -> Iterator[None]:
    """Keep other threads from changing variables, though not from reading them.

    Taken before :func:`cells_held` by whoever reads values in order to write new ones.

    Raises:
      ContextError: if another thread has held them for 60 s.
    """
    with _held(_changes_lock):
        yield


@contextlib.contextmanager
def cells_held() -> Iterator[None]:
    """Keep other threads from reading and changing variables for the length of a ``with`` block.

    A step takes the arrays of the variables that it writes, and puts new ones in their place. A
    thread that came between would find them gone.

    Raises:
      ContextError: if another thread has held them for 60 s: a step is running, and waits for this
        thread, which reads a variable in a callback of the step.
    """
    with _held(_cells_lock):
        yield


@contextlib.contextmanager
def _held(lock: threading.RLock) -> Iterator[None]:  # pyright: ignore[reportInvalidTypeForm]
    if not lock.acquire(timeout=_LOCK_SECONDS):
        raise ContextError(
            f"A variable was used in vain for {_LOCK_SECONDS:.0f} s while another thread ran a "
            "step. If this is a callback of that step, pass it the value as an argument, and "
            "assign what it returns."
        )
    try:
        yield
    finally:
        lock.release()


# How often an array of a cell has been handed to the user. As long as this stands still, no step
# need look for arrays that it must copy before it donates them.
_lendings = 0


class Cell:
    """The box that holds a variable's array.

    Attributes:
      array: the current value.
      lent: whether the user may hold a reference to ``array`` or to one of its buffers.
    """

    __slots__ = ("array", "lent")

    def __init__(self, array: jax.Array):
        self.array = array
        self.lent = False

    def lend(self) -> jax.Array:
        """Return the array to the user, and remember that it must outlive the next donation."""
        global _lendings
        with cells_held():
            if not self.lent:
                self.lent = True
                _lendings += 1
            return self.array

    def put(self, array: jax.Array) -> None:
        """Replace the array with a new one that nobody else holds."""
        with cells_held():
            self.array = array
            self.lent = False

    def change(self, combine: str, value: Any) -> None:
        """Assign, add or subtract a value that lies as the array does."""
        with changes_held(), cells_held():
            if combine != "assign":
                value = combined_at_once(combine, self.array, value)
            self.put(value)


class LentCells:
    """The cells that a step writes, watched for arrays that the user holds."""

    def __init__(self, cells: Sequence[Cell]):
        self._cells = cells
        self._seen = -1

    def copy_lent(self) -> None:
        """Put copies in place of arrays that the user may hold, so that donating spares those."""
        if self._seen == _lendings:
            return
        for cell in self._cells:
            if cell.lent:
                cell.put(cell.array.copy())
        self._seen = _lendings


class Storage(Protocol):
    """What a variable and an engine need of the place where a value lives."""

    cell: Cell

    @property
    def per_replica(self) -> bool:
        """Whether the cell's array has a leading replica axis."""
        ...

    @property
    def num_copies(self) -> int:
        """How many copies there are, over all processes."""
        ...

    @property
    def shards(self) -> Shards | None:
        """How the cell's array is split over the mesh; None where it is not."""
        ...

    def read(self) -> Any:
        """Return the value in cross-replica context, aggregated if the copies differ."""
        ...

    def whole(self) -> jax.Array:
        """Return the array with all of its copies."""
        ...

    def components(self) -> tuple[jax.Array, ...]:
        """Return this process's copies in the order of the replicas."""
        ...

    def put_components(self, components: Sequence[jax.Array]) -> None:
        """Store new copies, one for each replica of this process."""
        ...

    def assign(self, value: Any, combine: str) -> Any:
        """Change in cross-replica context; ``combine`` is the kind of change."""
        ...


@functools.cache
def _copier(sharding: Any) -> Any:
    return jax.jit(lambda x: x.copy(), out_shardings=sharding)


def own_copy(value: Any, sharding: Any) -> jax.Array:
    """Place ``value`` under ``sharding`` in buffers that nobody else holds."""
    placed = jax.device_put(value, sharding)
    if isinstance(value, np.ndarray | jax.Array):
        # device_put may alias the buffer that it was given, and a step would then donate it.
        placed = _copier(sharding)(placed)
    return placed


class MirroredStorage:
    """A copy on each device of a mesh, all equal unless a replica was told to keep its own."""

    per_replica = False
    shards = None

    def __init__(self, value: Any, mesh: Mesh):
        self._sharding = replicated(mesh)
        self._devices = mesh.local_devices
        self.cell = Cell(own_copy(value, self._sharding))

    @property
    def num_copies(self) -> int:
        """The number of devices."""
        return len(self._sharding.device_set)

    def read(self) -> jax.Array:
        """Return the first replica's copy."""
        return uncommitted(local_shards(self.cell.lend())[0].data)

    def whole(self) -> jax.Array:
        """Return the array that every device holds entire."""
        return self.cell.lend()

    def components(self) -> tuple[jax.Array, ...]:
        """Return the copies of this process."""
        return tuple(uncommitted(shard.data) for shard in local_shards(self.cell.lend()))

    def put_components(self, components: Sequence[jax.Array]) -> None:
        """Store new copies."""
        self.cell.put(self._placed(PerReplica(components)))

    def assign(self, value: Any, combine: str) -> Mirrored:
        """Assign to every copy; a per-replica value gives each copy its own component."""
        placed = self._placed(value)
        self.cell.change(combine, placed)
        return Mirrored.from_whole(self.cell.lend())

    def _placed(self, value: Any) -> Any:
        if isinstance(value, IndexedSlices):
            return jax.device_put(value, self._sharding)
        if not isinstance(value, DistributedValues):
            return own_copy(value, self._sharding)
        devices = self._devices
        parts = [
            jax.device_put(jnp.array(part, dtype=self.cell.array.dtype), device)
            for part, device in zip(value.values, devices, strict=True)
        ]
        return jax.make_array_from_single_device_arrays(
            self.cell.array.shape, self._sharding, parts
        )


class OnReadStorage:
    """A copy on each device that its replica alone writes; a read aggregates them."""

    per_replica = True
    shards = None

    def __init__(self, value: Any, mesh: Mesh, aggregation: VariableAggregation, name: str):
        self._mesh = mesh
        self._aggregation = aggregation
        self._name = name
        self._size = mesh.devices.size
        self.cell = Cell(self._spread(jnp.asarray(value)))

    @property
    def num_copies(self) -> int:
        """The number of replicas."""
        return self._size

    def _spread(self, value: jax.Array) -> jax.Array:
        rows = np.broadcast_to(np.asarray(value)[None], (self._size, *value.shape))
        return own_copy(rows, split(self._mesh))

    def read(self) -> jax.Array:
        """Return the copies, aggregated.

        Raises:
          VariableError: if the aggregation is NONE.
        """
        if self._aggregation is VariableAggregation.NONE:
            raise VariableError(
                f"Variable {self._name!r} is ON_READ with aggregation=NONE, so its {self._size} "
                "copies have no common value: read it inside strategy.run, read .values, or give "
                "it an aggregation."
            )
        if self._aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
            return self.components()[0]
        reducer = _reducer(self._mesh, self._aggregation is VariableAggregation.MEAN)
        with cells_held():
            total = reducer(self.cell.array)
        return uncommitted(local_shards(total)[0].data)

    def whole(self) -> jax.Array:
        """Return the array ``[replica, ...]``."""
        return self.cell.lend()

    def components(self) -> tuple[jax.Array, ...]:
        """Return each replica's own copy."""
        return PerReplica.stacked(self.cell.lend()).values

    def put_components(self, components: Sequence[jax.Array]) -> None:
        """Store new copies."""
        self.assign(PerReplica(components), "assign")

    def assign(self, value: Any, combine: str) -> PerReplica:
        """Assign to all copies so that a read gives ``value``: SUM divides it among them.

        Raises:
          VariableError: for "add" and "sub" under SUM, which cannot be divided faithfully.
        """
        if isinstance(value, DistributedValues):
            rows = own_copy(
                np.stack([np.asarray(part) for part in value.values]), split(self._mesh)
            )
        elif self._aggregation is VariableAggregation.SUM:
            if combine != "assign":
                raise VariableError(
                    f"Variable {self._name!r} is ON_READ with aggregation=SUM and does not support "
                    f"assign_{combine} in cross-replica context: call it inside strategy.run, or "
                    "assign the new total."
                )
            rows = self._spread(_share(jnp.asarray(value), self._size))
        else:
            rows = self._spread(jnp.asarray(value))
        self.cell.change(combine, rows)
        return PerReplica.stacked(self.cell.lend())


def _share(total: jax.Array, parts: int) -> jax.Array:
    if jnp.issubdtype(total.dtype, jnp.inexact):
        return total / parts
    return jnp.trunc(total / parts).astype(total.dtype)


@functools.cache
def _reducer(mesh: Mesh, mean: bool) -> Any:
    def reduced(x: jax.Array) -> jax.Array:
        return x.mean(0) if mean else x.sum(0, dtype=x.dtype)

    return jax.jit(reduced, out_shardings=replicated(mesh))


class PlacedStorage:
    """One array on one device; with no device given, where JAX puts it."""

    per_replica = False
    shards = None

    def __init__(self, value: Any, device: jax.Device | None):
        self.device = device
        self.cell = Cell(self._placed(value))

    @property
    def num_copies(self) -> int:
        """One."""
        return 1

    def _placed(self, value: Any) -> Any:
        if isinstance(value, IndexedSlices):
            return value if self.device is None else jax.device_put(value, self.device)
        if isinstance(value, DistributedValues):
            value = value.values[0]
        copied = jnp.array(value, copy=True)
        return copied if self.device is None else jax.device_put(copied, self.device)

    def read(self) -> jax.Array:
        """Return the array."""
        array = self.cell.lend()
        return array if self.device is None else uncommitted(array)

    def whole(self) -> jax.Array:
        """Return the array."""
        return self.cell.lend()

    def components(self) -> tuple[jax.Array, ...]:
        """Return the array, in a tuple of one."""
        return (self.read(),)

    def put_components(self, components: Sequence[jax.Array]) -> None:
        """Store the first copy: there is one."""
        self.cell.put(self._placed(components[0]))

    def assign(self, value: Any, combine: str) -> jax.Array:
        """Assign, add or subtract."""
        placed = self._placed(value)
        self.cell.change(combine, placed)
        return self.read()


class AbandonedStorage:
    """No place at all: of a variable that never got a value. Whatever it is asked raises."""

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        raise VariableError(
            f"Variable {self._name!r} was created inside strategy.run by a step that failed, and "
            "never got a value. Let the step create it again, by setting what holds it to None; "
            "or create it before, inside `with strategy.scope():`."
        )
