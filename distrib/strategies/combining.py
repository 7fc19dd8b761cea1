"""Reduce and gather in cross-replica context: from one value for each replica to one value."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, PartitionSpec

from distrib.collectives import (
    CommunicationOptions,
    ComponentReducer,
    CrossDeviceOps,
    algorithm_for,
    all_gather,
    all_reduce,
    check_no_timeout,
    concatenated_rows,
    scaled_rows,
)
from distrib.context import current_program
from distrib.errors import AggregationError
from distrib.platform import REPLICA_AXIS, is_sparse, uncommitted
from distrib.reduce_op import ReduceOp
from distrib.values import (
    DistributedValues,
    IndexedSlices,
    Layout,
    Mirrored,
    PerReplica,
    is_distributed,
    local_shards,
)
from distrib.variables import Variable

Options = CommunicationOptions | None


class MeshCombiner:
    """Combines the values of the replicas of a mesh, by the algorithm that steps use.

    Args:
      mesh: the devices of the replicas.
      device: where results of separate components are.
      ops: how values are added over the replicas.
    """

    def __init__(self, mesh: Mesh, device: Any, ops: CrossDeviceOps):
        self._mesh = mesh
        self._device = device
        self._choose = functools.partial(algorithm_for, ops)
        self._components = ComponentReducer(mesh, self._choose)
        self._reducers: dict[Any, Callable[[jax.Array], jax.Array]] = {}
        self.num_replicas: int = mesh.devices.size

    def reduce(self, op: ReduceOp, value: Any, axis: Any, options: Options = None) -> Any:
        """Reduce one value over the replicas.

        Raises:
          AggregationError: for SUM of a value that is the same on every replica, and for components
            that cannot be added.
          ValueError: for options with a timeout, which nothing keeps here.
        """
        check_no_timeout(options, "a reduction in cross-replica context")
        if isinstance(value, Variable):
            value = self._of_variable(value)
        if isinstance(value, IndexedSlices):
            return self._reduce_slices(op, value, axis)
        if isinstance(value, PerReplica) and value.layout is Layout.LOCAL:
            return _reduce_in_program(op, value.local, axis, options)
        if isinstance(value, PerReplica) and self._is_here(value.whole):
            reducer = self._whole_reducer(op, _frozen(axis), value.layout, options)
            return uncommitted(local_shards(reducer(value.whole))[0].data)
        if isinstance(value, PerReplica):
            if any(isinstance(part, Tracer) for part in value.values):
                return reduce_components(op, value.values, axis)
            return reduce_components(op, value.values, axis, self._adder(options))
        if isinstance(value, Mirrored):
            value = value.values[0]
        return reduce_same(op, value, axis, self.num_replicas)

    def _adder(self, options: Options) -> Callable[[Sequence[jax.Array]], jax.Array]:
        """Return what adds arrays of equal shapes, one of each replica."""

        def add(arrays: Sequence[jax.Array]) -> jax.Array:
            dtype = jnp.result_type(*arrays)
            parts = [array.astype(dtype) for array in arrays]
            (total,) = self._components.all_reduce(ReduceOp.SUM, [parts], options)
            return self._brought(local_shards(total)[0].data)

        return add

    def _whole_reducer(
        self, op: ReduceOp, axis: Any, layout: Layout, options: Options
    ) -> Callable[..., jax.Array]:
        key = (op, axis, layout, options)
        if key in self._reducers:
            return self._reducers[key]

        def reducer(part: jax.Array) -> jax.Array:
            part = part[0] if layout is Layout.STACKED else part
            axes = _axes(axis, part.ndim)
            if axes:
                mean = op is ReduceOp.MEAN
                part = part.mean(axes) if mean else part.sum(axes, dtype=part.dtype)
            return all_reduce(
                op,
                part,
                num_replicas=self.num_replicas,
                ops=self._choose(options),
                options=options,
            )

        mapped = jax.shard_map(
            reducer,
            mesh=self._mesh,
            in_specs=PartitionSpec(REPLICA_AXIS),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
        return self._reducers.setdefault(key, jax.jit(mapped))

    def _reduce_slices(self, op: ReduceOp, slices: IndexedSlices, axis: Any) -> Any:
        values, indices = slices.values, slices.indices
        if not isinstance(values, PerReplica) or not isinstance(indices, PerReplica):
            return reduce_same(op, slices, axis, self.num_replicas)
        if values.layout is Layout.LOCAL:
            local = IndexedSlices(values.local, indices.local, slices.dense_shape)
            if axis is not None:
                return _reduce_in_program(op, local.to_dense(), axis, None)
            return _reduce_in_program(op, local, None, None)
        parts = [
            IndexedSlices(self._brought(v), self._brought(i), slices.dense_shape)
            for v, i in zip(values.values, indices.values, strict=True)
        ]
        if axis is not None:
            return reduce_components(op, [part.to_dense() for part in parts], axis)
        return concatenated_rows([scaled_rows(op, part, len(parts)) for part in parts])

    def _of_variable(self, variable: Variable) -> Any:
        if variable.storage.per_replica and current_program() is None:
            return PerReplica(variable.values)
        return variable.value()

    def _is_here(self, whole: jax.Array | None) -> bool:
        """Tell whether a whole lies on this mesh, and not on another strategy's."""
        return whole is not None and whole.sharding.mesh == self._mesh  # pyright: ignore[reportAttributeAccessIssue]

    def _brought(self, part: Any) -> Any:
        if isinstance(part, Tracer):  # In a merge function, of one replica or equal on all.
            return part
        return uncommitted(jax.device_put(part, self._device))

    def gather(self, value: Any, axis: int) -> Any:
        """Concatenate one value over the replicas, in their order.

        A value that is not distributed is returned as it is: there is one of it.

        Raises:
          AggregationError: if a component has no such axis.
          TypeError: for sparse values.
        """
        refuse_sparse(value)
        if isinstance(value, PerReplica) and value.layout is Layout.LOCAL:
            return all_gather(value.local, axis)
        if isinstance(value, Variable):
            value = self._of_variable(value)
            value = value if isinstance(value, PerReplica) else Mirrored([value])
        if isinstance(value, Mirrored):
            value = PerReplica([value.values[0]] * self.num_replicas)
        if not isinstance(value, PerReplica):
            return value if self.num_replicas > 1 else concatenated([value], axis)
        return concatenated([self._brought(part) for part in value.values], axis)


class SingleCombiner:
    """There is one replica, and its value is the result."""

    num_replicas = 1

    def reduce(self, op: ReduceOp, value: Any, axis: Any, options: Options = None) -> Any:
        """Reduce over ``axis``, if it is not None."""
        check_no_timeout(options, "a reduction in cross-replica context")
        return reduce_same(op, _only_component(value), axis, 1)

    def gather(self, value: Any, axis: int) -> Any:
        """Return the value, checked for the axis."""
        refuse_sparse(value)
        return concatenated([_only_component(value)], axis)


def _only_component(value: Any) -> Any:
    if isinstance(value, IndexedSlices):
        return jax.tree.map(_only_component, value, is_leaf=is_distributed)
    if isinstance(value, Variable):
        return value.value()
    if isinstance(value, PerReplica) and value.layout is Layout.LOCAL:
        return value.local
    return value.values[0] if isinstance(value, DistributedValues) else value


def _frozen(axis: Any) -> Any:
    if isinstance(axis, list):
        raise TypeError(f"reduce got the axis {axis!r}: give an int, a tuple of ints, or None.")
    return axis


def _axes(axis: Any, rank: int) -> tuple[int, ...]:
    """Return the axes of a component, counted from the front."""
    if axis is None:
        return ()
    axes = axis if isinstance(axis, tuple) else (axis,)
    for a in axes:
        if not -rank <= a < rank:
            raise AggregationError(
                f"reduce over axis {a} got components of rank {rank}, which have no such axis. Use "
                "axis=None to reduce over the replicas alone."
            )
    return tuple(a % rank for a in axes)


def _reduce_in_program(op: ReduceOp, local: Any, axis: Any, options: Options) -> Any:
    program = current_program()
    if program is None:
        raise AggregationError("A traced per-replica value left the step that it belongs to.")
    if isinstance(local, IndexedSlices):
        return program.all_reduce(op, local, None)
    axes = _axes(_frozen(axis), local.ndim)
    total = local.sum(axes, dtype=local.dtype) if axes else local
    if op is ReduceOp.SUM or not axes:
        return program.all_reduce(op, total, options)
    count = jnp.asarray(math.prod(local.shape[a] for a in axes), jnp.result_type(float))
    total, count = program.all_reduce(ReduceOp.SUM, (total, count), options)
    return total / count


def _add_in_order(arrays: Sequence[jax.Array]) -> jax.Array:
    return functools.reduce(jnp.add, arrays)


def reduce_components(
    op: ReduceOp,
    parts: Sequence[Any],
    axis: Any,
    add: Callable[[Sequence[jax.Array]], jax.Array] = _add_in_order,
) -> jax.Array:
    """Reduce components whose shapes may differ along ``axis``.

    MEAN divides by the number of elements that there really are, so that a replica with few
    examples counts for few.

    Args:
      op: how.
      parts: a component for each replica.
      axis: the axes of the components to reduce as well; None for none.
      add: adds arrays of equal shapes, one of each replica.

    Raises:
      AggregationError: if what is left after reducing over ``axis`` differs in shape.
    """
    arrays = [jnp.asarray(part) for part in parts]
    if op is ReduceOp.MEAN and axis is not None:
        # Of booleans the mean over examples is the fraction that is true.
        arrays = [a.astype(jnp.int32) if a.dtype == jnp.bool_ else a for a in arrays]
    axes = [_axes(_frozen(axis), a.ndim) for a in arrays]
    sums = [a.sum(x, dtype=a.dtype) for a, x in zip(arrays, axes, strict=True)]
    if len({s.shape for s in sums}) > 1:
        raise AggregationError(
            f"reduce got components of shapes {[a.shape for a in arrays]}, which cannot be added "
            f"with axis={axis}: reduce over the axis in which they differ too (axis=0 for the "
            "last, short batch)."
        )
    total = add(sums)
    if op is ReduceOp.SUM:
        return total
    if axis is None:
        return total / len(arrays)
    count = sum(math.prod(a.shape[i] for i in x) for a, x in zip(arrays, axes, strict=True))
    return total / count


def reduce_same(op: ReduceOp, value: Any, axis: Any, num_replicas: int) -> Any:
    """Reduce a value that is the same on every replica.

    Raises:
      AggregationError: for SUM over several replicas without an axis: once, or once for each?
    """
    if axis is not None:
        array = jnp.asarray(value)
        axes = _axes(_frozen(axis), array.ndim)
        if op is ReduceOp.MEAN:
            return array.mean(axes)
        return array.sum(axes, dtype=array.dtype) * num_replicas
    if op is ReduceOp.MEAN or num_replicas == 1:
        return value
    if isinstance(value, int | float) and value == 0:
        return value
    raise AggregationError(
        f"A non-DistributedValues value {value!r} cannot be reduced with the given reduce op {op}: "
        f"it is one value for all {num_replicas} replicas. Use ReduceOp.MEAN for the value itself, "
        "or return it from strategy.run."
    )


def refuse_sparse(value: Any) -> None:
    """Raise if a value to be gathered is sparse.

    Raises:
      TypeError: saying how to gather it.
    """
    if isinstance(value, IndexedSlices) or is_sparse(value):
        dense = "to_dense()" if isinstance(value, IndexedSlices) else "todense()"
        raise TypeError(
            f"gather got a {type(value).__name__}, whose parts are no rows of one array. Make it "
            f"dense in the replica, with x.{dense}, or gather its arrays one by one."
        )


def concatenated(parts: Sequence[Any], axis: int) -> jax.Array:
    """Concatenate components along ``axis``.

    Raises:
      AggregationError: if one has no such axis, or ranks or other axes differ.
    """
    arrays = [jnp.asarray(part) for part in parts]
    shapes = [a.shape for a in arrays]
    rank = arrays[0].ndim
    if any(a.ndim != rank for a in arrays) or not -rank <= axis < rank:
        raise AggregationError(
            f"gather along axis {axis} got components of shapes {shapes}: they need one rank, and "
            "that axis. Give scalars an axis with x[None]."
        )
    others = {np.delete(np.asarray(s, dtype=np.int64), axis).tobytes() for s in shapes}
    if len(others) > 1:
        raise AggregationError(
            f"gather along axis {axis} got components of shapes {shapes}, which differ in another "
            "axis too."
        )
    return jnp.concatenate(arrays, axis) if len(arrays) > 1 else arrays[0]
