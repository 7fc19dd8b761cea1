"""A variable that is split over the devices of the replicas."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from distrib.platform.jax_compat import uncommitted
from distrib.platform.mesh import replicated
from distrib.platform.shards import Shards
from distrib.values import DistributedValues, Mirrored, local_shards
from distrib.variables.storage import Cell, cells_held, own_copy


class ShardedStorage:
    """A part on each device of a mesh; every reader gets the value entire.

    The cell holds an array of the value's shape, filled up to parts of equal length.
    """

    per_replica = False

    def __init__(self, value: Any, mesh: Mesh, shards: Shards):
        self.shards = shards
        self._mesh = mesh
        self.cell = Cell(self._placed(value))

    @property
    def num_copies(self) -> int:
        """As many as there are devices: each reads the value entire."""
        return self._mesh.devices.size

    def _placed(self, value: Any) -> jax.Array:
        if isinstance(value, DistributedValues):
            value = value.values[0]
        sharding = self.shards.sharding(self._mesh)
        if self.shards.divides:
            return own_copy(value, sharding)
        missing = zip(self.shards.shape, self.shards.filled_shape, strict=True)
        return own_copy(np.pad(np.asarray(value), [(0, b - a) for a, b in missing]), sharding)

    def _gathered(self) -> jax.Array:
        """Return the value with a copy on each device, in buffers of its own."""
        with cells_held():
            return _gatherer(self.shards, replicated(self._mesh))(self.cell.array)

    def read(self) -> jax.Array:
        """Return the value on the first device."""
        return self.components()[0]

    def whole(self) -> jax.Array:
        """Return the value as it is split; entire on each device where the parts are unequal."""
        return self.cell.lend() if self.shards.divides else self._gathered()

    def components(self) -> tuple[jax.Array, ...]:
        """Return the value, entire, on each device."""
        return tuple(uncommitted(shard.data) for shard in local_shards(self._gathered()))

    def put_components(self, components: Sequence[jax.Array]) -> None:
        """Store a new value, which is the same in all components."""
        self.cell.put(self._placed(components[0]))

    def assign(self, value: Any, combine: str) -> Mirrored:
        """Assign; of a per-replica value the first component."""
        placed = self._placed(value)
        self.cell.change(combine, placed)
        return Mirrored.from_whole(self._gathered())


@functools.lru_cache(maxsize=1024)
def _gatherer(shards: Shards, everywhere: NamedSharding) -> Any:
    # Never the cell's own buffers, which the next step may be given.
    return jax.jit(lambda x: shards.cut(x).copy(), out_shardings=everywhere)
