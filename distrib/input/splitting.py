"""How one global batch is cut into a piece for each replica."""

from __future__ import annotations

import reprlib
from typing import Any

import jax

from distrib.errors import InputError
from distrib.platform.pytree_paths import leaves_with_paths

# So many leaves are named in a message before the rest are only counted.
_MOST_NAMED = 8


def piece_sizes(num_examples: int, num_replicas: int) -> tuple[int, ...]:
    """Return how many examples of a batch each replica gets.

    tf.distribute's rule: the batch is cut left to right into pieces of
    ``ceil(num_examples / num_replicas)``; the last piece that is not empty may be shorter, and
    what follows is empty. Only the batch's own size counts, not a nominal one.

    Args:
      num_examples: the leading length of the batch, 0 or more.
      num_replicas: how many pieces, 1 or more.

    Returns:
      A tuple of ``num_replicas`` ints whose sum is ``num_examples``.

    Raises:
      InputError: if a number is out of its range.

    >>> piece_sizes(7, 3), piece_sizes(4, 3), piece_sizes(5, 4)
    ((3, 3, 1), (2, 2, 0), (2, 2, 1, 0))
    """
    if num_examples < 0 or num_replicas < 1:
        raise InputError(
            f"{num_examples} examples cannot be cut into {num_replicas} pieces: pass 0 or more "
            "examples and 1 or more replicas."
        )
    size = -(-num_examples // num_replicas)
    return tuple(
        max(0, min(size, num_examples - replica * size)) for replica in range(num_replicas)
    )


def batch_size_of(tree: Any, *, what: str = "batch") -> int:
    """Return the leading length that all leaves of ``tree`` share.

    Args:
      tree: a pytree of arrays ``[examples, ...]``.
      what: what the tree is called in a message.

    Raises:
      InputError: if there are no leaves, a leaf is no array or has rank 0, or the lengths differ;
        it names the leaves and their lengths.

    >>> import numpy as np
    >>> batch_size_of({"image": np.zeros((4, 28, 28)), "label": np.zeros(4)})
    4
    """
    return _common_length(jax.tree_util.tree_leaves(tree), tree, what)


def split_batch(tree: Any, num_replicas: int) -> list[Any]:
    """Cut a global batch into one piece for each replica, by the rule of ``piece_sizes``.

    Args:
      tree: a pytree of arrays ``[examples, ...]``.
      num_replicas: how many pieces, 1 or more.

    Returns:
      ``num_replicas`` trees of ``tree``'s structure. The leaf of a NumPy leaf is a view
      ``[piece, ...]`` of it (nothing is copied), possibly with ``piece`` 0.

    Raises:
      InputError: as ``batch_size_of`` and ``piece_sizes``.

    >>> import numpy as np
    >>> split_batch((np.arange(5),), 4)
    [(array([0, 1]),), (array([2, 3]),), (array([4]),), (array([], dtype=int64),)]
    """
    leaves, structure = jax.tree_util.tree_flatten(tree)
    sizes = piece_sizes(_common_length(leaves, tree, "batch"), num_replicas)
    if num_replicas == 1:
        return [tree]
    pieces, start = [], 0
    for size in sizes:
        cut = slice(start, start + size)
        pieces.append(structure.unflatten([leaf[cut] for leaf in leaves]))
        start += size
    return pieces


def _common_length(leaves: list[Any], tree: Any, what: str) -> int:
    # The paths are worked out only for a message: this runs once a batch.
    try:
        lengths = {leaf.shape[0] for leaf in leaves}
    except (AttributeError, IndexError, TypeError):
        lengths = set()
    if len(lengths) != 1:
        raise InputError(_fault(tree, what))
    return lengths.pop()


def _fault(tree: Any, what: str) -> str:
    named = leaves_with_paths(tree)
    if not named:
        return (
            f"the {what} is {reprlib.repr(tree)}, which holds no arrays: pass a pytree with at "
            "least one array in it."
        )
    for path, leaf in named:
        shape = getattr(leaf, "shape", None)
        if shape is None:
            return (
                f"the {what}'s leaf {path} is a {type(leaf).__name__}, {reprlib.repr(leaf)}; every "
                "leaf must be an array [examples, ...]: convert it with np.asarray."
            )
        if not shape:
            return (
                f"the {what}'s leaf {path} has rank 0; every leaf must be an array [examples, "
                "...]: batch the dataset first (ds.batch(n), or batch_size=n in its loader)."
            )
    lengths = ", ".join(f"{path} has {leaf.shape[0]}" for path, leaf in named[:_MOST_NAMED])
    more = f" ({len(named) - _MOST_NAMED} more leaves)" if len(named) > _MOST_NAMED else ""
    return (
        f"the leaves of the {what} differ in leading length: {lengths}{more}; each must hold as "
        "many examples as the others."
    )
