"""What the engines need of an algorithm that adds values over the replicas."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import jax


@runtime_checkable
class SumsOverReplicas(Protocol):
    """An algorithm of one's own: anything with this one method.

    ``sum_over_replicas`` is called inside the program of a replica, under the mesh axis
    :data:`distrib.REPLICA_AXIS`, and returns the same array on every replica. Its gradient must be
    the sum over the replicas of the incoming gradients. An algorithm of other collectives than
    `jax.lax.psum` goes through :func:`distrib.collectives.one_sum`, which sees to both.
    """

    def sum_over_replicas(self, value: jax.Array, num_replicas: int) -> jax.Array:
        """Return the sum of ``value`` over the replicas, in its own shape and dtype."""
        ...


class AllReduceAlgorithm(SumsOverReplicas, Protocol):
    """An algorithm with everything that the engines may ask; ``CrossDeviceOps`` is one."""

    @property
    def num_packs(self) -> int | None:
        """In how many packs the tensors of one dtype travel: 0 alone, None as distrib chooses."""
        ...

    @property
    def error_feedback(self) -> bool:
        """Whether what is rounded off in a step is to be added to the values of the next."""
        ...

    def sum_with_errors(self, value: jax.Array, num_replicas: int) -> tuple[jax.Array, jax.Array]:
        """Return the sum, and what this replica rounded off on the way.

        The values of all replicas add up to the sum and the errors of all replicas.
        """
        ...
