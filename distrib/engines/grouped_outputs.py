"""What ``run`` returns of a step that several groups of replicas ran in programs of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from distrib.engines.groups import Group
from distrib.engines.outputs import is_end
from distrib.errors import UnevenReplicasError
from distrib.values import PerReplica


def finisher(
    groups: Sequence[Group], group_of: Sequence[int], uniform: Sequence[bool]
) -> Callable[[list], Any]:
    """Return the function that turns the outputs of a step into what ``run`` returns.

    Args:
      groups: the groups.
      group_of: the group of each replica.
      uniform: for each output, whether it has one shape in all groups. Then there is one array of
        it among the outputs, else one for each group, of which only its own replicas' rows count.
    """
    outputs_of = [group.output for group in groups]
    shapes = [[group.output_shape(i) for i in range(len(uniform))] for group in groups]
    group_of = list(group_of)

    def finish(outputs: list) -> Any:
        remaining = iter(outputs)
        values = []
        for index, alike in enumerate(uniform):
            if alike:
                values.append(PerReplica.stacked(next(remaining)))
                continue
            parts = [
                [_cut_down(part, shape[index]) for part in PerReplica.stacked(rows).values]
                for shape, rows in zip(shapes, remaining, strict=False)
            ]
            values.append(PerReplica([parts[g][i] for i, g in enumerate(group_of)]))
        return regrouped([output(values) for output in outputs_of], group_of)

    return finish


def regrouped(results: Sequence[Any], group_of: Sequence[int]) -> Any:
    """Return what ``run`` returns, of what the function returned in each group.

    Arrays are per-replica values already. A number or text that is a constant of the program may
    differ by group, the length of a batch for one.

    Raises:
      UnevenReplicasError: if the functions returned trees of different structure.
    """
    structures = [jax.tree.structure(result, is_leaf=is_end) for result in results]
    if any(structure != structures[0] for structure in structures):
        raise UnevenReplicasError(
            f"Replicas with batches of unequal sizes returned {structures[0]} and "
            f"{next(s for s in structures if s != structures[0])}: they must return one structure."
        )

    def one(*leaves: Any) -> Any:
        if all(leaf is leaves[0] for leaf in leaves):
            return leaves[0]
        if all(type(leaf) is type(leaves[0]) and leaf == leaves[0] for leaf in leaves):
            return leaves[0]
        return PerReplica([leaves[g] for g in group_of])

    return jax.tree.map(one, *results, is_leaf=is_end)


def _cut_down(part: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    if part.shape == shape:
        return part
    return part[tuple(slice(0, length) for length in shape)]
