"""Steps whose replicas see different shapes, such as the last batch of an epoch.

The step is traced once for each distinct shape. Replicas of one shape form a group, and the
programs of the groups are brought together at their collectives (:mod:`distrib.engines.together`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from distrib.engines.groups import Forms, Lift, trace_group
from distrib.engines.lift import Lifted
from distrib.engines.lowering import Leaf
from distrib.engines.placement import UpdatePlacement
from distrib.engines.signature import Kind, traced_form
from distrib.engines.spmd import Step, entering_leaf
from distrib.engines.together import Together
from distrib.engines.weights import ExampleWeights, examples_of
from distrib.errors import UnevenReplicasError


def make_step(
    lifted: Lift,
    leaves: Sequence[Any],
    keys: Sequence[tuple[Kind, Any]],
    mesh: Mesh,
    placement: UpdatePlacement,
    xla_options: dict[str, Any] | None = None,
) -> tuple[Step, Sequence[Any]]:
    """Make the step of a call whose replicas see different shapes.

    Args:
      lifted: traces the step.
      leaves: the array leaves of the call.
      keys: kind and key of each.
      mesh: where the step runs.
      placement: where variables are, and updates applied.
      xla_options: options of XLA for the compilation.

    Returns:
      The step and its variables.

    Raises:
      UnevenReplicasError: if the programs of the replicas do not meet at the same collectives.
    """
    size = mesh.devices.size
    forms_of = [_forms(leaves, keys, i) for i in range(size)]
    uneven = [key[1] for kind, key in keys if kind is Kind.UNEVEN]
    examples = examples_of([shape for shape, _ in forms] for forms in uneven) or [1] * size
    # The largest first: what is computed once for all is taken from its program.
    order = sorted(range(size), key=lambda i: -examples[i])
    shapes = list(dict.fromkeys(_shapes(forms_of[i]) for i in order))
    group_of = [shapes.index(_shapes(forms)) for forms in forms_of]
    members = [group_of.index(g) for g in range(len(shapes))]
    groups = [
        trace_group(lifted, forms_of[i], ExampleWeights(examples[i], sum(examples), size))
        for i in members
    ]
    steps = [group.step for group in groups]
    _check_alike(steps)
    entering = [_leaf(leaf, key, mesh) for leaf, key in zip(leaves, keys, strict=True)]
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    together = Together(groups, group_of, entering, lifted, on_cpu=on_cpu)
    step = Step(
        steps[0],
        entering,
        mesh,
        placement,
        together.body,
        together.finish(),
        output_shapes=together.output_shapes,
        xla_options=xla_options,
    )
    return step, steps[0].touched


def _forms(leaves: Sequence[Any], keys: Sequence[tuple[Kind, Any]], replica: int) -> Forms:
    forms = []
    for leaf, (kind, key) in zip(leaves, keys, strict=True):
        if kind is Kind.UNEVEN:
            shape, dtype = key[1][replica]
            forms.append(jax.ShapeDtypeStruct(shape, dtype))
        else:
            forms.append(traced_form(leaf, key))
    return tuple(forms)


def _shapes(forms: Forms) -> tuple[Any, ...]:
    return tuple((form.shape, form.dtype) for form in forms)


def _leaf(leaf: Any, kind_and_key: tuple[Kind, Any], mesh: Mesh) -> Leaf:
    kind, key = kind_and_key
    if kind is not Kind.UNEVEN:
        return entering_leaf(leaf, kind, key, traced_form(leaf, key), mesh)
    shapes = [shape for shape, _ in key[1]]
    dtypes = {dtype for _, dtype in key[1]}
    if len({len(shape) for shape in shapes}) > 1 or len(dtypes) > 1:
        raise UnevenReplicasError(
            f"A per-replica argument has components of shapes {shapes} and dtypes "
            f"{sorted(map(str, dtypes))}: they may differ in the lengths of their axes, not in "
            "rank or dtype."
        )
    largest = tuple(max(lengths) for lengths in zip(*shapes, strict=True))
    return Leaf(kind, key, jax.ShapeDtypeStruct((len(shapes), *largest), dtypes.pop()))


def _check_alike(steps: Sequence[Lifted]) -> None:
    first = steps[0]
    for other in steps[1:]:
        same = (
            [id(v) for v in first.writes] == [id(v) for v in other.writes]
            and first.num_outputs == other.num_outputs
            and first.nnx_changes == other.nnx_changes
            and len(first.updates) == len(other.updates)
        )
        if not same:
            raise UnevenReplicasError(
                "The replicas have batches of unequal sizes, and the step does different things "
                f"for them: it changes {[v.name for v in first.writes]} and returns "
                f"{first.num_outputs} arrays on one, and changes {[v.name for v in other.writes]} "
                f"and returns {other.num_outputs} on another. Do not branch on the shape of a "
                "batch."
            )
