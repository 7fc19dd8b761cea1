"""Direct calls of cross-device ops: values of cross-replica context, and where results go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from distrib.collectives.components import ComponentReducer
from distrib.collectives.options import CommunicationOptions
from distrib.collectives.rows import concatenated_rows, scaled_rows
from distrib.errors import ContextError, DeviceError
from distrib.platform import Device, local_devices, replica_mesh, resolve_device, uncommitted
from distrib.reduce_op import ReduceOp
from distrib.values import (
    IndexedSlices,
    Layout,
    Mirrored,
    PerReplica,
    is_distributed,
    local_shards,
    select_replica,
)


@runtime_checkable
class _HasCopies(Protocol):
    """A distributed value or a variable."""

    @property
    def values(self) -> tuple[Any, ...]: ...


def reduce_all(
    reducer: Callable[[Mesh], ComponentReducer],
    op: ReduceOp,
    pairs: Sequence[tuple[Any, Any]],
    options: CommunicationOptions | None,
) -> list[Any]:
    """Reduce values, those on the same devices together, and bring each to its destinations.

    Raises:
      TypeError: for a tree of distributed values.
      ContextError: for values of a compiled step.
    """
    results: list[Any] = [None] * len(pairs)
    on_mesh: dict[Mesh, list[int]] = {}
    for i, (value, destinations) in enumerate(pairs):
        _refuse_traced(value.values if isinstance(value, IndexedSlices) else value)
        slices = _slices_of(value)
        if slices is not None:
            rows = concatenated_rows([scaled_rows(op, part, len(slices)) for part in slices])
            results[i] = jax.tree.map(lambda x: broadcast(x, destinations), rows)  # noqa: B023
        elif not isinstance(value, _HasCopies) or isinstance(value, dict | IndexedSlices):
            _refuse_tree(value)
            _devices_of(destinations)  # Raises for what is none, whatever the value.
            results[i] = value
        else:
            mesh = _mesh_of(value.values, _devices_of(destinations))
            on_mesh.setdefault(mesh, []).append(i)
    for mesh, positions in on_mesh.items():
        components = [pairs[i][0].values for i in positions]
        wholes = reducer(mesh).all_reduce(op, components, options)
        for i, whole in zip(positions, wholes, strict=True):
            results[i] = _brought(whole, pairs[i][1])
    return results


def _refuse_traced(value: Any) -> None:
    if isinstance(value, PerReplica) and value.layout is Layout.LOCAL:
        raise ContextError(
            "Cross-device ops were called directly inside a compiled step, where a per-replica "
            "value has no components yet. Use strategy.reduce or strategy.extended.reduce_to, "
            "which go through the strategy's cross_device_ops."
        )


def _refuse_tree(value: Any) -> None:
    if any(map(is_distributed, jax.tree.leaves(value, is_leaf=is_distributed))):
        raise TypeError(
            f"cross-device ops got a {type(value).__name__} of distributed values: reduce takes "
            "one value. Give batch_reduce a pair for each of them, or use strategy.reduce."
        )


def _slices_of(value: Any) -> list[IndexedSlices] | None:
    """Return the slices of each replica, of a value that has them."""
    if isinstance(value, IndexedSlices) and is_distributed(value.values):
        return [select_replica(value, i) for i in range(len(value.values.values))]
    if is_distributed(value) and all(isinstance(part, IndexedSlices) for part in value.values):
        return list(value.values)
    return None


def broadcast(tensor: Any, destinations: Any) -> Any:
    """Copy one value to its destinations."""
    if isinstance(tensor, _HasCopies):
        tensor = tensor.values[0]
    devices = _devices_of(destinations)
    copies = [uncommitted(jax.device_put(jnp.asarray(tensor), device)) for device in devices]
    return Mirrored(copies) if _are_many(destinations) else copies[0]


def _brought(whole: jax.Array, destinations: Any) -> Any:
    """Return an array that all devices of a mesh hold as what the destinations ask for."""
    copies = {shard.device: shard.data for shard in local_shards(whole)}
    devices = _devices_of(destinations)
    any_copy = next(iter(copies.values()))
    found = [
        uncommitted(jax.device_put(copies.get(device, any_copy), device)) for device in devices
    ]
    return Mirrored(found) if _are_many(destinations) else found[0]


def _are_many(destinations: Any) -> bool:
    """Tell whether destinations get a mirrored value: a value with one copy is one device."""
    return len(_devices_of(destinations)) > 1


def _devices_of(destinations: Any) -> list[Device]:
    """Return the devices that destinations name.

    Raises:
      ValueError: if they name none.
      DeviceError: if a device does not exist.
    """
    if isinstance(destinations, str | Device):
        return [resolve_device(destinations)]
    if isinstance(destinations, _HasCopies) and not isinstance(destinations, dict):
        return _of_copies(destinations.values)
    if isinstance(destinations, jax.Array):
        return _of_copies([destinations])
    raise ValueError(
        f"destinations is {destinations!r}, and must be a per-replica value, a variable, an array, "
        "or a device or its name."
    )


def _of_copies(copies: Sequence[Any]) -> list[Device]:
    """Return where copies are: each on a device of its own, also if they wait on one."""
    arrays = [copy for copy in copies if isinstance(copy, jax.Array)]
    where = [next(iter(array.devices())) for array in arrays]
    if len(arrays) == len(copies) == len(set(where)):
        return where
    kind = where[0].platform if where else jax.devices()[0].platform
    devices = local_devices(kind)
    if len(devices) < len(copies):
        raise DeviceError(
            f"A value has {len(copies)} components, and there are {len(devices)} devices of kind "
            f"{kind.upper()} to hold one each."
        )
    return list(devices[: len(copies)])


def _mesh_of(components: Sequence[Any], destinations: Sequence[Device]) -> Mesh:
    """Return the devices on which components are added: where the sum is to be, if it can be."""
    own = _of_copies(components)
    if len(destinations) == len(own) == len(set(destinations)):
        return replica_mesh(destinations)
    return replica_mesh(own)
