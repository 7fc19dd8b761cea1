"""Gradients that are accumulated over several steps before the optimizer sees them.

Each replica adds its gradients to accumulators of its own, and the replicas meet at the last of the
steps only: one all-reduce for each update, as in Li et al., "PyTorch Distributed: Experiences on
Accelerating Data Parallel Training", VLDB 2020, section 3.2.4. Where there is one copy of every
variable, gradients are combined at each step and the combined ones are accumulated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from distrib.context import current_program, in_cross_replica_context
from distrib.variables import (
    Variable,
    VariableAggregation,
    VariableSynchronization,
    VariableTree,
)

Optimize = Callable[[list[Any], Any], Sequence[Any]]
"""From the old values of variables, the last being the step, and gradients to the new values."""

ACCUMULATED = ("gradient_accumulator", "micro_step")
"""The fields of a train state that hold an accumulation."""


def checked_steps(steps: Any) -> int:
    """Return ``steps``, a positive number of steps.

    Raises:
      ValueError: if it is none.
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(
            f"gradient_accumulation_steps is {steps!r}, and must be an integer of at least 1."
        )
    return steps


def accumulator_trees(params: VariableTree) -> dict[str, VariableTree]:
    """Return the variables of an accumulation.

    ``gradient_accumulator`` is like ``params``, and every replica has its own, whose sum over the
    replicas is the sum of the gradients so far. ``micro_step`` is how many steps are in it.
    """

    def zeros(variable: Variable) -> jax.Array:
        floating = jnp.issubdtype(variable.dtype, jnp.inexact)
        return jnp.zeros(variable.shape, variable.dtype if floating else float)

    return {
        "gradient_accumulator": VariableTree(
            params.build([zeros(v) for v in params.variables]),
            "gradient_accumulator",
            VariableAggregation.SUM,
            synchronization=VariableSynchronization.ON_READ,
        ),
        "micro_step": VariableTree(0, "micro_step"),
    }


class Accumulation:
    """One micro-step: it makes the update of a train state out of the optimizer's.

    Args:
      trees: what :func:`accumulator_trees` returned.
      steps: how many micro-steps make an update.
      variables: what the optimizer changes, the step being the last.
      optimize: from their old values and gradients to the new values.
    """

    def __init__(
        self,
        trees: dict[str, VariableTree],
        steps: int,
        variables: Sequence[Variable],
        optimize: Optimize,
    ):
        self._sums = trees["gradient_accumulator"].variables
        self._micro_step = trees["micro_step"].variables[0]
        self._steps = steps
        self._optimized = variables
        self._optimize = optimize
        self._deferred = any(v.storage.per_replica for v in self._sums)

    @property
    def variables(self) -> list[Variable]:
        """What the update changes."""
        own = [] if self._deferred else self._sums
        return [*self._optimized, *own, self._micro_step]

    def operand(self, gradients: Sequence[Any], aggregation: str | None) -> Any:
        """Accumulate gradients where each replica has accumulators, else combine them.

        Returns:
          What :meth:`apply` takes, equal on all replicas: the sum over the replicas of what is
          accumulated, zeros unless an update is due; else the combined gradients of this step.
        """
        program = None if in_cross_replica_context() else current_program()
        gradients = [jnp.asarray(g, v.dtype) for g, v in zip(gradients, self._sums, strict=True)]
        if not self._deferred:
            if program is not None and aggregation is not None:
                return program.by_examples.combine(gradients, aggregation)
            return gradients
        due = self._is_due(self._micro_step.value())
        if program is not None:
            return program.by_examples.accumulate(self._sums, gradients, aggregation, due)
        totals = [v.value() + g for v, g in zip(self._sums, gradients, strict=True)]
        for variable, total in zip(self._sums, totals, strict=True):
            variable.assign(jnp.where(due, 0, total))
        return totals

    def apply(self, olds: Sequence[Any], operand: Sequence[Any]) -> list[Any]:
        """Return the new values of :attr:`variables`."""
        count = len(self._optimized)
        old, sums, micro_step = list(olds[:count]), olds[count:-1], olds[-1]
        due = self._is_due(micro_step)
        totals = operand
        if not self._deferred:
            totals = [a + b for a, b in zip(sums, operand, strict=True)]
            sums = [jnp.where(due, 0, total) for total in totals]

        def optimized() -> list[Any]:
            news = self._optimize(old, [total / self._steps for total in totals])
            return [v.fitted(new) for v, new in zip(self._optimized, news, strict=True)]

        new = jax.lax.cond(due, optimized, lambda: [*old[:-1], old[-1] + 1])
        return [*new, *sums, jnp.where(due, 0, micro_step + 1)]

    def _is_due(self, micro_step: Any) -> Any:
        return micro_step + 1 >= self._steps
