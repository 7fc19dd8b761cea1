"""How the values of the replicas are added up inside a step: the algorithm behind an all-reduce."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import jax

from distrib.platform.mesh import REPLICA_AXIS


@runtime_checkable
class CrossDeviceOps(Protocol):
    """An algorithm that adds one array over the replicas.

    ``sum_over_replicas`` is called inside the program of a replica, under the mesh axis
    :data:`distrib.REPLICA_AXIS`, and returns the same array on every replica. Its gradient must be
    the sum over the replicas of the incoming gradients.
    """

    def sum_over_replicas(self, value: jax.Array, num_replicas: int) -> jax.Array:
        """Return the sum of ``value`` over the replicas, in its own shape."""
        ...


class NcclAllReduce:
    """All-reduce as XLA does it: by NCCL on GPUs, through shared memory on CPU devices."""

    def sum_over_replicas(self, value: jax.Array, num_replicas: int) -> jax.Array:
        """Return the sum of ``value`` over the replicas, in its own shape."""
        return jax.lax.psum(value, REPLICA_AXIS)

    def scatter_over_replicas(self, value: jax.Array, axis: int) -> jax.Array:
        """Return this replica's part, along ``axis``, of the sum of ``value`` over the replicas."""
        return jax.lax.psum_scatter(value, REPLICA_AXIS, scatter_dimension=axis, tiled=True)


class ReductionToOneDevice:
    """Bring all values together, add them up there, and hand out the result.

    Every replica adds the same values in the same order, so the result does not depend on how the
    hardware orders a reduction: replica 0's value first, then replica 1's, and so on.

    Args:
      accumulation_fn: takes the list of the replicas' arrays and returns their sum; by default they
        are added in the order of the replicas.
    """

    def __init__(self, accumulation_fn: Callable[[Sequence[jax.Array]], Any] | None = None):
        self._accumulate = accumulation_fn or _add_in_order

    def sum_over_replicas(self, value: jax.Array, num_replicas: int) -> jax.Array:
        """Return the accumulated ``value`` of the replicas, in its own shape."""

        @jax.custom_vjp
        def total(x: jax.Array) -> jax.Array:
            gathered = jax.lax.all_gather(x, REPLICA_AXIS)
            return self._accumulate([gathered[i] for i in range(num_replicas)])

        total.defvjp(lambda x: (total(x), None), lambda _, gradient: (total(gradient),))
        return total(value)


def _add_in_order(values: Sequence[jax.Array]) -> jax.Array:
    result = values[0]
    for value in values[1:]:
        result = result + value
    return result
