"""The SPMD engine: one compiled program for all replicas, a replica on each device of a mesh.

The lifted step runs under `jax.shard_map` over the mesh axis ``"replica"``, as the body of
`jax.pmap` does. The work of a call in Python is a look-up, one call of the compiled program, one
write-back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from distrib.engines.deferred_updates import updated_variables
from distrib.engines.explanation import use_of
from distrib.engines.interrupts import InterruptsDeferred
from distrib.engines.lift import Lifted, stand_in
from distrib.engines.lowering import EVERYWHERE, SPLIT, Body, Leaf, Specs, lower
from distrib.engines.numerics import require_finite
from distrib.engines.placement import UpdatePlacement
from distrib.engines.signature import Kind
from distrib.engines.varying import calls_back
from distrib.errors import NonFiniteError
from distrib.platform.jax_compat import jaxpr_function, uncommitted
from distrib.platform.mesh import replicated, split, stack_parts
from distrib.values import Layout, Mirrored, PerReplica, local_shards
from distrib.variables import LentCells, cells_held, changes_held


def entering_leaf(leaf: Any, kind: Kind, key: Any, form: jax.ShapeDtypeStruct, mesh: Mesh) -> Leaf:
    """Describe how a leaf enters a program on ``mesh``."""
    if isinstance(leaf, PerReplica):
        moved = key[3] is not None and key[3] != mesh
        return Leaf(kind, key, jax.ShapeDtypeStruct(key[1], form.dtype), moved)
    return Leaf(kind, key, form)


class Step:
    """A compiled step: takes the leaves of a call, changes the variables, returns the outputs.

    It holds the cells of its variables and not the variables, so that these can die.

    Args:
      lifted: the step.
      leaves: how its arguments enter.
      mesh: where it runs.
      placement: where variables are, and updates applied.
      body: the program of a replica.
      finish: from the outputs of ``body`` to what the function returned.
      out_specs: how the outputs lie on the mesh.
      output_shapes: the shape of each output in one step; None if it differs by replica.
      xla_options: options of XLA for the compilation.
    """

    def __init__(
        self,
        lifted: Lifted,
        leaves: Sequence[Leaf],
        mesh: Mesh,
        placement: UpdatePlacement,
        body: Body,
        finish: Callable[[list], Any],
        *,
        out_specs: Specs = SPLIT,
        output_shapes: Sequence[tuple[int, ...] | None] = (),
        xla_options: dict[str, Any] | None = None,
    ):
        # Variables that are split over the devices are updated by all of these together: in the
        # same program, outside of the replicas'.
        together = () if placement.deferred else lifted.updates
        written = [*lifted.writes, *updated_variables(together)]
        written = list({id(v): v for v in written}.values())
        written_ids = {id(v) for v in written}
        read = [v for v in lifted.reads if id(v) not in written_ids]
        self._checks = lifted.checks
        # A callback may raise while the step runs, and a check after it: the old values are then
        # kept until it is over.
        self._may_fail = calls_back(lifted.jaxpr.jaxpr) or bool(self._checks)
        donated = not self._may_fail
        lowered = lower(
            lifted, written, read, together, leaves, mesh, body, out_specs, donated=donated
        )
        self.compiled = lowered.compile(xla_options)
        self.output_shapes = output_shapes
        self._leaves = leaves
        self._mesh = mesh
        self._everywhere = replicated(mesh)
        self._written = [v.storage.cell for v in written]
        self._keep = LentCells(self._written)
        self._fetch_read = placement.fetcher(read, mesh)
        self._finish = finish
        self._nnx_changes = lifted.nnx_changes
        results = lifted.jaxpr.out_avals
        first = lifted.num_outputs + len(lifted.nnx_changes)
        operands = results[first : len(results) - len(lifted.writes)]
        self._apply = placement.applier(lifted.updates, operands)
        self.use = use_of(lifted, mesh, applied_elsewhere=self._apply is not None)
        self.created = lifted.created
        # Filled by the cache: what ends the life of this step.
        self.watches: list[Any] = []
        self.captures: list[Any] = []

    def __call__(
        self, leaves: Sequence[Any], nnx_arrays: Sequence[Any] = ()
    ) -> tuple[Any, dict[int, jax.Array]]:
        """Run the step.

        Args:
          leaves: the array leaves of the call.
          nnx_arrays: the state of its NNX objects.

        Returns:
          What the function returned, with per-replica values for arrays; and the NNX variables that
          changed, by position.
        """
        arrays = [
            value.whole
            if type(value) is PerReplica and value.whole is not None and not leaf.moved
            else self._entering(value, leaf)
            for value, leaf in zip(leaves, self._leaves, strict=True)
        ]
        nnx_arrays = [self._spread(a) for a in nnx_arrays]
        if self._may_fail:
            outputs, common = self._run_and_wait(arrays, nnx_arrays)
        else:
            outputs, common = self._run_and_store(arrays, nnx_arrays)
        return self._finish(outputs), dict(zip(self._nnx_changes, common, strict=False))

    def _run_and_store(self, arrays: list, nnx_arrays: list) -> tuple[list, list]:
        if not self._written and self._apply is None:
            with cells_held():
                outputs, common, _ = self.compiled([], self._fetch_read(), arrays, nnx_arrays)
            return outputs, common
        with InterruptsDeferred(), changes_held(), cells_held():
            self._keep.copy_lent()
            outputs, common, new = self.compiled(
                [cell.array for cell in self._written], self._fetch_read(), arrays, nnx_arrays
            )
            self._store(common, new)
        return outputs, common

    def _run_and_wait(self, arrays: list, nnx_arrays: list) -> tuple[list, list]:
        """Run a step that calls back, which may take long, read variables, or fail."""
        with changes_held():
            with cells_held():
                written, read = [cell.array for cell in self._written], self._fetch_read()
            outputs, common, new = jax.block_until_ready(
                self.compiled(written, read, arrays, nnx_arrays)
            )
            if self._checks:
                self._check(np.asarray(outputs[-1]))
            with InterruptsDeferred(), cells_held():
                self._store(common, new)
        return outputs, common

    def _check(self, counts: np.ndarray) -> None:
        """Raise for the first of the steps whose values, ``[replica, step, check, 3]``, are bad."""
        by_replica = counts.reshape(self._mesh.devices.size, -1, len(self._checks), 3)
        steps = by_replica.shape[1]
        for step in range(steps):
            try:
                require_finite([(self._checks, rows[step]) for rows in by_replica])
            except NonFiniteError as error:
                if steps > 1:
                    error.add_note(f"distrib: step {step + 1} of {steps}, which are one program.")
                raise

    def _store(self, common: list, new: list) -> None:
        for cell, array in zip(self._written, new, strict=True):
            cell.array = array
        if self._apply is not None:
            self._apply(common[len(self._nnx_changes) :])

    def _entering(self, value: Any, leaf: Leaf) -> Any:
        if leaf.kind is Kind.UNEVEN:
            return stack_padded(value, leaf.form, self._mesh)
        if isinstance(value, PerReplica):
            if leaf.moved:
                return jax.device_put(value.whole, split(self._mesh))
            return stack_components(value, self._mesh)
        if isinstance(value, Mirrored):
            value = value.values[0] if value.whole is None else value.whole
        if isinstance(leaf.key, type):
            return np.asarray(value, dtype=leaf.form.dtype)
        return self._spread(value)

    def _spread(self, array: Any) -> Any:
        sharding = getattr(array, "sharding", None)
        if sharding is self._everywhere or sharding == self._everywhere:
            return array
        return jax.device_put(array, self._everywhere)


def even_body(lifted: Lifted, leaves: Sequence[Leaf], num_replicas: int) -> Body:
    """Return the body of a step whose replicas all see the same shapes: the lifted step itself."""

    def body(values: dict[int, Any], arrays: list, nnx: list) -> tuple[list, list, list]:
        inputs = [entered_form(x, leaf) for x, leaf in zip(arrays, leaves, strict=True)]
        inputs += nnx
        inputs += [values[id(v)] if id(v) in values else stand_in(v) for v in lifted.variables]
        results = jaxpr_function(lifted.jaxpr)(*inputs)
        outputs = results[: lifted.num_outputs]
        if num_replicas > 1:
            one_for_all = zip(outputs, lifted.everywhere, strict=True)
            outputs = [x if everywhere else x[None] for x, everywhere in one_for_all]
        rest = results[lifted.num_outputs :]
        split_at = len(rest) - len(lifted.writes)
        return outputs, rest[:split_at], rest[split_at:]

    return body


def entered_form(array: Any, leaf: Leaf) -> Any:
    """Return what a replica sees of its part of an array."""
    return array[0] if leaf.kind is Kind.SPLIT and leaf.key[0] is Layout.STACKED else array


def even_out_specs(lifted: Lifted) -> list[PartitionSpec]:
    """Return how the outputs of :func:`even_body` lie on the mesh."""
    return [EVERYWHERE if everywhere else SPLIT for everywhere in lifted.everywhere]


def even_finish(lifted: Lifted, num_replicas: int) -> Callable[[list], Any]:
    """Return the function that turns the outputs of a step into what ``run`` returns."""
    output, everywhere = lifted.output, lifted.everywhere
    if num_replicas == 1:
        return output
    if not any(everywhere):
        return lambda outputs: output([PerReplica.stacked(whole) for whole in outputs])
    return lambda outputs: output(
        [
            uncommitted(local_shards(whole)[0].data) if one_for_all else PerReplica.stacked(whole)
            for whole, one_for_all in zip(outputs, everywhere, strict=True)
        ]
    )


def stack_components(value: PerReplica, mesh: Mesh) -> jax.Array:
    """Put components of equal shape into one array ``[replica, ...]``, each on its device."""
    if value.whole is None:
        value.whole = stack_parts(value.values, jnp.result_type(value.values[0]), mesh)
        value.layout = Layout.STACKED
    return value.whole


def stack_padded(value: PerReplica, form: jax.ShapeDtypeStruct, mesh: Mesh) -> jax.Array:
    """Stack components of unequal shapes, filled up with zeros to ``form`` ``[replica, ...]``.

    On the host: on the devices each shape, on each of them, would be a small program to compile,
    which costs more than the copies of one batch an epoch.
    """
    if not isinstance(form.dtype, np.dtype):  # Typed PRNG keys, which are no numbers of the host.
        parts = [_padded(part, form.shape[1:]) for part in value.values]
        return stack_parts(parts, form.dtype, mesh)
    rows = []
    for part, device in zip(value.values, mesh.local_devices, strict=True):
        row = np.zeros((1, *form.shape[1:]), form.dtype)
        row[(0, *map(slice, np.shape(part)))] = np.asarray(part)
        rows.append(jax.device_put(row, device))
    return jax.make_array_from_single_device_arrays(form.shape, split(mesh), rows)


def _padded(part: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jnp.pad(part, [(0, full - mine) for full, mine in zip(shape, part.shape, strict=True)])
