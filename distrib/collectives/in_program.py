"""The collectives as they stand in the program of a replica.

All are called while a step is traced under the mesh axis :data:`distrib.REPLICA_AXIS`. Gradients
follow tf.distribute: the gradient of an all-reduce is the all-reduce of the incoming gradients with
the same op, which is what `jax.lax.psum` gives without replication checking.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from distrib.collectives.algorithm import AllReduceAlgorithm
from distrib.collectives.options import CommunicationOptions
from distrib.collectives.packing import map_packed, packing_for
from distrib.errors import AggregationError
from distrib.platform.mesh import REPLICA_AXIS
from distrib.platform.pytree_paths import leaves_with_paths
from distrib.reduce_op import ReduceOp


def check_arrays(tree: Any, what: str) -> list[jax.Array]:
    """Return the leaves of ``tree`` as arrays.

    Raises:
      TypeError: if a leaf is not an array; the message names its path.
    """
    arrays = []
    for path, leaf in leaves_with_paths(tree):
        if not hasattr(leaf, "dtype") or not hasattr(leaf, "shape"):
            raise TypeError(
                f"{what} got {leaf!r} of type {type(leaf).__name__} at {path or 'its root'}, which "
                "is not an array. Wrap it in jnp.asarray(...): a Python value is the same on every "
                "replica."
            )
        if isinstance(leaf.dtype, np.dtype) and leaf.dtype.kind in "OSU":
            raise TypeError(
                f"{what} got an array of dtype {leaf.dtype} at {path}, which no device can hold: "
                "keep text and objects outside of the step."
            )
        arrays.append(jnp.asarray(leaf))
    return arrays


def check_numbers(tree: Any, what: str) -> list[jax.Array]:
    """Return the leaves of ``tree`` as arrays that can be added.

    Raises:
      TypeError: if a leaf is not an array.
      AggregationError: if a leaf is boolean, or a typed PRNG key; the message names its path.
    """
    arrays = check_arrays(tree, what)
    for (path, _), array in zip(leaves_with_paths(tree), arrays, strict=True):
        if array.dtype == jnp.bool_ or not jnp.issubdtype(array.dtype, jnp.number):
            raise AggregationError(
                f"{what} cannot add values of dtype {array.dtype} at {path or 'the root'}: convert "
                "them to a number first, with .astype(jnp.int32) for one."
            )
    return arrays


def all_reduce(
    op: ReduceOp,
    tree: Any,
    *,
    num_replicas: int,
    ops: AllReduceAlgorithm,
    options: CommunicationOptions | None = None,
    scale: float | None = None,
) -> Any:
    """Reduce a tree over the replicas.

    Args:
      op: how.
      tree: arrays of any shapes and dtypes.
      num_replicas: the size of the mesh axis.
      ops: the algorithm.
      options: how tensors are packed.
      scale: multiply the sum by this instead of dividing by the number of replicas, for MEAN.

    Returns:
      The tree of results; MEAN of integers is floating point.

    Raises:
      TypeError: if a leaf is not an array.
      AggregationError: if a leaf is boolean, or a typed PRNG key.
    """
    leaves, treedef = jax.tree.flatten(tree)
    arrays = check_numbers(tree, f"all_reduce({op.name})") if leaves else []
    if op is ReduceOp.MEAN:
        arrays = [
            a if jnp.issubdtype(a.dtype, jnp.inexact) else a.astype(jnp.result_type(float))
            for a in arrays
        ]
    packing = packing_for(options or CommunicationOptions(), ops.num_packs)
    sums = map_packed(lambda x: ops.sum_over_replicas(x, num_replicas), arrays, packing)
    if op is ReduceOp.MEAN:
        sums = [
            s / num_replicas if scale is None else s * jnp.asarray(scale, s.dtype) for s in sums
        ]
    return jax.tree.unflatten(treedef, sums)


def all_reduce_with_feedback(
    op: ReduceOp,
    arrays: Sequence[jax.Array],
    residuals: Sequence[jax.Array],
    *,
    num_replicas: int,
    ops: AllReduceAlgorithm,
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Reduce arrays, adding what earlier calls rounded off, and return what this one does.

    Args:
      op: how.
      arrays: floating values.
      residuals: for each, an array of its shape, this replica's own: zeros at first, then what
        the last call returned.
      num_replicas: the size of the mesh axis.
      ops: the algorithm.

    Returns:
      The results, in the dtypes of ``arrays``, and the residuals for the next call. The values and
      residuals that go in, of all replicas, add up to the sum and the residuals that come out.
    """
    corrected = [a.astype(r.dtype) + r for a, r in zip(arrays, residuals, strict=True)]
    packing = packing_for(CommunicationOptions(), ops.num_packs)
    both = map_packed(lambda x: ops.sum_with_errors(x, num_replicas), corrected, packing)
    divisor = num_replicas if op is ReduceOp.MEAN else 1
    totals = [(s / divisor).astype(a.dtype) for (s, _), a in zip(both, arrays, strict=True)]
    return totals, [error for _, error in both]


def all_gather(tree: Any, axis: int) -> Any:
    """Concatenate a tree over the replicas along ``axis``.

    Raises:
      TypeError: if a leaf is not an array.
      AggregationError: if a leaf has no such axis.
    """
    arrays = check_arrays(tree, "all_gather")
    treedef = jax.tree.structure(tree)
    gathered = []
    for array in arrays:
        if not -array.ndim <= axis < array.ndim:
            raise AggregationError(
                f"all_gather along axis {axis} got an array of shape {array.shape}, which has no "
                "such axis. Scalars can be gathered as x[None] along axis 0."
            )
        along = axis % array.ndim
        if array.shape[along]:
            array = jax.lax.all_gather(array, REPLICA_AXIS, axis=along, tiled=True)
        # XLA refuses to gather nothing from each replica, which is nothing.
        gathered.append(array)
    return jax.tree.unflatten(treedef, gathered)


def from_first_replica(value: jax.Array) -> jax.Array:
    """Return replica 0's ``value`` on every replica; the others' may be anything, NaN too."""
    value = jnp.asarray(value)
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        data = from_first_replica(jax.random.key_data(value))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(value))
    numeric = value.astype(jnp.int32) if value.dtype == jnp.bool_ else value
    mine = jax.lax.axis_index(REPLICA_AXIS) == 0
    total = jax.lax.psum(jnp.where(mine, numeric, jnp.zeros_like(numeric)), REPLICA_AXIS)
    return total.astype(value.dtype)
