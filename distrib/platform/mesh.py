"""The mesh of the replicas, and the two ways in which an array lies on it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from distrib import errors
from distrib.platform.jax_compat import Device

REPLICA_AXIS = "replica"
"""The mesh axis that counts the replicas: the ``axis_name=`` of collectives inside a step."""


def replica_mesh(devices: Sequence[Device]) -> Mesh:
    """Return the mesh with one replica on each of ``devices``, in their order.

    The axis is of type Auto: ``jax.make_mesh`` makes Explicit axes, with which ``shard_map``
    refuses input that is not sharded.

    >>> print(replica_mesh(jax.devices()[:2]))
    Mesh('replica': 2, axis_types=(Auto,))

    Raises:
      DeviceError: if ``devices`` is empty.
    """
    if len(devices) == 0:
        raise errors.DeviceError("A mesh needs at least one device, and the list is empty.")
    return Mesh(np.asarray(devices, dtype=object), (REPLICA_AXIS,), axis_types=(AxisType.Auto,))


@functools.lru_cache(maxsize=64)
def replicated(mesh: Mesh) -> NamedSharding:
    """Return the sharding that puts a whole copy of an array on each device of ``mesh``.

    >>> replicated(replica_mesh(jax.devices()[:2])).spec
    P()
    """
    return NamedSharding(mesh, PartitionSpec())


@functools.lru_cache(maxsize=64)
def split(mesh: Mesh) -> NamedSharding:
    """Return the sharding that splits the first dimension of an array over the replicas.

    >>> split(replica_mesh(jax.devices()[:2])).spec
    P('replica',)
    """
    return NamedSharding(mesh, PartitionSpec(REPLICA_AXIS))


def stack_parts(parts: Sequence[Any], dtype: Any, mesh: Mesh) -> jax.Array:
    """Stack one array for each replica of this process, of equal shapes, on ``mesh``.

    >>> stack_parts([1.0, 2.0], "float32", replica_mesh(jax.devices()[:2]))
    Array([1., 2.], dtype=float32)
    """
    rows = [
        jax.device_put(jnp.asarray(part, dtype=dtype)[None], device)
        for part, device in zip(parts, mesh.local_devices, strict=True)
    ]
    shape = (mesh.devices.size, *rows[0].shape[1:])
    return jax.make_array_from_single_device_arrays(shape, split(mesh), rows)
