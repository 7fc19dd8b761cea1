"""Replicas that run eagerly and have no example of a batch.

Such a replica brings nothing to sums: what it has made of nothing, and is NaN, counts as zero. Code
such as ``x.reshape(len(x), -1)`` cannot run for no examples at all. It then runs for stand-ins, and
the replica takes no part: it brings zeros, keeps its copies of variables as they are, and returns
what is left without the stand-ins, as in a compiled step.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from distrib.engines.outputs import is_array, is_end
from distrib.values import PerReplica
from distrib.variables import VariableSynchronization


class CannotRunEmpty(Exception):
    """A replica without examples failed, and is to be run for stand-ins. It never reaches users."""

    def __init__(self, replica: int):
        super().__init__(replica)
        self.replica = replica


def stand_ins(leaf: Any, replica: int, count: int) -> Any:
    """Return what a replica gets of a per-replica argument in place of no examples."""
    part = leaf.values[replica] if isinstance(leaf, PerReplica) else leaf
    shape = np.shape(part)
    if not isinstance(leaf, PerReplica) or not shape or shape[0]:
        return leaf
    values = list(leaf.values)
    values[replica] = jnp.zeros((count, *shape[1:]), part.dtype)
    return PerReplica(values)


def brought(kind: Any, payload: Any, *, takes_part: bool) -> Any:
    """Return what a replica without examples brings to a meeting.

    Args:
      kind: the kind of the meeting.
      payload: what its code has made.
      takes_part: whether it counts at all.
    """
    what = kind[0] if isinstance(kind, tuple) else kind
    if what == "assign":
        variable, change, value = payload
        if variable.synchronization is VariableSynchronization.ON_READ:
            value = jnp.asarray(value)  # A number counts once for each replica.
        return variable, change, jax.tree.map(lambda x: _brought(x, takes_part), value)
    if what == "all_reduce":
        return [_brought(x, takes_part) for x in payload]
    if what == "all_gather" and not takes_part:
        return [jax.lax.slice_in_dim(x, 0, 0, axis=kind[1] % x.ndim) for x in payload]
    return payload


def _brought(value: Any, takes_part: bool) -> Any:
    if not hasattr(value, "dtype"):
        return value
    if not takes_part:
        return jnp.zeros_like(value)
    if not jnp.issubdtype(value.dtype, jnp.inexact):
        return value
    return jnp.where(jnp.isnan(value), 0, value)


def without_stand_ins(one: Any, two: Any, other: Any) -> Any:
    """Return what a replica without examples returns, of what it did for one stand-in.

    Args:
      one: what it returned for one.
      two: what it returned for two: the axes that differ count examples.
      other: what a replica with examples returned. What is equal there is equal everywhere.
    """
    try:
        return jax.tree.map(_cut, one, two, other, is_leaf=is_end)
    except ValueError:  # Of another structure, which merging will say.
        return one


def _cut(one: Any, two: Any, other: Any) -> Any:
    if isinstance(one, int | float) and one != two:
        return type(one)(0)
    if not is_array(one):
        return one
    one, two, other = jnp.asarray(one), jnp.asarray(two), jnp.asarray(other)
    lengths = zip(one.shape, two.shape, strict=True)
    axes = {axis for axis, (short, long) in enumerate(lengths) if short != long}
    if axes:
        return one[tuple(slice(0, 0) if a in axes else slice(None) for a in range(one.ndim))]
    if one.shape == other.shape and np.array_equal(np.asarray(one), np.asarray(other)):
        return one
    return jnp.full_like(one, jnp.nan if jnp.issubdtype(one.dtype, jnp.inexact) else 0)
