"""``Accuracy``: how often a prediction is the label."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from distrib.metrics.mean import Mean


class Accuracy(Mean):
    """The part of the predictions that are right.

    >>> accuracy = Accuracy()
    >>> accuracy.update_state(jnp.array([1, 0]), jnp.array([[0.1, 0.9], [0.2, 0.8]]))
    >>> print(accuracy.result())
    0.5
    """

    def __init__(self, name: str = "accuracy"):
        super().__init__(name)

    def update_state(self, labels: Any, predictions: Any, sample_weight: Any = None) -> None:
        """Add a batch.

        Args:
          labels: classes ``[batch]`` as integers.
          predictions: scores ``[batch, classes]``, of which the largest counts, or classes
            ``[batch]``.
          sample_weight: ``[batch]``, or None.

        Raises:
          ValueError: if the shapes do not belong together.
        """
        labels, predictions = jnp.asarray(labels), jnp.asarray(predictions)
        scores = predictions.ndim == labels.ndim + 1 and predictions.shape[-1] > 1
        if scores:
            predictions = predictions.argmax(-1)
        classes = jnp.issubdtype(predictions.dtype, jnp.integer) or predictions.dtype == bool
        if predictions.shape != labels.shape or not classes:
            raise ValueError(
                f"Accuracy got labels of shape {labels.shape} and predictions of shape "
                f"{predictions.shape} and dtype {predictions.dtype}. Predictions are scores "
                "[batch, classes] of at least two classes, or classes [batch] as integers; labels "
                "are classes [batch], not one-hot: take argmax(-1), or compare with a threshold."
            )
        super().update_state(predictions == labels, sample_weight)
