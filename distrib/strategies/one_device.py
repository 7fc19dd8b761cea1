"""``OneDeviceStrategy``: everything on one device."""

from __future__ import annotations

from distrib.collectives import NcclAllReduce
from distrib.engines import InProgram, SpmdEngine, ThreadsEngine
from distrib.platform import Device, replica_mesh, resolve_device
from distrib.strategies.combining import SingleCombiner
from distrib.strategies.extended import StrategyExtended
from distrib.strategies.homes import OnEveryDevice
from distrib.strategies.replica_device import device_of_any_replica
from distrib.strategies.strategy import Strategy


class OneDeviceStrategy(Strategy):
    """One replica on one device, with its variables: for comparison, and to try a script out.

    The step is compiled as under the other strategies; there is nothing to combine, and what
    ``run`` returns are arrays.

    Args:
      device: a device string or a ``jax.Device``.

    Raises:
      DeviceError: if there is no such device.

    >>> strategy = OneDeviceStrategy("CPU:0")
    >>> print(strategy.run(lambda x: x * 2, args=(3.0,)))
    6.0
    """

    def __init__(self, device: str | Device):
        resolved = resolve_device(device)
        mesh = replica_mesh([resolved])
        ops = NcclAllReduce()
        threads = ThreadsEngine(self, [resolved], ops)
        device = device_of_any_replica([resolved])
        engine = SpmdEngine(self, mesh, ops, InProgram(), device, threads)
        super().__init__(
            StrategyExtended(
                self,
                devices=[resolved],
                mesh=mesh,
                home=OnEveryDevice(mesh),
                engine=engine,
                eager_engine=threads,
                combiner=SingleCombiner(),
            )
        )
