"""``Precision``: which part of the positive predictions is right."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from distrib.metrics.confusion_counts import ConfusionCounts, ratio


class Precision(ConfusionCounts):
    """The part of the positive predictions that are right; 0 if there are none.

    Args:
      thresholds: a prediction above it is a positive one; a number, or several.
      name: a name for messages.

    >>> import jax.numpy as jnp
    >>> precision = Precision()
    >>> precision.update_state(jnp.array([1, 0, 1]), jnp.array([0.9, 0.8, 0.2]))
    >>> print(precision.result())
    0.5
    """

    def __init__(self, thresholds: float | Sequence[float] = 0.5, name: str = "precision"):
        super().__init__(name, thresholds)

    def result(self) -> jax.Array:
        """Return true positives over all positive predictions, of all replicas."""
        right = self.true_positives.value()
        return ratio(right, right + self.false_positives.value())
