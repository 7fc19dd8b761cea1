"""How often predictions of two classes are right and wrong, and in which way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from distrib.metrics.metric import Metric, weighted


class ConfusionCounts(Metric):
    """The true and false positives and negatives of predictions against thresholds.

    All further metrics of two classes are made of these four sums over all replicas, never of
    results of replicas: the F1 score, for one, is ``2 tp / (2 tp + fp + fn)``.

    Args:
      name: a name for messages.
      thresholds: a prediction above it is a positive one; a number, or several, each of which
        counts for itself.

    Raises:
      ValueError: if a threshold is not in [0, 1].

    >>> counts = ConfusionCounts()
    >>> counts.update_state(jnp.array([1, 0, 1, 0]), jnp.array([0.9, 0.8, 0.2, 0.1]))
    >>> {name: int(count) for name, count in counts.result().items()}
    {'true_positives': 1, 'false_positives': 1, 'true_negatives': 1, 'false_negatives': 1}
    """

    def __init__(self, name: str = "confusion_counts", thresholds: float | Sequence[float] = 0.5):
        super().__init__(name)
        several = isinstance(thresholds, Sequence)
        values = tuple(float(t) for t in (thresholds if several else (thresholds,)))  # pyright: ignore[reportArgumentType]
        if not values or not all(0 <= t <= 1 for t in values):
            raise ValueError(
                f"{type(self).__name__} got thresholds {thresholds!r}; each must be a number from "
                "0 to 1, as the predictions are."
            )
        self._thresholds = values
        shape = (len(values),) if several else ()
        self.true_positives = self.add_state("true_positives", shape)
        self.false_positives = self.add_state("false_positives", shape)
        self.true_negatives = self.add_state("true_negatives", shape)
        self.false_negatives = self.add_state("false_negatives", shape)

    def update_state(self, labels: Any, predictions: Any, sample_weight: Any = None) -> None:
        """Add a batch.

        Args:
          labels: 0 or 1, or booleans, ``[batch, ...]``.
          predictions: probabilities of class 1, from 0 to 1, of the shape of the labels. Another
            number, a logit for one, makes the counts NaN that it would be in.
          sample_weight: broadcasts against the labels from the first axis, or None.

        Raises:
          ValueError: if the shapes differ.
        """
        labels, predictions = jnp.asarray(labels), jnp.asarray(predictions)
        if labels.shape != predictions.shape:
            raise ValueError(
                f"{type(self).__name__} got labels of shape {labels.shape} and predictions of "
                f"shape {predictions.shape}: they must have one shape. Of scores [batch, 2] pass "
                "the probability of class 1, of others take one class at a time."
            )
        _, weights = weighted(labels, sample_weight)
        positive = labels.astype(bool).reshape(1, -1)
        scores = predictions.astype(jnp.float32).reshape(1, -1)
        weights = weights.reshape(1, -1)
        # Logits given for probabilities: a count of them would pass for a result.
        is_probability = (scores >= 0) & (scores <= 1)
        weights = jnp.where(is_probability | (weights == 0), weights, jnp.nan)
        thresholds = jnp.asarray(self._thresholds, jnp.float32)
        above = scores > thresholds[:, None]
        for state, which in (
            (self.true_positives, above & positive),
            (self.false_positives, above & ~positive),
            (self.true_negatives, ~above & ~positive),
            (self.false_negatives, ~above & positive),
        ):
            state.assign_add(jnp.where(which, weights, 0.0).sum(1).reshape(state.shape))

    def result(self) -> Any:
        """Return the four counts over all replicas, by name, each of the shape of thresholds."""
        return {
            "true_positives": self.true_positives.value(),
            "false_positives": self.false_positives.value(),
            "true_negatives": self.true_negatives.value(),
            "false_negatives": self.false_negatives.value(),
        }


class TruePositives(ConfusionCounts):
    """How many of the positive predictions are right; see :class:`ConfusionCounts`."""

    def __init__(self, thresholds: float | Sequence[float] = 0.5, name: str = "true_positives"):
        super().__init__(name, thresholds)

    def result(self) -> jax.Array:
        """Return the count over all replicas."""
        return self.true_positives.value()


class FalsePositives(ConfusionCounts):
    """How many of the positive predictions are wrong; see :class:`ConfusionCounts`."""

    def __init__(self, thresholds: float | Sequence[float] = 0.5, name: str = "false_positives"):
        super().__init__(name, thresholds)

    def result(self) -> jax.Array:
        """Return the count over all replicas."""
        return self.false_positives.value()


class TrueNegatives(ConfusionCounts):
    """How many of the negative predictions are right; see :class:`ConfusionCounts`."""

    def __init__(self, thresholds: float | Sequence[float] = 0.5, name: str = "true_negatives"):
        super().__init__(name, thresholds)

    def result(self) -> jax.Array:
        """Return the count over all replicas."""
        return self.true_negatives.value()


class FalseNegatives(ConfusionCounts):
    """How many of the negative predictions are wrong; see :class:`ConfusionCounts`."""

    def __init__(self, thresholds: float | Sequence[float] = 0.5, name: str = "false_negatives"):
        super().__init__(name, thresholds)

    def result(self) -> jax.Array:
        """Return the count over all replicas."""
        return self.false_negatives.value()


def ratio(part: jax.Array, whole: jax.Array) -> jax.Array:
    """Return ``part / whole``, and 0 where ``whole`` is 0, as in Keras."""
    return jnp.where(whole == 0, 0.0, part / jnp.where(whole == 0, 1.0, whole))
