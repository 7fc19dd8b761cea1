"""How the values of the replicas are added up inside a step: the algorithm behind an all-reduce."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import jax

from distrib.platform.mesh import REPLICA_AXIS


@runtime_checkable
class CrossDeviceOps(Protocol):
    """An algorithm that adds one array over the replicas.

    ``sum_over_replicas`` is called inside the program of a replica, under the mesh axis
    :data:`distrib.REPLICA_AXIS`, and returns the same array on every replica. Its gradient must be
    the sum over the replicas of the incoming gradients. An algorithm of other collectives than
    `jax.lax.psum` goes through :func:`distrib.collectives.one_sum`, which sees to both.
    """

    def sum_over_replicas(self, value: jax.Array, num_replicas: int) -> jax.Array:
        """Return the sum of ``value`` over the replicas, in its own shape."""
        ...


class NcclAllReduce:
    """All-reduce as XLA does it: by NCCL on GPUs, through shared memory on CPU devices.

    Args:
      num_packs: kept from tf.distribute, and checked, but without effect: XLA's collectives may be
        merged, and ``CommunicationOptions(bytes_per_pack=...)`` says how tensors are packed.

    Raises:
      ValueError: if ``num_packs`` is negative.

    >>> import distrib
    >>> strategy = distrib.MirroredStrategy(["CPU:0", "CPU:1"], NcclAllReduce())
    >>> def step():
    ...     return distrib.get_replica_context().all_reduce("SUM", jax.numpy.ones(2))
    >>> [x.tolist() for x in strategy.run(step).values]
    [[2.0, 2.0], [2.0, 2.0]]
    """

    def __init__(self, num_packs: int = 1):
        check_num_packs("NCCL all-reduce", num_packs)

    def sum_over_replicas(self, value: jax.Array, num_replicas: int) -> jax.Array:
        """Return the sum of ``value`` over the replicas, in its own shape."""
        return jax.lax.psum(value, REPLICA_AXIS)


def check_num_packs(what: str, num_packs: int) -> None:
    """Check the number of packs that an algorithm was given.

    Raises:
      ValueError: if it is negative.
    """
    if num_packs < 0:
        raise ValueError(
            f"{what} requires num_packs >= 0, but {num_packs} is specified. Leave it out: it has "
            "no effect, and CommunicationOptions(bytes_per_pack=...) says how tensors are packed."
        )
