"""The SPMD engine: one compiled program for all replicas, a replica on each device of a mesh.

The lifted step runs under `jax.shard_map` over the mesh axis ``"replica"``, as the body of
`jax.pmap` does. The work of a call in Python is a look-up, one call of the compiled program, one
write-back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from distrib.engines.deferred_updates import DeferredUpdate, apply_in_order, updated_variables
from distrib.engines.interrupts import InterruptsDeferred
from distrib.engines.lift import Lifted, stand_in
from distrib.engines.placement import UpdatePlacement
from distrib.engines.signature import Kind
from distrib.engines.varying import calls_back
from distrib.platform.jax_compat import jaxpr_function
from distrib.platform.mesh import REPLICA_AXIS, replicated, split
from distrib.values import Layout, Mirrored, PerReplica
from distrib.variables import LentCells, Variable, cells_held, changes_held

_EVERYWHERE = PartitionSpec()
_SPLIT = PartitionSpec(REPLICA_AXIS)

Body = Callable[[dict[int, Any], list, list], tuple[list, list, list]]
"""From variables by ``id``, leaves and NNX arrays of a replica to outputs (with a leading replica
axis), what is equal everywhere and not a variable, and the new values of the variables written."""


@dataclass(frozen=True)
class Leaf:
    """An array leaf of a call.

    Attributes:
      kind: how it enters the program.
      key: what of it the program depends on.
      form: shape and dtype of the array that enters, over all devices.
      moved: whether it lies on the devices of another strategy and is moved at each call.
    """

    kind: Kind
    key: Any
    form: jax.ShapeDtypeStruct
    moved: bool = False

    @property
    def spec(self) -> PartitionSpec:
        """How the array lies on the mesh."""
        return _EVERYWHERE if self.kind is Kind.EVERYWHERE else _SPLIT


def entering_leaf(leaf: Any, kind: Kind, key: Any, form: jax.ShapeDtypeStruct, mesh: Mesh) -> Leaf:
    """Describe how a leaf enters a program on ``mesh``."""
    if isinstance(leaf, PerReplica):
        moved = key[3] is not None and key[3] != mesh
        return Leaf(kind, key, jax.ShapeDtypeStruct(key[1], form.dtype), moved)
    return Leaf(kind, key, form)


class Step:
    """A compiled step: takes the leaves of a call, changes the variables, returns the outputs.

    It holds the cells of its variables and not the variables, so that these can die.
    """

    def __init__(
        self,
        lifted: Lifted,
        leaves: Sequence[Leaf],
        mesh: Mesh,
        placement: UpdatePlacement,
        body: Body,
        finish: Callable[[list], Any],
    ):
        # Variables that are split over the devices are updated by all of these together: in the
        # same program, outside of the replicas'.
        together = () if placement.deferred else lifted.updates
        written = [*lifted.writes, *updated_variables(together)]
        written = list({id(v): v for v in written}.values())
        written_ids = {id(v) for v in written}
        read = [v for v in lifted.reads if id(v) not in written_ids]
        # A callback may raise while the step runs: the old values are then kept until it is over.
        self._may_fail = calls_back(lifted.jaxpr.jaxpr)
        self.compiled = _compile(
            lifted, written, read, together, leaves, mesh, body, donated=not self._may_fail
        )
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
            with InterruptsDeferred(), cells_held():
                self._store(common, new)
        return outputs, common

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


def _compile(
    lifted: Lifted,
    written: Sequence[Variable],
    read: Sequence[Variable],
    updates: Sequence[DeferredUpdate],
    leaves: Sequence[Leaf],
    mesh: Mesh,
    body: Body,
    *,
    donated: bool,
) -> Any:
    """Compile a step.

    Args:
      lifted: the step.
      written: the variables that it changes, in the replicas' program or by ``updates``.
      read: the others that it reads.
      updates: what is applied after the replicas' program, to arrays that lie on the whole mesh.
      leaves: how the arguments enter.
      mesh: where the replicas are.
      body: the program of a replica.
      donated: whether the old arrays of ``written`` may be used for the new ones.
    """
    num_nnx = len(lifted.nnx_changes)
    seen = {id(v) for v in (*lifted.reads, *lifted.writes)}
    entering = [v for v in (*written, *read) if id(v) in seen]
    lies = {id(v): _Lying(v, mesh) for v in (*written, *read)}
    replicas = _on_replicas(lifted, entering, leaves, mesh, body)

    def program(written_arrays: list, read_arrays: list, arrays: list, nnx: list) -> tuple:
        given = zip((*written, *read), (*written_arrays, *read_arrays), strict=True)
        values = {id(v): lies[id(v)].entire(array) for v, array in given}
        outputs, common, new = replicas([values[id(v)] for v in entering], arrays, nnx)
        values.update(zip(map(id, lifted.writes), new, strict=True))
        if updates:
            apply_in_order(updates, values, common[num_nnx:])
            common = common[:num_nnx]
        return outputs, common, [lies[id(v)].stored(values[id(v)]) for v in written]

    avals = lifted.jaxpr.in_avals
    start = len(avals) - len(lifted.variables)
    nnx_forms = avals[start - lifted.num_nnx : start]
    everywhere = replicated(mesh)
    # keep_unused: an old value that the step overwrites without reading is to be donated all the
    # same.
    lowered = jax.jit(
        program,
        donate_argnums=(0,) if donated else (),
        keep_unused=True,
        out_shardings=(None, None, [lies[id(v)].sharding for v in written]),
    ).lower(
        [lies[id(v)].form for v in written],
        [lies[id(v)].form for v in read],
        [_form(leaf.form, NamedSharding(mesh, leaf.spec)) for leaf in leaves],
        [_form(x, everywhere) for x in nnx_forms],
    )
    return lowered.compile()


def _on_replicas(
    lifted: Lifted, entering: Sequence[Variable], leaves: Sequence[Leaf], mesh: Mesh, body: Body
) -> Any:
    """Return the replicas' program as a function of arrays on the whole mesh."""

    def replica(variables: list, arrays: list, nnx: list) -> tuple:
        values = {
            id(v): array[0] if v.storage.per_replica else array
            for v, array in zip(entering, variables, strict=True)
        }
        outputs, common, new = body(values, arrays, nnx)
        pairs = zip(lifted.writes, new, strict=True)
        return outputs, common, [x[None] if v.storage.per_replica else x for v, x in pairs]

    operand_specs = [
        _EVERYWHERE if shards is None else shards.spec
        for update in lifted.updates
        for shards in update.shards
    ]
    return jax.shard_map(
        replica,
        mesh=mesh,
        in_specs=(
            [_variable_spec(v) for v in entering],
            [leaf.spec for leaf in leaves],
            _EVERYWHERE,
        ),
        out_specs=(
            _SPLIT if mesh.devices.size > 1 else _EVERYWHERE,
            [_EVERYWHERE] * len(lifted.nnx_changes) + operand_specs,
            [_variable_spec(v) for v in lifted.writes],
        ),
        check_vma=False,
    )


def _variable_spec(variable: Variable) -> PartitionSpec:
    return _SPLIT if variable.storage.per_replica else _EVERYWHERE


def _form(x: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


class _Lying:
    """How the array of a variable lies on the mesh, before and after a step.

    One that is split over another mesh is brought to this one entire.
    """

    def __init__(self, variable: Variable, mesh: Mesh):
        here = variable.distribute_strategy.extended.lives_on(mesh)
        self._shards = variable.storage.shards if here else None
        shape = variable.shape
        if self._shards is not None:
            shape, self.sharding = self._shards.filled_shape, self._shards.sharding(mesh)
        elif variable.storage.per_replica:
            shape, self.sharding = (mesh.devices.size, *shape), split(mesh)
        else:
            self.sharding = replicated(mesh)
        self.form = jax.ShapeDtypeStruct(shape, variable.dtype, sharding=self.sharding)

    def entire(self, array: jax.Array) -> jax.Array:
        return array if self._shards is None else self._shards.cut(array)

    def stored(self, array: jax.Array) -> jax.Array:
        return array if self._shards is None else self._shards.filled(array)


def even_body(lifted: Lifted, leaves: Sequence[Leaf], num_replicas: int) -> Body:
    """Return the body of a step whose replicas all see the same shapes: the lifted step itself."""

    def body(values: dict[int, Any], arrays: list, nnx: list) -> tuple[list, list, list]:
        inputs = [entered_form(x, leaf) for x, leaf in zip(arrays, leaves, strict=True)]
        inputs += nnx
        inputs += [values[id(v)] if id(v) in values else stand_in(v) for v in lifted.variables]
        results = jaxpr_function(lifted.jaxpr)(*inputs)
        outputs = results[: lifted.num_outputs]
        if num_replicas > 1:
            outputs = [x[None] for x in outputs]
        rest = results[lifted.num_outputs :]
        split_at = len(rest) - len(lifted.writes)
        return outputs, rest[:split_at], rest[split_at:]

    return body


def entered_form(array: Any, leaf: Leaf) -> Any:
    """Return what a replica sees of its part of an array."""
    return array[0] if leaf.kind is Kind.SPLIT and leaf.key[0] is Layout.STACKED else array


def even_finish(lifted: Lifted, num_replicas: int) -> Callable[[list], Any]:
    """Return the function that turns the outputs of a step into what ``run`` returns."""
    output = lifted.output
    if num_replicas == 1:
        return output
    return lambda outputs: output([PerReplica.stacked(whole) for whole in outputs])


def stack_components(value: PerReplica, mesh: Mesh) -> jax.Array:
    """Put components of equal shape into one array ``[replica, ...]``, each on its device."""
    if value.whole is None:
        value.whole = stack_parts(value.values, jnp.result_type(value.values[0]), mesh)
        value.layout = Layout.STACKED
    return value.whole


def stack_parts(parts: Sequence[Any], dtype: Any, mesh: Mesh) -> jax.Array:
    """Stack one array for each replica of this process, of equal shapes, on the mesh."""
    rows = [
        jax.device_put(jnp.asarray(part, dtype=dtype)[None], device)
        for part, device in zip(parts, mesh.local_devices, strict=True)
    ]
    shape = (mesh.devices.size, *rows[0].shape[1:])
    return jax.make_array_from_single_device_arrays(shape, split(mesh), rows)


@functools.partial(jax.jit, static_argnums=1)
def _padded(part: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jnp.pad(part, [(0, full - mine) for full, mine in zip(shape, part.shape, strict=True)])


def stack_padded(value: PerReplica, form: jax.ShapeDtypeStruct, mesh: Mesh) -> jax.Array:
    """Stack components of unequal shapes, filled up with zeros to ``form`` ``[replica, ...]``."""
    parts = [_padded(part, form.shape[1:]) for part in value.values]
    return stack_parts(parts, form.dtype, mesh)
