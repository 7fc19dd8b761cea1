"""What replicas exchange of an ``IndexedSlices``: its rows, and not the table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from distrib.collectives.in_program import check_numbers
from distrib.reduce_op import ReduceOp
from distrib.values import IndexedSlices


def scaled_rows(op: ReduceOp, slices: IndexedSlices, num_replicas: int) -> IndexedSlices:
    """Return what a replica adds to a sum or mean of slices over the replicas.

    Raises:
      AggregationError: if the values cannot be added.
    """
    (values,) = check_numbers(slices.values, f"all_reduce({op.name}) of an IndexedSlices")
    return slices.with_values(values / num_replicas if op is ReduceOp.MEAN else values)


def all_reduce_rows(
    op: ReduceOp,
    slices: IndexedSlices,
    *,
    num_replicas: int,
    gather: Callable[[Any], Any],
    merge: bool = True,
) -> IndexedSlices:
    """Reduce slices over the replicas: all of their rows, in the order of the replicas.

    A replica merges its rows of equal index before it sends them.

    Args:
      op: how; MEAN divides each row by the number of replicas.
      slices: this replica's.
      num_replicas: how many there are.
      gather: concatenates a tree over the replicas along the first axis.
      merge: whether rows of equal index may be added.
    """
    slices = scaled_rows(op, slices, num_replicas)
    if num_replicas == 1:
        return slices
    if merge:
        slices = slices.merged()
    values, indices = gather((slices.values, slices.indices))
    return IndexedSlices(values, indices, slices.dense_shape)


def concatenated_rows(parts: Sequence[IndexedSlices]) -> IndexedSlices:
    """Return the rows of several slices of one table, one after the other."""
    values = jnp.concatenate([part.values for part in parts])
    indices = jnp.concatenate([part.indices for part in parts])
    return IndexedSlices(values, indices, parts[0].dense_shape)


def all_rows(table: jax.Array) -> IndexedSlices:
    """Return a table as slices that have every row."""
    return IndexedSlices(table, jnp.arange(table.shape[0]), table.shape)
