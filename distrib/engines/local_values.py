"""What a replica holds of the distributed values that a traced step meets."""

from __future__ import annotations

from typing import Any

import jax

from distrib.errors import ContextError
from distrib.values import DistributedValues, Mirrored, PerReplica
from distrib.variables import Variable


def local_value(value: DistributedValues) -> Any:
    """Return what this replica holds of a distributed value in a traced step.

    Raises:
      ContextError: for a per-replica value that is no argument of the step.
    """
    if isinstance(value, PerReplica) and value.local is not None:
        return value.local
    if isinstance(value, Mirrored):
        return value.values[0]
    raise ContextError(
        f"A {type(value).__name__} was used inside a step without being passed to it. A step sees "
        "its arguments: pass the value in args= or kwargs= of strategy.run."
    )


def local_tree(tree: Any) -> Any:
    """Return a tree with what this replica holds of each distributed value in it."""
    return jax.tree.map(
        lambda leaf: local_value(leaf) if isinstance(leaf, DistributedValues) else leaf,
        tree,
        is_leaf=is_kept,
    )


def is_kept(leaf: Any) -> bool:
    """Tell tree functions to stop at distributed values and variables."""
    return isinstance(leaf, DistributedValues | Variable)


def as_per_replica(tree: Any) -> Any:
    """Return a tree in which the arrays of this replica stand for those of all."""
    return jax.tree.map(
        lambda leaf: PerReplica.from_local(leaf) if isinstance(leaf, jax.Array) else leaf,
        tree,
        is_leaf=is_kept,
    )
