"""A step as one program: the replicas' under `jax.shard_map`, and what is applied after it.

Beneath the compiled program stands the body of one replica. How the arrays of arguments and
variables lie on the mesh decides what a replica sees of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from distrib.engines.deferred_updates import DeferredUpdate, apply_in_order
from distrib.engines.lift import Lifted
from distrib.engines.signature import Kind
from distrib.platform.mesh import REPLICA_AXIS, replicated, split
from distrib.variables import Variable

EVERYWHERE = PartitionSpec()
SPLIT = PartitionSpec(REPLICA_AXIS)

Specs = PartitionSpec | list[PartitionSpec]

Body = Callable[[dict[int, Any], list, list], tuple[list, list, list]]
"""From variables by ``id``, leaves and NNX arrays of a replica to outputs (those that differ by
replica with a leading replica axis), what is equal everywhere and not a variable, and the new
values of the variables written."""


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
        return EVERYWHERE if self.kind is Kind.EVERYWHERE else SPLIT


def lower(
    lifted: Lifted,
    written: Sequence[Variable],
    read: Sequence[Variable],
    updates: Sequence[DeferredUpdate],
    leaves: Sequence[Leaf],
    mesh: Mesh,
    body: Body,
    out_specs: Specs,
    *,
    donated: bool,
) -> Any:
    """Return a step as a program of arrays on the whole mesh, ready to be compiled.

    Args:
      lifted: the step.
      written: the variables that it changes, in the replicas' program or by ``updates``.
      read: the others that it reads.
      updates: what is applied after the replicas' program, to arrays that lie on the whole mesh.
      leaves: how the arguments enter.
      mesh: where the replicas are.
      body: the program of a replica.
      out_specs: how its outputs lie on the mesh.
      donated: whether the old arrays of ``written`` may be used for the new ones.
    """
    num_nnx = len(lifted.nnx_changes)
    seen = {id(v) for v in (*lifted.reads, *lifted.writes)}
    entering = [v for v in (*written, *read) if id(v) in seen]
    lies = {id(v): _Lying(v, mesh) for v in (*written, *read)}
    replicas = _on_replicas(lifted, entering, leaves, mesh, body, out_specs)

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
    return jax.jit(
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


def _on_replicas(
    lifted: Lifted,
    entering: Sequence[Variable],
    leaves: Sequence[Leaf],
    mesh: Mesh,
    body: Body,
    out_specs: Specs,
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
        EVERYWHERE if shards is None else shards.spec
        for update in lifted.updates
        for shards in update.shards
    ]
    return jax.shard_map(
        replica,
        mesh=mesh,
        in_specs=(
            [_variable_spec(v) for v in entering],
            [leaf.spec for leaf in leaves],
            EVERYWHERE,
        ),
        out_specs=(
            out_specs if mesh.devices.size > 1 else EVERYWHERE,
            [EVERYWHERE] * len(lifted.nnx_changes) + operand_specs,
            [_variable_spec(v) for v in lifted.writes],
        ),
        check_vma=False,
    )


def _variable_spec(variable: Variable) -> PartitionSpec:
    return SPLIT if variable.storage.per_replica else EVERYWHERE


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
