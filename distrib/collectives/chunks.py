"""An array as equal chunks, one for each replica."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def cut_into_chunks(value: jax.Array, num_replicas: int) -> jax.Array:
    """Return ``[replica, elements]``: the elements of ``value`` in order, then zeros.

    >>> print(cut_into_chunks(jnp.arange(1, 4), 2))
    [[1 2]
     [3 0]]
    """
    flat = value.reshape(-1)
    return jnp.pad(flat, (0, -flat.size % num_replicas)).reshape(num_replicas, -1)


def joined(chunks: jax.Array, like: jax.Array) -> jax.Array:
    """Return the array of the shape of ``like`` that has been cut into chunks."""
    return chunks.reshape(-1)[: like.size].reshape(like.shape)
