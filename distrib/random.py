"""Random keys that differ by replica and step, and are the same in every run."""

from __future__ import annotations

from typing import Any

import jax

from distrib.context import get_replica_context


def replica_key(key: jax.Array, step: Any = 0) -> jax.Array:
    """Return the key of this replica at this step.

    The step is folded into the key first, then the replica's id (`jax.random.fold_in`), so that the
    keys of all replicas and steps are independent and depend on nothing else.

    Args:
      key: a typed or a raw PRNG key, the same on every replica.
      step: an integer scalar, traced or not.

    Returns:
      A key of the same kind. In cross-replica context, that of replica 0.

    >>> import distrib
    >>> strategy = distrib.MirroredStrategy(["CPU:0", "CPU:1"])
    >>> draw = lambda: jax.random.uniform(replica_key(jax.random.key(0), step=3))
    >>> a, b = strategy.run(draw).values
    >>> bool(a != b)
    True
    """
    context = get_replica_context()
    replica = 0 if context is None else context.replica_id_in_sync_group
    return jax.random.fold_in(jax.random.fold_in(key, step), replica)
