"""Where variables live: a copy on each device, or all on one device."""

from __future__ import annotations

from typing import Any

from jax.sharding import Mesh

from distrib.errors import VariableError
from distrib.platform import Device, shards_of
from distrib.variables import (
    MirroredStorage,
    OnReadStorage,
    PlacedStorage,
    ShardedStorage,
    Storage,
    VariableAggregation,
    VariableSynchronization,
)


class OnEveryDevice:
    """A copy on each device of a mesh."""

    def __init__(self, mesh: Mesh):
        self._mesh = mesh

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices of the mesh."""
        return tuple(self._mesh.devices.flat)

    def create_storage(
        self,
        value: Any,
        synchronization: VariableSynchronization,
        aggregation: VariableAggregation,
        name: str,
    ) -> Storage:
        """Make a copy on each device, which replicas change together or, ``ON_READ``, on their own.

        Raises:
          VariableError: for synchronization NONE on several devices.
        """
        if len(self.devices) > 1:
            refuse_unsynchronized(synchronization, name)
            if synchronization is VariableSynchronization.ON_READ:
                return OnReadStorage(value, self._mesh, aggregation, name)
        return MirroredStorage(value, self._mesh)

    def create_sharded_storage(self, value: Any) -> Storage | None:
        """Put a part of the value on each device; None where a part would be all of it."""
        shards = shards_of(value.shape, len(self.devices))
        return None if shards is None else ShardedStorage(value, self._mesh, shards)

    def lives_on(self, mesh: Mesh) -> bool:
        """Tell whether ``mesh`` is this one."""
        return mesh == self._mesh


class OnDevice:
    """One array on one device; on whichever JAX chooses, if none is given."""

    def __init__(self, device: Device | None):
        self._device = device

    @property
    def devices(self) -> tuple[Device, ...]:
        """The device, if there is a fixed one."""
        return () if self._device is None else (self._device,)

    def create_storage(
        self,
        value: Any,
        synchronization: VariableSynchronization,
        aggregation: VariableAggregation,
        name: str,
    ) -> Storage:
        """Put the value on the device. With one copy there is nothing to synchronise.

        Raises:
          VariableError: for synchronization NONE on a strategy's device.
        """
        if self._device is not None:
            refuse_unsynchronized(synchronization, name)
        return PlacedStorage(value, self._device)

    def create_sharded_storage(self, value: Any) -> None:
        """Return None: there is one device."""
        return None

    def lives_on(self, mesh: Mesh) -> bool:
        """Return False: the arrays are copied to a mesh."""
        return False


def refuse_unsynchronized(synchronization: VariableSynchronization, name: str) -> None:
    """Raise for synchronization NONE, which no distributed strategy can keep.

    Raises:
      VariableError: naming the variable.
    """
    if synchronization is VariableSynchronization.NONE:
        raise VariableError(
            "`NONE` variable synchronization mode is not supported with a distributed strategy. "
            f"Please change the `synchronization` for variable: {name}"
        )
