"""All-reduce as XLA does it."""

from __future__ import annotations

import jax

from distrib.collectives.chunks import cut_into_chunks, joined
from distrib.collectives.compressing import CompressingOps
from distrib.collectives.compression import Compression
from distrib.collectives.packing import checked_num_packs
from distrib.platform.mesh import REPLICA_AXIS


class NcclAllReduce(CompressingOps):
    """All-reduce as XLA does it: by NCCL on GPUs, through shared memory on CPU devices.

    With compression it is an all-to-all, in which each replica gets everyone's part of the array
    and adds it up in float32, and an all-gather of the sums. XLA's own all-reduce of bfloat16 would
    add in bfloat16 on GPUs, an error that grows with the number of replicas, and on CPU devices it
    sends float32.

    Args:
      num_packs: the tensors of one dtype are laid end to end and reduced in that many equal packs;
        0 for each tensor alone; None for packs of small tensors, as distrib chooses.
        ``CommunicationOptions(bytes_per_pack=...)`` of a call wins.
      compression: ``"bfloat16"``, ``"int8"`` (with error feedback in
        ``TrainState.apply_gradients``), or None for full precision.

    Raises:
      ValueError: if ``num_packs`` is negative, or there is no such compression.

    >>> import distrib
    >>> strategy = distrib.MirroredStrategy(["CPU:0", "CPU:1"], NcclAllReduce())
    >>> def step():
    ...     return distrib.get_replica_context().all_reduce("SUM", jax.numpy.ones(2))
    >>> [x.tolist() for x in strategy.run(step).values]
    [[2.0, 2.0], [2.0, 2.0]]
    """

    def __init__(self, num_packs: int | None = None, compression: str | None = None):
        super().__init__(compression)
        self.num_packs = checked_num_packs("NCCL all-reduce", num_packs)

    def exact_sum(self, value: jax.Array, num_replicas: int) -> jax.Array:
        """Return the sum over the replicas: one `jax.lax.psum`."""
        return jax.lax.psum(value, REPLICA_AXIS)

    def scatter_over_replicas(self, value: jax.Array, axis: int) -> jax.Array:
        """Return this replica's part, along ``axis``, of the sum of ``value`` over the replicas."""
        return jax.lax.psum_scatter(value, REPLICA_AXIS, scatter_dimension=axis, tiled=True)

    def steps(
        self, value: jax.Array, num_replicas: int, wire: Compression
    ) -> tuple[jax.Array, jax.Array]:
        """Add a chunk of the array on each replica, and hand out the sums."""
        n = num_replicas
        me = jax.lax.axis_index(REPLICA_AXIS)
        chunks = cut_into_chunks(value, n)
        sent = wire.encode(chunks)
        errors = chunks - wire.decode(sent, chunks)
        arrived = jax.lax.all_to_all(sent, REPLICA_AXIS, split_axis=0, concat_axis=0)
        partial = wire.decode(arrived, chunks).sum(0)
        sent = wire.encode(partial)
        errors = errors.at[me].add(partial - wire.decode(sent, partial))
        totals = wire.decode(jax.lax.all_gather(sent, REPLICA_AXIS), chunks)
        return joined(totals, value), joined(errors, value)
