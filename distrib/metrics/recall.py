"""``Recall``: which part of the positive examples is found."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from distrib.metrics.confusion_counts import ConfusionCounts, ratio


class Recall(ConfusionCounts):
    """The part of the positive examples that are predicted as such; 0 if there are none.

    Args:
      thresholds: a prediction above it is a positive one; a number, or several.
      name: a name for messages.

    >>> import jax.numpy as jnp
    >>> recall = Recall()
    >>> recall.update_state(jnp.array([1, 0, 1]), jnp.array([0.9, 0.8, 0.2]))
    >>> print(recall.result())
    0.5
    """

    def __init__(self, thresholds: float | Sequence[float] = 0.5, name: str = "recall"):
        super().__init__(name, thresholds)

    def result(self) -> jax.Array:
        """Return true positives over all positive examples, of all replicas."""
        found = self.true_positives.value()
        return ratio(found, found + self.false_negatives.value())
