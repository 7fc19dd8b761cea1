"""Names for the leaves of a pytree, as errors and descriptions print them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.tree_util import DictKey, GetAttrKey, KeyPath


def path_string(path: KeyPath) -> str:
    """Return a key path as a reader would write it in Python.

    The first key stands bare when it is a name, so that ``state.params["Dense_0"]`` and
    ``{"params": {"Dense_0": ...}}`` give the same string. The empty path, of a pytree that is
    itself a leaf, gives ``"(root)"``.

    >>> path_string((DictKey("params"), DictKey("Dense_0"), DictKey("kernel")))
    "params['Dense_0']['kernel']"
    >>> [name for name, _ in leaves_with_paths(({"image": 1}, 2))]
    ["[0]['image']", '[1]']
    """
    if not path:
        return "(root)"
    first, rest = path[0], path[1:]
    name = first.name if isinstance(first, GetAttrKey) else None
    if isinstance(first, DictKey) and isinstance(first.key, str) and first.key.isidentifier():
        name = first.key
    if name is None:
        return jax.tree_util.keystr(path)
    return name + jax.tree_util.keystr(rest)


def leaves_with_paths(
    tree: Any, is_leaf: Callable[[Any], bool] | None = None
) -> list[tuple[str, Any]]:
    """Return the leaves of ``tree``, each with the string of its path, in JAX's order.

    Args:
      tree: any pytree. None has no leaves, as everywhere in JAX.
      is_leaf: says of a node whether to stop there, as in ``jax.tree.leaves``.

    >>> leaves_with_paths({"b": [1, None], "a": 2})
    [('a', 2), ('b[0]', 1)]
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    return [(path_string(path), leaf) for path, leaf in leaves]
