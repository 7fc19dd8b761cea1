"""Sums over the replicas of which each replica keeps a part: reduce-scatter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from distrib.collectives.options import CommunicationOptions
from distrib.collectives.packing import plan_packs
from distrib.platform.mesh import REPLICA_AXIS
from distrib.platform.shards import Shards


@runtime_checkable
class ScatteringOps(Protocol):
    """Cross-device ops that can leave the parts of a sum on different replicas."""

    def scatter_over_replicas(self, value: jax.Array, axis: int) -> jax.Array:
        """Return this replica's part, along ``axis``, of the sum of ``value`` over the replicas."""
        ...


def scattering_ops(ops: Any) -> ScatteringOps | None:
    """Return cross-device ops that can leave the parts of a sum on different replicas.

    None if they cannot, or send less than all bits.
    """
    if not isinstance(ops, ScatteringOps) or getattr(ops, "compression", None) is not None:
        return None
    return ops


@dataclass(frozen=True)
class Scattered:
    """An array of which each replica has a part.

    Attributes:
      part: the part of this replica, of the array filled up to equal parts.
      shards: how the array is split.
    """

    part: jax.Array
    shards: Shards

    def whole(self) -> jax.Array:
        """Return the array entire, on every replica; a collective."""
        axis = self.shards.axis
        return self.shards.cut(jax.lax.all_gather(self.part, REPLICA_AXIS, axis=axis, tiled=True))


def is_scattered(leaf: Any) -> bool:
    """Tell whether ``leaf`` is :class:`Scattered`; a leaf test for tree functions."""
    return isinstance(leaf, Scattered)


def gathered(tree: Any) -> Any:
    """Return a tree with its scattered arrays entire."""
    return jax.tree.map(
        lambda leaf: leaf.whole() if is_scattered(leaf) else leaf, tree, is_leaf=is_scattered
    )


def reduce_scatter(
    arrays: Sequence[jax.Array],
    shards: Sequence[Shards],
    ops: ScatteringOps,
    options: CommunicationOptions | None = None,
) -> list[Scattered]:
    """Add arrays over the replicas, and leave a part of each sum on each replica.

    Small arrays of one dtype are scattered together.

    Args:
      arrays: of any floating dtypes.
      shards: how each is split.
      ops: how one is added and split.
      options: how small arrays are packed.
    """
    options = options or CommunicationOptions()
    sizes = [array.size * array.dtype.itemsize for array in arrays]
    dtypes = [array.dtype for array in arrays]
    parts: dict[int, Scattered] = {}
    for pack in plan_packs(sizes, dtypes, options.pack_limit, options.tensor_limit):
        if len(pack) == 1:
            how = shards[pack[0]]
            part = ops.scatter_over_replicas(how.filled(arrays[pack[0]]), how.axis)
            parts[pack[0]] = Scattered(part, how)
            continue
        rows = [_rows(shards[i].filled(arrays[i]), shards[i]) for i in pack]
        mine = ops.scatter_over_replicas(jnp.concatenate(rows, axis=1), 0)[0]
        start = 0
        for i, row in zip(pack, rows, strict=True):
            stop = start + row.shape[1]
            parts[i] = Scattered(_part(mine[start:stop], shards[i]), shards[i])
            start = stop
    return [parts[i] for i in range(len(arrays))]


def _rows(filled: jax.Array, shards: Shards) -> jax.Array:
    """Return the parts of an array as rows ``[replica, elements]``."""
    return jnp.moveaxis(filled, shards.axis, 0).reshape(shards.count, -1)


def _part(row: jax.Array, shards: Shards) -> jax.Array:
    """Return a part in its shape, out of its row."""
    axis, shape = shards.axis, shards.filled_shape
    others = shape[:axis] + shape[axis + 1 :]
    length = row.size // math.prod(others)
    return jnp.moveaxis(row.reshape(length, *others), 0, axis)
