"""``MirroredStrategy``: a copy of every variable on each device of one process."""

from __future__ import annotations

from collections.abc import Sequence

from distrib.collectives import NcclAllReduce, SumsOverReplicas, as_cross_device_ops
from distrib.engines import InProgram, SpmdEngine, ThreadsEngine
from distrib.platform import Device, ensure_thread_pool, replica_mesh, resolve_devices
from distrib.strategies.combining import MeshCombiner
from distrib.strategies.extended import StrategyExtended
from distrib.strategies.homes import OnEveryDevice
from distrib.strategies.replica_device import device_of_any_replica
from distrib.strategies.strategy import Strategy


class MirroredStrategy(Strategy):
    """Synchronous training on the devices of one process, with a copy of all variables on each.

    Variables live on every device; one SPMD program runs all replicas; values are combined by an
    all-reduce in the program; updates are applied in the program, on every copy. With
    ``strategy.extended.experimental_shard_optimizer_state = True`` each device keeps and updates a
    part of the optimizer state only.

    Args:
      devices: device strings or ``jax.Device`` objects; by default, and for an empty list, all
        devices of this process.
      cross_device_ops: the algorithm of the all-reduce; by default what XLA does,
        :class:`distrib.NcclAllReduce`. Others are ``HierarchicalCopyAllReduce``, ``RingAllReduce``
        and ``ReductionToOneDevice``, or an object with a method ``sum_over_replicas``. With
        ``compression=`` they send gradients, and all else that is reduced, in fewer bits.

    Raises:
      DeviceError: if a device does not exist, is named twice, or they are of different kinds.
      TypeError: if ``cross_device_ops`` is not one; tf.distribute takes a string, and fails later.

    >>> import distrib
    >>> strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    >>> with strategy.scope():
    ...     v = distrib.Variable(1.0, aggregation=distrib.VariableAggregation.MEAN)
    >>> def step():
    ...     replica = distrib.get_replica_context().replica_id_in_sync_group
    ...     v.assign_add(replica * 2.0)
    >>> strategy.run(step)
    >>> print(v.numpy())
    2.0
    """

    def __init__(
        self,
        devices: Sequence[str | Device] | None = None,
        cross_device_ops: SumsOverReplicas | None = None,
    ):
        ensure_thread_pool()
        resolved = resolve_devices(devices)
        ops = as_cross_device_ops(NcclAllReduce() if cross_device_ops is None else cross_device_ops)
        mesh = replica_mesh(resolved)
        threads = ThreadsEngine(self, resolved, ops)
        engine = SpmdEngine(self, mesh, ops, InProgram(), device_of_any_replica(resolved), threads)
        super().__init__(
            StrategyExtended(
                self,
                devices=resolved,
                mesh=mesh,
                home=OnEveryDevice(mesh),
                engine=engine,
                eager_engine=threads,
                combiner=MeshCombiner(mesh, resolved[0], ops),
                cross_device_ops=ops,
                can_shard_optimizer_state=True,
            )
        )
