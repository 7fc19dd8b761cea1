"""All-reduce in two stages: within groups of replicas, then across the groups."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from distrib.collectives.compressing import CompressingOps
from distrib.collectives.compression import Compression
from distrib.collectives.one_sum import one_sum
from distrib.collectives.packing import checked_num_packs
from distrib.platform.mesh import REPLICA_AXIS


class HierarchicalCopyAllReduce(CompressingOps):
    """Add within groups of about sqrt(n) neighbouring replicas, then across the groups.

    It is meant for machines whose devices are in groups with faster wires inside. The groups are
    those of :func:`hierarchy`. Where there are two groups of one size, each replica adds its
    group's sum to that of its counterpart in the other. Otherwise one replica of each group does,
    and copies the total to its group: with three groups or more, counterparts could add in
    different orders, and mirrored copies would differ in their last bits.

    It is right for any number of replicas; tf.distribute's leaves replicas out for three.

    With compression the members of a group send each other what they have, and each adds it up in
    float32; sums of groups, and totals that are copied, are encoded once more.

    Args:
      num_packs: the tensors of one dtype are laid end to end and reduced in that many equal packs;
        0 for each tensor alone; None for packs of small tensors, as distrib chooses.
        ``CommunicationOptions(bytes_per_pack=...)`` of a call wins.
      compression: ``"bfloat16"``, ``"int8"`` (with error feedback in
        ``TrainState.apply_gradients``), or None for full precision.

    Raises:
      ValueError: if ``num_packs`` is negative, or there is no such compression.

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

    def __init__(self, num_packs: int | None = None, compression: str | None = None):
        super().__init__(compression)
        self.num_packs = checked_num_packs("HierarchicalCopy", num_packs)

    def exact_sum(self, value: jax.Array, num_replicas: int) -> jax.Array:
        """Return the sum over the replicas at full precision."""
        plan = hierarchy(num_replicas)

        def total(x: jax.Array) -> jax.Array:
            x = jax.lax.psum(x, REPLICA_AXIS, axis_index_groups=plan.within)
            if len(plan.within) == 1:
                return x
            x = jax.lax.psum(x, REPLICA_AXIS, axis_index_groups=plan.across)
            if not plan.leaders:
                return x
            x = jnp.where(_is_one_of(plan.leaders), x, jnp.zeros_like(x))
            return jax.lax.psum(x, REPLICA_AXIS, axis_index_groups=plan.within)

        return one_sum(total, value)

    def steps(
        self, value: jax.Array, num_replicas: int, wire: Compression
    ) -> tuple[jax.Array, jax.Array]:
        """Add within groups, then across them, and copy the total where that is needed."""
        plan = hierarchy(num_replicas)
        flat = value.reshape(-1)
        error = jnp.zeros_like(flat)

        def sent_by(replicas: list[int] | None, x: jax.Array) -> jax.Array:
            """Encode; what is rounded off is counted on these replicas, or on all."""
            nonlocal error
            sent = wire.encode(x)
            counts = True if replicas is None else _is_one_of(replicas)
            error = error + jnp.where(counts, x - wire.decode(sent, x), 0)
            return sent

        def added(sent: jax.Array, groups: list[list[int]]) -> jax.Array:
            rows = _gathered(sent, groups)
            return wire.decode(rows, jnp.broadcast_to(flat, (len(rows), flat.size))).sum(0)

        total = added(sent_by(None, flat), plan.within)
        if len(plan.within) > 1:
            # All members of a group round the same sum.
            firsts = [group[0] for group in plan.within]
            total = added(sent_by(firsts, total), plan.across)
        if plan.leaders and len(plan.within) > 1:
            sent = sent_by([0], total)
            leads = _is_one_of(plan.leaders)
            total = added(jnp.where(leads, sent, jnp.zeros_like(sent)), plan.within)
        return total.reshape(value.shape), error.reshape(value.shape)


def _is_one_of(replicas: list[int]) -> jax.Array:
    return jnp.isin(jax.lax.axis_index(REPLICA_AXIS), jnp.array(replicas))


def _gathered(sent: jax.Array, groups: list[list[int]]) -> jax.Array:
    """Return what the members of this replica's group have sent, in their order, then zeros.

    `jax.lax.all_gather` takes only groups of one size.
    """
    size = max(map(len, groups))
    place = {replica: (i, len(g)) for g in groups for i, replica in enumerate(g)}
    places = jnp.array([place[replica] for replica in range(len(place))])
    position, members = places[jax.lax.axis_index(REPLICA_AXIS)]
    rows = jnp.zeros((size, *sent.shape), sent.dtype).at[position].set(sent)
    for ahead in range(1, size):
        to_others = [
            (sender, group[(i + ahead) % len(group)])
            for group in groups
            if len(group) > ahead
            for i, sender in enumerate(group)
        ]
        # A member of a smaller group receives zeros.
        arrived = jax.lax.ppermute(sent, REPLICA_AXIS, to_others)
        rows = rows.at[(position - ahead) % members].add(arrived)
    return rows


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
