"""The third way in which an array lies on the mesh: split over the replicas along one axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from distrib.platform.mesh import REPLICA_AXIS


@dataclass(frozen=True)
class Shards:
    """How an array is split over the replicas along one of its axes.

    JAX splits an axis into equal parts only, so one whose length does not divide is filled up with
    zeros behind its end. XLA splits such lengths in the same places: to fill and to cut in a
    compiled program moves nothing between devices.

    Attributes:
      shape: the shape of the array.
      axis: the axis that is split.
      count: into how many parts.
    """

    shape: tuple[int, ...]
    axis: int
    count: int

    @property
    def spec(self) -> PartitionSpec:
        """Which axis of the array is split over the mesh axis of the replicas."""
        return PartitionSpec(*[None] * self.axis, REPLICA_AXIS)

    @property
    def filled_shape(self) -> tuple[int, ...]:
        """The shape of the array with its axis filled up."""
        part = -(-self.shape[self.axis] // self.count)
        return (*self.shape[: self.axis], part * self.count, *self.shape[self.axis + 1 :])

    @property
    def divides(self) -> bool:
        """Whether nothing has to be filled up."""
        return self.filled_shape == self.shape

    def sharding(self, mesh: Mesh) -> NamedSharding:
        """Return where the parts lie."""
        return NamedSharding(mesh, self.spec)

    def filled(self, array: jax.Array) -> jax.Array:
        """Return ``array`` with its axis filled up with zeros."""
        if self.divides:
            return array
        missing = [(0, b - a) for a, b in zip(self.shape, self.filled_shape, strict=True)]
        return jnp.pad(array, missing)

    def cut(self, array: jax.Array) -> jax.Array:
        """Return a filled array without what fills it up."""
        if self.divides:
            return array
        return jax.lax.slice_in_dim(array, 0, self.shape[self.axis], axis=self.axis)


def shards_of(shape: Sequence[int], count: int) -> Shards | None:
    """Return how an array is split: along its first axis that divides, else along its longest.

    The parts along the first axis lie end to end. A reduce-scatter of ``f32[784, 2048]`` over two
    CPU devices was measured to take 0.6 ms along the first axis, and 8 ms along the second.

    Returns:
      None where a part would be as large as the array: of a scalar, an array of one element, and
      with one replica.

    >>> shards_of((784, 128), 2)
    Shards(shape=(784, 128), axis=0, count=2)
    >>> shards_of((10, 784), 3).filled_shape
    (10, 786)
    >>> print(shards_of((), 2))
    None
    """
    shape = tuple(shape)
    dividing = [axis for axis, length in enumerate(shape) if length and length % count == 0]
    longest = max(range(len(shape)), key=lambda axis: shape[axis], default=None)
    axis = dividing[0] if dividing else longest
    if count == 1 or axis is None or shape[axis] < 2:
        return None
    return Shards(shape, axis, count)
