"""``AUC``: the area under the curve of a classifier of two classes."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

from distrib.metrics.confusion_counts import ConfusionCounts, ratio


class AUC(ConfusionCounts):
    """The area under the ROC or the precision-recall curve, from counts at many thresholds.

    It is Keras's approximation, ``interpolation`` between the points: of the precision-recall
    curve as Davis and Goadrich, "The Relationship Between Precision-Recall and ROC Curves", 2006.

    Args:
      num_thresholds: how many thresholds from 0 to 1; at least 2. The more, the closer.
      curve: ``"ROC"`` or ``"PR"``.
      name: a name for messages.

    Raises:
      ValueError: if one of them has no such value.

    >>> auc = AUC(num_thresholds=3)
    >>> auc.update_state(jnp.array([0, 0, 1, 1]), jnp.array([0.0, 0.5, 0.3, 0.9]))
    >>> print(auc.result())
    0.75
    """

    def __init__(
        self,
        num_thresholds: int = 200,
        curve: Literal["ROC", "PR"] = "ROC",
        name: str = "auc",
    ):
        if num_thresholds < 2:
            raise ValueError(f"AUC got num_thresholds {num_thresholds!r}; it must be at least 2.")
        if curve not in ("ROC", "PR"):
            raise ValueError(f'AUC got curve {curve!r}; it must be "ROC" or "PR".')
        super().__init__(name, tuple(i / (num_thresholds - 1) for i in range(num_thresholds)))
        # The first lies below all predictions, 0 included, and the last is above them all, 1
        # included.
        self._thresholds = (-1e-7, *self._thresholds[1:-1], 1 + 1e-7)
        self._curve = curve

    def result(self) -> jax.Array:
        """Return the area over the examples of all replicas."""
        tp, fp = self.true_positives.value(), self.false_positives.value()
        positives = tp + self.false_negatives.value()
        if self._curve == "ROC":
            x = ratio(fp, fp + self.true_negatives.value())
            y = ratio(tp, positives)
            return ((x[:-1] - x[1:]) * (y[:-1] + y[1:]) / 2).sum()
        predicted = tp + fp
        found = tp[:-1] - tp[1:]
        slope = ratio(found, predicted[:-1] - predicted[1:])
        intercept = tp[1:] - slope * predicted[1:]
        both = (predicted[:-1] > 0) & (predicted[1:] > 0)
        growth = jnp.where(both, ratio(predicted[:-1], predicted[1:]), 1.0)
        return ratio(slope * (found + intercept * jnp.log(growth)), positives[1:]).sum()
