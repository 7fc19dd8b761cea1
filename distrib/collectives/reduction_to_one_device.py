"""All-reduce by bringing all values together."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax

from distrib.collectives.compressing import CompressingOps
from distrib.collectives.compression import Compression, Uncompressed
from distrib.collectives.one_sum import one_sum
from distrib.platform import Device, ensure_thread_pool, resolve_device
from distrib.platform.mesh import REPLICA_AXIS


class ReductionToOneDevice(CompressingOps):
    """Bring all values together, add them up there, and hand out the result.

    In tf.distribute one device adds and sends the sum to the others. Here all replicas run one
    program: each of them gets all the values (one ``all-gather``) and adds them in the same order,
    replica 0's first, then replica 1's, and so on. That is the sum that one device would make, bit
    by bit, on any hardware, without the way back; it needs memory for all the values on each.

    Args:
      reduce_to_device: a device string or ``jax.Device``, which must exist. Every device of the
        strategy computes what this one would, so no value depends on it.
      accumulation_fn: takes the list of the replicas' arrays and returns their sum; by default they
        are added in the order of the replicas. Gradients are accumulated by it too. With a function
        of your own each tensor travels alone, in its own shape, unless the
        ``CommunicationOptions(bytes_per_pack=...)`` of a call say otherwise.
      compression: ``"bfloat16"``, ``"int8"`` (with error feedback in
        ``TrainState.apply_gradients``), or None for full precision. Values are rounded once, on
        their way to the sum. What your own accumulation function does to errors is its affair:
        feedback is for sums.

    Raises:
      DeviceError: if there is no such device.
      ValueError: if there is no such compression.

    >>> import distrib
    >>> ops = ReductionToOneDevice("CPU:0", accumulation_fn=lambda parts: parts[0] - parts[1])
    >>> strategy = distrib.MirroredStrategy(["CPU:0", "CPU:1"], cross_device_ops=ops)
    >>> def step():
    ...     context = distrib.get_replica_context()
    ...     return context.all_reduce("SUM", context.replica_id_in_sync_group + 1)
    >>> [int(x) for x in strategy.run(step).values]
    [-1, -1]
    """

    def __init__(
        self,
        reduce_to_device: str | Device | None = None,
        accumulation_fn: Callable[[Sequence[jax.Array]], Any] | None = None,
        compression: str | None = None,
    ):
        super().__init__(compression)
        if reduce_to_device is not None:
            ensure_thread_pool()  # To look up a device starts JAX.
            resolve_device(reduce_to_device)
        if accumulation_fn is not None:
            self.num_packs = 0
        self._accumulate = accumulation_fn or _add_in_order

    def exact_sum(self, value: jax.Array, num_replicas: int) -> jax.Array:
        """Return the accumulated ``value`` of the replicas at full precision."""
        return one_sum(lambda x: self.steps(x, num_replicas, Uncompressed())[0], value)

    def steps(
        self, value: jax.Array, num_replicas: int, wire: Compression
    ) -> tuple[jax.Array, jax.Array]:
        """Gather the values of all replicas, and accumulate them in order."""
        flat = value.reshape(-1)
        sent = wire.encode(flat)
        gathered = jax.lax.all_gather(sent, REPLICA_AXIS)
        parts = [wire.decode(gathered[i], flat).reshape(value.shape) for i in range(num_replicas)]
        error = flat - wire.decode(sent, flat)
        return self._accumulate(parts), error.reshape(value.shape)


def _add_in_order(values: Sequence[jax.Array]) -> jax.Array:
    return functools.reduce(operator.add, values)
