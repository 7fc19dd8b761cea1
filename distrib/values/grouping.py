"""From one tree for each replica to one tree of distributed values, and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from distrib.values.distributed_values import DistributedValues, Mirrored, PerReplica


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


def grouped(
    trees: Sequence[Any],
    container: type[Mirrored] | type[PerReplica],
    is_leaf: Callable[[Any], bool] | None = None,
) -> Any:
    """Turn a tree for each copy into one tree, with a container in place of arrays.

    Args:
      trees: a tree for each copy, all of one structure; of one copy it is the result.
      container: :class:`Mirrored` or :class:`PerReplica`.
      is_leaf: says of a node whether to stop there, as in ``jax.tree.map``.

    Returns:
      A tree of that structure. Leaves that are one object, or equal constants, stay as they are.

    >>> grouped([(1.5, 7), (2.5, 7)], PerReplica)[0].values
    (1.5, 2.5)
    """
    if len(trees) == 1:
        return trees[0]

    def group(*leaves: Any) -> Any:
        first = leaves[0]
        if isinstance(first, jax.Array):
            return container(leaves)
        same = all(x is first or (type(x) is type(first) and x == first) for x in leaves)
        return first if same else PerReplica(leaves)

    return jax.tree.map(group, *trees, is_leaf=is_leaf)


def ungrouped(tree: Any, is_leaf: Callable[[Any], bool]) -> Any:
    """Return a tree with a tuple of components in place of each leaf; of one if it has none.

    Args:
      tree: what :func:`grouped` returned.
      is_leaf: tells where to stop: at distributed values at least.

    >>> ungrouped((PerReplica([1, 2]), 7), is_distributed)
    ((1, 2), (7,))
    """
    return jax.tree.map(
        lambda leaf: tuple(leaf.values) if is_distributed(leaf) else (leaf,),
        tree,
        is_leaf=lambda leaf: leaf is None or is_leaf(leaf),
    )


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
