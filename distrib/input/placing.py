"""From a batch on the host to values on the devices of the replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, Sharding

from distrib.errors import InputError
from distrib.input.splitting import batch_size_of, split_batch
from distrib.platform import leaves_with_paths
from distrib.platform.jax_compat import put_pieces
from distrib.platform.mesh import replicated, split
from distrib.values import PerReplica, regroup


class BatchPlacer:
    """Puts the pieces of a batch on the devices of the replicas.

    Args:
      mesh: the devices of the replicas; None for the default strategy, whose values stay where JAX
        puts them.
      to_device: whether to move anything; if not, pieces stay on the host until a step takes them.
    """

    def __init__(self, mesh: Mesh | None, to_device: bool = True):
        self._mesh = mesh
        self._to_device = to_device
        self.num_replicas: int = 1 if mesh is None else mesh.devices.size
        self._devices = [] if mesh is None else list(mesh.devices.flat)
        self._all_local = mesh is not None and len(mesh.local_devices) == self.num_replicas

    def split(self, batch: Any) -> Any:
        """Cut a global batch over the replicas.

        Args:
          batch: a tree of arrays ``[batch, ...]`` on the host.

        Returns:
          A tree of per-replica values ``[ceil(batch / num_replicas), ...]``, the last ones shorter
          or empty if the batch does not divide; plain arrays if there is one replica.
        """
        self._check(batch)
        if self.num_replicas == 1:
            return self._alone(batch)
        if self._to_device and batch_size_of(batch) % self.num_replicas == 0:
            return self._whole(batch)
        return self.pieces(split_batch(batch, self.num_replicas))

    def pieces(self, pieces: Sequence[Any]) -> Any:
        """Give each replica its own piece: a tree of per-replica values."""
        for piece in pieces:
            self._check(piece)
        if self.num_replicas == 1:
            return self._alone(pieces[0])
        if self._to_device:
            shapes = [[np.shape(leaf) for leaf in jax.tree.leaves(piece)] for piece in pieces]
            if all(s == shapes[0] for s in shapes) and all(shape for shape in shapes[0]):
                return self._whole(jax.tree.map(lambda *parts: np.concatenate(parts), *pieces))
            devices = self._mesh.local_devices if self._mesh is not None else []
            pieces = [jax.device_put(p, device) for p, device in zip(pieces, devices, strict=True)]
        return regroup(pieces)

    def _whole(self, batch: Any) -> Any:
        if self._mesh is None:
            return batch
        sharding = split(self._mesh)

        def rows(leaf: Any) -> PerReplica:
            size = len(leaf) // self.num_replicas
            cuts = [slice(i * size, (i + 1) * size) for i in range(self.num_replicas)]
            return PerReplica.concatenated(self._put(leaf, sharding, cuts))

        return jax.tree.map(rows, batch)

    def _alone(self, batch: Any) -> Any:
        if not self._to_device:
            return batch
        if self._mesh is None:
            return jax.tree.map(jnp.asarray, batch)
        sharding = replicated(self._mesh)
        return jax.tree.map(lambda leaf: self._put(leaf, sharding, [...]), batch)

    def _put(self, leaf: Any, sharding: Sharding, cuts: Sequence[Any]) -> jax.Array:
        if self._all_local and type(leaf) is np.ndarray:
            return put_pieces(leaf, sharding, [leaf[cut] for cut in cuts], self._devices)
        return jax.device_put(leaf, sharding)

    def _check(self, batch: Any) -> None:
        for path, leaf in leaves_with_paths(batch):
            dtype = getattr(leaf, "dtype", None)
            if dtype is not None and getattr(dtype, "kind", "") in "OSU":
                raise InputError(
                    f"The batch holds {path} of dtype {dtype}, which no device can hold: convert "
                    "it to numbers, or leave it out and keep it on the host."
                )
