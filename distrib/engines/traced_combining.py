"""How the replicas of a traced program combine what they compute from their examples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from distrib.collectives import (
    CrossDeviceOps,
    ScatteringOps,
    all_reduce,
    all_reduce_with_feedback,
    check_numbers,
    reduce_scatter,
    scattering_ops,
)
from distrib.engines.contribution import Contribution, OwnCopies
from distrib.engines.numerics import Numerics
from distrib.engines.weights import ExampleWeights, part_of_sum
from distrib.platform import shards_of
from distrib.reduce_op import ReduceOp
from distrib.values import map_apart
from distrib.variables import Variable


class TracedCombining:
    """Combines gradients and statistics, each replica counting for its examples.

    Args:
      program: the program of this replica.
      num_replicas: how many replicas run it.
      ops: how values are added over them.
      weights: the examples of each replica, where they differ; None where all have equally many.
      numerics: looks at values that must be finite; None where that is not asked for.

    Attributes:
      accumulators: variables in which replicas have accumulated what they are still to bring.
    """

    def __init__(
        self,
        program: OwnCopies,
        num_replicas: int,
        ops: CrossDeviceOps,
        *,
        weights: ExampleWeights | None,
        numerics: Numerics | None,
    ):
        self._program = program
        self._size = num_replicas
        self._ops = ops
        self._mine = Contribution(num_replicas, weights, numerics)
        self.accumulators: dict[int, Variable] = {}
        self._combined_by: ReduceOp | None = None
        self._counts_examples = False

    def global_examples(self, local: int) -> int:
        """Return the examples of all replicas, of which this one has ``local``."""
        self._counts_examples = True
        return self._mine.global_examples(local)

    @property
    def share_of_mean(self) -> float:
        """What a mean over the replicas multiplies this one's value by, weighted by examples."""
        return self._mine.share_of_mean

    def combine(
        self,
        value: Any,
        aggregation: str,
        names: Sequence[str] = (),
        *,
        in_parts: bool = False,
    ) -> Any:
        """Combine gradients over the replicas: SUM, or MEAN weighted by the examples of each.

        Each replica gets a part of every array ``in_parts``, where there is something to split.
        """
        op = self._combined_by = ReduceOp.parse(aggregation)
        ops = scattering_ops(self._ops) if in_parts and self._mine.weights is None else None
        if ops is not None:
            return self._scattered(op, value, ops, names)
        return self._weighted(op, value, names)

    def combine_with_feedback(
        self,
        value: Sequence[Any],
        residuals: Sequence[Any],
        aggregation: str,
        names: Sequence[str] = (),
    ) -> tuple[Sequence[Any], Sequence[Any]]:
        """Combine gradients as :meth:`combine` does, adding what earlier steps rounded off.

        Returns:
          The combined gradients, and what this step has rounded off on this replica.
        """
        self._combined_by = ReduceOp.parse(aggregation)
        op, value = self._mine.weighted(self._combined_by, value, names)
        return all_reduce_with_feedback(
            op, value, residuals, num_replicas=self._size, ops=self._ops
        )

    def _scattered(self, op: ReduceOp, value: Any, ops: ScatteringOps, names: Sequence[str]) -> Any:
        self._mine.checked(f"what is combined ({op.name})", value, names)
        leaves = check_numbers(value, f"all_reduce({op.name})")
        shards = [
            shards_of(leaf.shape, self._size) if jnp.issubdtype(leaf.dtype, jnp.inexact) else None
            for leaf in leaves
        ]
        pairs = list(zip(leaves, shards, strict=True))
        totals = iter(self._added(op, [leaf for leaf, how in pairs if how is None]))
        split = [leaf for leaf, how in pairs if how is not None]
        if op is ReduceOp.MEAN:
            split = part_of_sum(split, op.name, None, self._size)
        parts = iter(reduce_scatter(split, [how for how in shards if how is not None], ops))
        combined = [next(totals if how is None else parts) for how in shards]
        return jax.tree.unflatten(jax.tree.structure(value), combined)

    def accumulate(
        self,
        variables: Sequence[Variable],
        value: Sequence[Any],
        aggregation: str | None,
        due: Any,
    ) -> list[Any]:
        """Add gradients to this replica's ``variables``; where ``due``, sum and clear these."""
        if aggregation is not None:
            self._combined_by = ReduceOp.parse(aggregation)
        sums = self._mine.accumulated(variables, self._program.own_value, value, aggregation)

        def total() -> list[Any]:
            return all_reduce(ReduceOp.SUM, sums, num_replicas=self._size, ops=self._ops)

        if self._mine.weights is None:
            totals = jax.lax.cond(due, total, lambda: [jnp.zeros_like(x) for x in sums])
        else:  # Programs for different shapes are brought together at their collectives.
            totals = total()
        for variable, x in zip(variables, sums, strict=True):
            self._program.set_own(variable, jnp.where(due, 0, x))
            self.accumulators[id(variable)] = variable
        return totals

    def average(self, value: Any, names: Sequence[str] = ()) -> Any:
        """Return the mean of a tree over the replicas, weighted by the examples of each."""
        return self._weighted(ReduceOp.MEAN, value, names)

    def _weighted(self, op: ReduceOp, value: Any, names: Sequence[str]) -> Any:
        op, value = self._mine.weighted(op, value, names)
        return value if self._size == 1 else self._added(op, value)

    def _added(self, op: ReduceOp, value: Any) -> Any:
        return map_apart(
            value,
            lambda arrays: all_reduce(op, arrays, num_replicas=self._size, ops=self._ops),
            lambda slices: self._program.add_rows(op, slices),
        )

    @property
    def gradients_are(self) -> ReduceOp | None:
        """How gradients are combined, as far as the step has shown it.

        MEAN if losses are means over the examples of a replica, SUM if they are shares of one sum;
        None if the step combines them by itself and does not say.
        """
        if self._combined_by is not None:
            return self._combined_by
        return ReduceOp.SUM if self._counts_examples else None
