"""All-reduce in two stages: within groups of replicas, then across the groups."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from distrib.collectives.cross_device_ops import check_num_packs
from distrib.collectives.one_sum import one_sum
from distrib.platform.mesh import REPLICA_AXIS


class HierarchicalCopyAllReduce:
    """Add within groups of about sqrt(n) neighbouring replicas, then across the groups.

    It is meant for machines whose devices are in groups with faster wires inside. The groups are
    those of :func:`hierarchy`. Where there are two groups of one size, each replica adds its
    group's sum to that of its counterpart in the other. Otherwise one replica of each group does,
    and copies the total to its group: with three groups or more, counterparts could add in
    different orders, and mirrored copies would differ in their last bits.

    It is right for any number of replicas; tf.distribute's leaves replicas out for three.

    Args:
      num_packs: kept from tf.distribute, and checked, but without effect:
        ``CommunicationOptions(bytes_per_pack=...)`` says how tensors are packed.

    Raises:
      ValueError: if ``num_packs`` is negative.

    >>> import distrib
    >>> strategy = distrib.MirroredStrategy(
    ...     ["CPU:0", "CPU:1", "CPU:2"], cross_device_ops=HierarchicalCopyAllReduce()
    ... )
    >>> def step():
    ...     context = distrib.get_replica_context()
    ...     return context.all_reduce("SUM", 2 ** context.replica_id_in_sync_group)
    >>> [int(x) for x in strategy.run(step).values]
    [7, 7, 7]
    """

    def __init__(self, num_packs: int = 1):
        check_num_packs("HierarchicalCopy", num_packs)

    def sum_over_replicas(self, value: jax.Array, num_replicas: int) -> jax.Array:
        """Return the sum of ``value`` over the replicas, in its own shape."""
        plan = hierarchy(num_replicas)

        def total(x: jax.Array) -> jax.Array:
            x = jax.lax.psum(x, REPLICA_AXIS, axis_index_groups=plan.within)
            if len(plan.within) == 1:
                return x
            x = jax.lax.psum(x, REPLICA_AXIS, axis_index_groups=plan.across)
            if not plan.leaders:
                return x
            leads = jnp.isin(jax.lax.axis_index(REPLICA_AXIS), jnp.array(plan.leaders))
            x = jnp.where(leads, x, jnp.zeros_like(x))
            return jax.lax.psum(x, REPLICA_AXIS, axis_index_groups=plan.within)

        return one_sum(total, value)


@dataclass(frozen=True)
class Hierarchy:
    """The groups of replicas that add together.

    Attributes:
      within: the groups of the first stage.
      across: the groups of the second, one replica of each group of the first in each that counts.
      leaders: the replicas that have the total after it, and copy it to their groups; empty if all
        have it.
    """

    within: list[list[int]]
    across: list[list[int]]
    leaders: list[int]


def hierarchy(num_replicas: int) -> Hierarchy:
    """Return the groups for a number of replicas.

    For an even number from 4 to 8 there are two groups of one size; otherwise groups of about
    sqrt(n), of which the last may be smaller.

    >>> hierarchy(4)
    Hierarchy(within=[[0, 1], [2, 3]], across=[[0, 2], [1, 3]], leaders=[])
    >>> hierarchy(5)
    Hierarchy(within=[[0, 1], [2, 3], [4]], across=[[0, 2, 4], [1], [3]], leaders=[0, 2, 4])
    """
    replicas = list(range(num_replicas))
    if num_replicas in (4, 6, 8):
        half = num_replicas // 2
        pairs = [[r, r + half] for r in replicas[:half]]
        return Hierarchy([replicas[:half], replicas[half:]], pairs, [])
    size = max(2, round(math.sqrt(num_replicas)))
    within = [replicas[start : start + size] for start in range(0, num_replicas, size)]
    leaders = [group[0] for group in within]
    alone = [[r] for r in replicas if r not in leaders]
    return Hierarchy(within, [leaders, *alone], leaders)
