"""How values are brought together over the replicas, as an object of its own."""

from __future__ import annotations

import abc
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from distrib.collectives.algorithm import SumsOverReplicas
from distrib.collectives.components import ComponentReducer
from distrib.collectives.direct import broadcast, reduce_all
from distrib.collectives.options import CommunicationOptions, check_no_timeout
from distrib.reduce_op import ReduceOp


class CrossDeviceOps(abc.ABC):
    """The base of the algorithms of an all-reduce, and the functions that call one directly.

    Give one to a strategy, ``MirroredStrategy(cross_device_ops=...)``, and all of its reductions
    use it. Subclass it with one method, :meth:`sum_over_replicas`, for an algorithm of your own; an
    object with that method that is no subclass will do as well.

    >>> import distrib
    >>> class InHalves(CrossDeviceOps):
    ...     def sum_over_replicas(self, value, num_replicas):
    ...         return jax.lax.psum(value / 2, distrib.REPLICA_AXIS) * 2
    >>> value = distrib.PerReplica([jnp.float32(1), jnp.float32(2)])
    >>> [float(x) for x in InHalves().reduce(distrib.ReduceOp.SUM, value, value).values]
    [3.0, 3.0]
    """

    num_packs: int | None = None
    """In how many packs the tensors of one dtype travel: 0 alone, None as distrib chooses."""

    error_feedback: bool = False
    """Whether what is rounded off in a step is to be added to the values of the next."""

    @abc.abstractmethod
    def sum_over_replicas(self, value: jax.Array, num_replicas: int) -> jax.Array:
        """Return the sum of ``value`` over the replicas, in its own shape and dtype.

        It is called inside the program of a replica, as
        :class:`distrib.collectives.SumsOverReplicas` says.
        """

    def sum_with_errors(self, value: jax.Array, num_replicas: int) -> tuple[jax.Array, jax.Array]:
        """Return the sum, and what this replica rounded off on the way: nothing, unless it says so.

        The values of all replicas add up to the sum and the errors of all replicas.
        """
        return self.sum_over_replicas(value, num_replicas), jnp.zeros_like(value)

    def with_compression(self, compression: str) -> CrossDeviceOps:
        """Return the same algorithm with fewer bits on the wire.

        Raises:
          ValueError: if it has no such form.
        """
        raise ValueError(
            f"compression is {compression!r}, but {type(self).__name__} cannot compress. Use "
            "NcclAllReduce, HierarchicalCopyAllReduce, RingAllReduce or ReductionToOneDevice, or "
            "give it a method with_compression(name)."
        )

    def reduce(
        self,
        reduce_op: ReduceOp,
        per_replica_value: Any,
        destinations: Any,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """Reduce one value over the replicas. Cross-replica context.

        Args:
          reduce_op: a member of ``ReduceOp``.
          per_replica_value: a ``PerReplica`` of components of equal shapes; the copies of a
            ``Mirrored`` or a variable are added like components. An array or number is one value
            already and is returned as it is, for SUM too: tf.distribute's rule for direct calls,
            where ``strategy.reduce`` raises.
          destinations: where the result is to be: a ``PerReplica``, ``Mirrored`` or variable for
            the devices of its copies, an array for its device, or a device or its name.
          options: of this call; ``implementation`` and ``timeout_seconds`` have no place here.

        Returns:
          A ``Mirrored`` on the devices of ``destinations``; an array where it names one device.

        Raises:
          ValueError: if ``reduce_op`` is not a member of ``ReduceOp``, an option has no place, or
            ``destinations`` names no device.
          AggregationError: if components differ in shape or dtype, or are boolean.
          DeviceError: if there are fewer devices than components.
        """
        return self.batch_reduce(reduce_op, [(per_replica_value, destinations)], options)[0]

    def batch_reduce(
        self,
        reduce_op: ReduceOp,
        value_destination_pairs: Sequence[tuple[Any, Any]],
        options: CommunicationOptions | None = None,
    ) -> list[Any]:
        """Reduce several values, in as few collectives as the packing allows.

        Args:
          reduce_op: a member of ``ReduceOp``.
          value_destination_pairs: as :meth:`reduce` takes each.
          options: of this call.

        Returns:
          What :meth:`reduce` gives for each pair, in order.
        """
        if not isinstance(reduce_op, ReduceOp):
            raise ValueError(
                f"reduce_op is {reduce_op!r}, and must be ReduceOp.SUM or ReduceOp.MEAN: a direct "
                "call of cross-device ops takes no names."
            )
        if options is not None and options.implementation != type(options)().implementation:
            raise ValueError(
                f"options.implementation is {options.implementation}, but {type(self).__name__} "
                "has been called by name: leave it AUTO, or call the other algorithm."
            )
        check_no_timeout(options, f"{type(self).__name__}.reduce")
        return reduce_all(self._reducer, reduce_op, value_destination_pairs, options)

    def broadcast(self, tensor: Any, destinations: Any) -> Any:
        """Copy one value to devices.

        Args:
          tensor: an array or number, or a value whose first copy is taken.
          destinations: as :meth:`reduce` takes them.

        Returns:
          A ``Mirrored`` on the devices of ``destinations``; an array where it names one device.
        """
        return broadcast(tensor, destinations)

    def _reducer(self, mesh: Mesh) -> ComponentReducer:
        if mesh not in self._reducers:
            self._reducers[mesh] = ComponentReducer(mesh, self._chosen)
        return self._reducers[mesh]

    @functools.cached_property
    def _reducers(self) -> dict[Mesh, ComponentReducer]:
        return {}

    def _chosen(self, options: CommunicationOptions | None) -> CrossDeviceOps:
        """Return this algorithm as the options of a call want it."""
        if options is None or options.compression is None:
            return self
        return self.with_compression(options.compression)


class _OfOneMethod(CrossDeviceOps):
    """An algorithm of which only ``sum_over_replicas`` is known."""

    def __init__(self, algorithm: SumsOverReplicas):
        self._algorithm = algorithm

    def sum_over_replicas(self, value: jax.Array, num_replicas: int) -> jax.Array:
        return self._algorithm.sum_over_replicas(value, num_replicas)


def as_cross_device_ops(algorithm: Any) -> CrossDeviceOps:
    """Return what a user gave as ``cross_device_ops`` as a :class:`CrossDeviceOps`.

    Raises:
      TypeError: if it has no ``sum_over_replicas``.
    """
    if isinstance(algorithm, CrossDeviceOps):
        return algorithm
    if isinstance(algorithm, SumsOverReplicas) and not isinstance(algorithm, type):
        return _OfOneMethod(algorithm)
    raise TypeError(
        f"cross_device_ops is {algorithm!r}, which has no sum_over_replicas: pass "
        "distrib.NcclAllReduce(), HierarchicalCopyAllReduce(), RingAllReduce() or "
        "ReductionToOneDevice()."
    )
