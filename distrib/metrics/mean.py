"""``Mean`` and ``Sum``."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from distrib.metrics.metric import Metric, weighted


class Sum(Metric):
    """The weighted sum of all values.

    >>> total = Sum()
    >>> total.update_state(jnp.array([1.0, 2.0]))
    >>> print(total.result())
    3.0
    """

    def __init__(self, name: str = "sum"):
        super().__init__(name)
        self.total = self.add_state("total")

    def update_state(self, values: Any, sample_weight: Any = None) -> None:
        """Add values ``[batch, ...]``, each times its weight."""
        products, _ = weighted(values, sample_weight)
        self.total.assign_add(products.sum())

    def result(self) -> jax.Array:
        """Return the sum over all replicas."""
        return self.total.value()


class Mean(Metric):
    """The weighted mean of all values; 0 before there are any.

    >>> mean = Mean()
    >>> mean.update_state(jnp.array([1.0, 3.0]), sample_weight=jnp.array([3.0, 1.0]))
    >>> print(mean.result())
    1.5
    """

    def __init__(self, name: str = "mean"):
        super().__init__(name)
        self.total = self.add_state("total")
        self.count = self.add_state("count")

    def update_state(self, values: Any, sample_weight: Any = None) -> None:
        """Add values ``[batch, ...]``, each times its weight."""
        products, weights = weighted(values, sample_weight)
        self.total.assign_add(products.sum())
        self.count.assign_add(weights.sum())

    def result(self) -> jax.Array:
        """Return the sum of the products over the sum of the weights, over all replicas."""
        count = self.count.value()
        return jnp.where(count == 0, 0.0, self.total.value() / jnp.where(count == 0, 1.0, count))
