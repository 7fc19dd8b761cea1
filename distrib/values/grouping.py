"""From one tree for each replica to one tree of distributed values, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from distrib.values.distributed_values import DistributedValues, PerReplica


def is_distributed(value: Any) -> bool:
    """Tell whether ``value`` has one component for each replica; a leaf test for tree functions."""
    return isinstance(value, DistributedValues)


def regroup(trees: Sequence[Any]) -> Any:
    """Turn one tree for each replica into one tree of per-replica values.

    Args:
      trees: a tree for each replica, all of one structure.

    Returns:
      A tree of that structure. A leaf that is the same object in all trees stays as it is;
      every other leaf becomes a :class:`PerReplica`. With one replica, the tree itself.

    Raises:
      ValueError: if the structures differ.

    >>> regroup([{"a": 1.5}, {"a": 2.5}])["a"].values
    (1.5, 2.5)
    """
    if len(trees) == 1:
        return trees[0]
    return jax.tree.map(lambda *leaves: PerReplica(leaves), *trees)


def select_replica(tree: Any, index: int) -> Any:
    """Return ``tree`` with each distributed value replaced by component ``index``.

    >>> select_replica((PerReplica([1, 2]), "x"), 1)
    (2, 'x')
    """
    return jax.tree.map(
        lambda leaf: leaf.values[index] if is_distributed(leaf) else leaf,
        tree,
        is_leaf=is_distributed,
    )
