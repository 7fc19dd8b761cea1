"""What one replica brings to a combination over the replicas, by its examples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax

from distrib.engines.numerics import Numerics
from distrib.engines.weights import ExampleWeights, part_of_sum
from distrib.reduce_op import ReduceOp
from distrib.values import IndexedSlices
from distrib.variables import Variable


class OwnCopies(Protocol):
    """What a combination needs of variables and rows."""

    def own_value(self, variable: Variable) -> jax.Array:
        """Return what this replica's copy of ``variable`` holds now."""
        ...

    def set_own(self, variable: Variable, value: jax.Array) -> None:
        """Change this replica's copy of ``variable`` alone."""
        ...

    def add_rows(self, op: ReduceOp, slices: IndexedSlices) -> IndexedSlices:
        """Reduce rows over the replicas."""
        ...


class Contribution:
    """What a replica brings where each counts for its examples; the same for both engines.

    Args:
      num_replicas: how many replicas there are.
      weights: the examples of this one, where they differ; None where all have equally many.
      numerics: looks at values that must be finite; None where that is not asked for.
    """

    def __init__(
        self, num_replicas: int, weights: ExampleWeights | None, numerics: Numerics | None
    ):
        self.num_replicas = num_replicas
        self.weights = weights
        self._numerics = numerics

    def global_examples(self, local: int) -> int:
        """Return the examples of all replicas, of which this one has ``local``."""
        return local * self.num_replicas if self.weights is None else self.weights.total

    @property
    def share_of_mean(self) -> float:
        """What a mean over the replicas multiplies this one's value by, weighted by examples."""
        return 1 / self.num_replicas if self.weights is None else self.weights.share

    def checked(self, what: str, value: Any, names: Sequence[str] = ()) -> None:
        """Look at what is brought, if numbers are checked."""
        if self._numerics is not None:
            self._numerics.combined(what, value, names)

    def weighted(self, op: ReduceOp, value: Any, names: Sequence[str] = ()) -> tuple[ReduceOp, Any]:
        """Return how, and what of, a tree is to be reduced so that ``op`` counts examples."""
        self.checked(f"what is combined ({op.name})", value, names)
        if self.weights is None or self.num_replicas == 1:
            return op, value
        return ReduceOp.SUM, self.weights.applied(value, mean=op is ReduceOp.MEAN)

    def accumulated(
        self,
        variables: Sequence[Variable],
        own_value: Callable[[Variable], jax.Array],
        value: Sequence[Any],
        aggregation: str | None,
    ) -> list[jax.Array]:
        """Return the new values of accumulators, whose sum combines what all have accumulated."""
        self.checked("what is accumulated", value)
        parts = part_of_sum(value, aggregation, self.weights, self.num_replicas)
        return [v.fitted(own_value(v) + x) for v, x in zip(variables, parts, strict=True)]
