"""``CentralStorageStrategy``: variables on one device, replicas on many."""

from __future__ import annotations

from collections.abc import Sequence

from distrib.collectives import NcclAllReduce
from distrib.engines import OnOneDevice, SpmdEngine, ThreadsEngine
from distrib.platform import (
    Device,
    ensure_thread_pool,
    local_devices,
    replica_mesh,
    resolve_device,
    resolve_devices,
)
from distrib.strategies.combining import MeshCombiner
from distrib.strategies.extended import StrategyExtended
from distrib.strategies.homes import OnDevice
from distrib.strategies.replica_device import device_of_any_replica
from distrib.strategies.strategy import Strategy


class CentralStorageStrategy(Strategy):
    """Synchronous training with one copy of the variables, on one device.

    Variables live on the parameter device. At each step they are copied out to the replicas, which
    run one SPMD program; the values that replicas assign are combined and brought to the parameter
    device, which applies the updates. It saves memory on the compute devices: optimizer state never
    leaves the parameter device.

    Args:
      compute_devices: device strings or ``jax.Device`` objects; by default all devices of this
        process.
      parameter_device: the device of the variables; by default the compute device if there is one
        only, else the host (``"CPU:0"``).

    Raises:
      DeviceError: if a device does not exist, is named twice, or the compute devices are of
        different kinds.
    """

    def __init__(
        self,
        compute_devices: Sequence[str | Device] | None = None,
        parameter_device: str | Device | None = None,
    ):
        ensure_thread_pool()
        resolved = resolve_devices(compute_devices)
        if parameter_device is not None:
            home = resolve_device(parameter_device)
        elif len(resolved) == 1:
            home = resolved[0]
        else:
            home = local_devices("CPU")[0]
        mesh = replica_mesh(resolved)
        ops = NcclAllReduce()
        threads = ThreadsEngine(self, resolved, ops)
        device = device_of_any_replica(resolved)
        engine = SpmdEngine(self, mesh, ops, OnOneDevice(home), device, threads)
        super().__init__(
            StrategyExtended(
                self,
                devices=resolved,
                mesh=mesh,
                home=OnDevice(home),
                engine=engine,
                eager_engine=threads,
                combiner=MeshCombiner(mesh, home, ops),
            )
        )
