"""The kinds of change that a variable takes, and what each makes of the old value."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from distrib.errors import AggregationError
from distrib.values.indexed_slices import IndexedSlices, no_row
from distrib.variables.synchronization import VariableAggregation


def _divided(old: jax.Array, indices: Any, values: Any, options: dict[str, Any]) -> jax.Array:
    divisor = jnp.ones_like(old).at[indices].multiply(values, **options)
    return lax.div(old, divisor)


def _replaced(old: jax.Array, indices: Any, values: Any, options: dict[str, Any]) -> jax.Array:
    """Put rows in place of others; of rows with equal index the last one counts."""
    order = jnp.argsort(indices, stable=True)
    ordered = indices[order]
    is_last = jnp.concatenate([ordered[1:] != ordered[:-1], jnp.ones(1, bool)])
    indices = jnp.where(is_last, ordered, no_row(indices.dtype))
    return old.at[indices].set(values[order], **options)


_SCATTERS: dict[str, Callable[..., jax.Array]] = {
    "scatter_add": lambda old, i, x, options: old.at[i].add(x, **options),
    "scatter_sub": lambda old, i, x, options: old.at[i].add(-x, **options),
    "scatter_mul": lambda old, i, x, options: old.at[i].multiply(x, **options),
    "scatter_div": _divided,
    "scatter_max": lambda old, i, x, options: old.at[i].max(x, **options),
    "scatter_min": lambda old, i, x, options: old.at[i].min(x, **options),
    "scatter_update": _replaced,
}
ADDING_SCATTERS = ("scatter_add", "scatter_sub")
"""Those that give the same if rows of equal index are added first."""
UNCOMBINED_SCATTERS = ("scatter_max", "scatter_min", "scatter_update")
"""Those of which a sum or mean over the replicas means nothing."""


def change_name(kind: str) -> str:
    """Return the method that makes a kind of change, for messages."""
    return f"assign_{kind}" if kind in ("add", "sub") else kind


def combined(kind: str, old: jax.Array, value: Any) -> jax.Array:
    """Return the value after a change.

    Args:
      kind: ``"assign"``, ``"add"``, ``"sub"``, or the name of a scatter method.
      old: the value before.
      value: an array of its shape; for a scatter, :class:`distrib.IndexedSlices` of its rows.
    """
    if isinstance(value, IndexedSlices):
        if value.indices.shape[0] == 0:
            return old
        options = {"mode": "drop", "wrap_negative_indices": False}
        return _SCATTERS[kind](old, value.indices, value.values, options)
    if kind == "assign":
        return value
    return old + value if kind == "add" else old - value


combined_at_once = functools.partial(jax.jit, static_argnums=0)(combined)
"""The same as one compiled function, for changes outside of a step."""


def share_of_total(variable: Any, kind: str, value: Any, num_replicas: int) -> Any:
    """Return what each replica's copy of an ``ON_READ`` variable gets of an assignment outside.

    Raises:
      AggregationError: for adding to a variable that is summed, which cannot be divided faithfully.
    """
    if variable.aggregation is VariableAggregation.SUM and num_replicas > 1:
        if kind != "assign":
            raise AggregationError(
                f"Variable {variable.name!r} is ON_READ with aggregation=SUM and does not support "
                f"assign_{kind} in cross-replica context."
            )
        shared = jnp.asarray(value) / num_replicas
        return shared if jnp.issubdtype(variable.dtype, jnp.inexact) else jnp.trunc(shared)
    return value
