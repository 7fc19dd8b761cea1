"""Mixed precision: compute in a small dtype, with parameters kept and updated in a larger one.

After Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.1: the stored copies are
the master weights; the model sees them rounded. bfloat16 has the range of float32, so no loss need
be scaled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from distrib.variables import Variable


def checked_compute_dtype(dtype: Any) -> Any:
    """Return ``dtype`` as a ``jnp.dtype``; None for None.

    Raises:
      TypeError: if it is not a floating dtype.
    """
    if dtype is None:
        return None
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(
            f"compute_dtype is {dtype!r}, and must be a floating dtype, such as jnp.bfloat16."
        )
    return jnp.dtype(dtype)


def rounded(tree: Any, dtype: Any) -> Any:
    """Return a tree with its real floating leaves in ``dtype`` and the others as they are.

    >>> tree = rounded({"w": jnp.ones(2), "count": jnp.int32(3)}, jnp.bfloat16)
    >>> tree["w"].dtype.name, tree["count"].dtype.name
    ('bfloat16', 'int32')
    """
    return jax.tree.map(
        lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree
    )


def as_stored(leaves: Sequence[Any], variables: Sequence[Variable]) -> list[Any]:
    """Return real floating leaves in the dtypes of ``variables``, and others as they are."""

    def stored(leaf: Any, variable: Variable) -> Any:
        dtypes = jnp.result_type(leaf), variable.dtype
        if all(jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes):
            return jnp.asarray(leaf, variable.dtype)
        return leaf

    return [stored(leaf, v) for leaf, v in zip(leaves, variables, strict=True)]
