"""How replicas that run eagerly combine what they compute from their examples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from distrib.engines.contribution import Contribution, OwnCopies
from distrib.engines.numerics import Numerics
from distrib.engines.weights import ExampleWeights
from distrib.reduce_op import ReduceOp
from distrib.values import map_apart
from distrib.variables import Variable


class Asking(OwnCopies, Protocol):
    """What the thread of a replica has: the other replicas too."""

    def ask(self, kind: Any, shown: str, payload: Any) -> Any:
        """Meet the other replicas."""
        ...


class EagerCombining:
    """Combines gradients and statistics, each replica counting for its examples.

    Args:
      thread: the thread of this replica.
      num_replicas: how many there are.
      weights: the examples of this replica among those of all, where they differ.
      numerics: looks at values that must be finite; None where that is not asked for.
    """

    def __init__(
        self,
        thread: Asking,
        num_replicas: int,
        *,
        weights: ExampleWeights | None,
        numerics: Numerics | None,
    ):
        self._thread = thread
        self._mine = Contribution(num_replicas, weights, numerics)

    def combine(
        self,
        value: Any,
        aggregation: str,
        names: Sequence[str] = (),
        *,
        in_parts: bool = False,
    ) -> Any:
        """Combine a tree: SUM, or MEAN weighted by the examples of each replica."""
        op, value = self._mine.weighted(ReduceOp.parse(aggregation), value, names)
        if self._mine.num_replicas == 1:
            return value
        return map_apart(
            value,
            lambda arrays: self._combine_arrays(op, arrays, aggregation),
            lambda slices: self._thread.add_rows(op, slices),
        )

    def _combine_arrays(self, op: ReduceOp, value: Any, aggregation: str) -> Any:
        leaves, treedef = jax.tree.flatten(value)
        shown = f"the combination ({aggregation}) of gradients or statistics"
        return jax.tree.unflatten(
            treedef, self._thread.ask(("all_reduce", op, None, "combine", treedef), shown, leaves)
        )

    def combine_with_feedback(
        self,
        value: Sequence[Any],
        residuals: Sequence[Any],
        aggregation: str,
        names: Sequence[str] = (),
    ) -> tuple[Sequence[Any], Sequence[Any]]:
        """Combine arrays as :meth:`combine` does, adding what earlier steps rounded off.

        Returns:
          The combined arrays, and what this step has rounded off on this replica.
        """
        op, value = self._mine.weighted(ReduceOp.parse(aggregation), value, names)
        shown = f"the combination ({aggregation}) of gradients with error feedback"
        return self._thread.ask(("feedback", op, len(value)), shown, (list(value), list(residuals)))

    def accumulate(
        self,
        variables: Sequence[Variable],
        value: Sequence[Any],
        aggregation: str | None,
        due: Any,
    ) -> list[Any]:
        """Add gradients to this replica's ``variables``; where ``due``, sum and clear these."""
        sums = self._mine.accumulated(variables, self._thread.own_value, value, aggregation)
        zeros = [jnp.zeros_like(x) for x in sums]
        totals, left = zeros, sums
        if due:
            kind = ("all_reduce", ReduceOp.SUM, None, "accumulated", *map(id, variables))
            totals, left = self._thread.ask(kind, "the sum of accumulated gradients", sums), zeros
        for variable, x in zip(variables, left, strict=True):
            self._thread.set_own(variable, x)
        return totals

    def average(self, value: Any, names: Sequence[str] = ()) -> Any:
        """Return the mean of a tree over the replicas, weighted by the examples of each."""
        return self.combine(value, "MEAN", names)

    def global_examples(self, local: int) -> int:
        """Return the examples of all replicas, of which this one has ``local``."""
        return self._mine.global_examples(local)

    @property
    def share_of_mean(self) -> float:
        """What a mean over the replicas multiplies this one's value by, weighted by examples."""
        return self._mine.share_of_mean
