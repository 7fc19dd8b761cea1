"""Groups of replicas that see the same shapes, and the step as each traces it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from distrib.engines.lift import Lifted
from distrib.engines.outputs import is_end
from distrib.engines.weights import ExampleWeights

Forms = tuple[jax.ShapeDtypeStruct, ...]
"""Shape and dtype of each array argument as one replica sees it."""

Lift = Callable[..., Lifted]
"""Traces the step for the forms and weights of a replica, and the number of replicas that its
collectives see, by default the real one."""


@dataclass(frozen=True)
class Group:
    """Replicas that see the same shapes.

    Attributes:
      step: the step as traced for them.
      forms: the shapes it was traced for.
      weights: the examples of one of them.
      example_axes: None, except where replicas without examples could only be traced as if they had
        one: for each output, the axes that count examples. Such replicas take no part: they add
        nothing to sums and keep their own copies of variables as they are.
      larger_output: such a group's output function as traced for two examples.
    """

    step: Lifted
    forms: Forms
    weights: ExampleWeights
    example_axes: tuple[tuple[int, ...], ...] | None = None
    larger_output: Callable[[Sequence[Any]], Any] | None = None

    @property
    def examples(self) -> int:
        """The examples of one of the replicas."""
        return self.weights.mine

    @property
    def takes_part(self) -> bool:
        """Whether the replicas add to sums and change their copies of variables."""
        return self.example_axes is None

    @property
    def output(self) -> Callable[[Sequence[Any]], Any]:
        """The function from array outputs to what the step returned."""
        one, two = self.step.output, self.larger_output
        if two is None:
            return one
        return lambda arrays: jax.tree.map(
            _for_no_examples, one(arrays), two(arrays), is_leaf=is_end
        )

    def output_shape(self, index: int) -> tuple[int, ...]:
        """Return the shape of an output, of which a replica that takes no part has no examples."""
        shape = self.step.jaxpr.out_avals[index].shape
        empty = () if self.example_axes is None else self.example_axes[index]
        return tuple(0 if axis in empty else length for axis, length in enumerate(shape))


def trace_group(lift: Lift, forms: Forms, weights: ExampleWeights) -> Group:
    """Trace the step for a group of replicas.

    Code such as ``x.reshape(len(x), -1)`` cannot be traced for no examples. It is then traced for
    one, and for two to see which axes of the outputs count examples.
    """
    try:
        return Group(lift(forms, weights), forms, weights)
    except Exception:
        if weights.mine or not any(0 in form.shape for form in forms):
            raise
    absent = ExampleWeights(0, weights.total, weights.num_replicas, takes_part=False)
    one, two = _with_examples(forms, 1), _with_examples(forms, 2)
    step, larger = lift(one, absent), lift(two, absent)
    axes = tuple(
        tuple(i for i, pair in enumerate(zip(a.shape, b.shape, strict=True)) if pair[0] != pair[1])
        for a, b in zip(
            step.jaxpr.out_avals[: step.num_outputs],
            larger.jaxpr.out_avals[: step.num_outputs],
            strict=True,
        )
    )
    return Group(step, one, absent, axes, larger.output)


def _for_no_examples(one: Any, two: Any) -> Any:
    """Return a constant of the step for no examples, from those for one and for two.

    What depends on the number of examples, such as that number, is 0 or False for none.
    """
    if isinstance(one, int | float) and one != two:
        return type(one)(0)
    return one


def _with_examples(forms: Sequence[jax.ShapeDtypeStruct], count: int) -> Forms:
    return tuple(
        jax.ShapeDtypeStruct(tuple(length or count for length in form.shape), form.dtype)
        if 0 in form.shape
        else form
        for form in forms
    )
