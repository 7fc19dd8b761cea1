"""Metrics over all replicas."""

from distrib.metrics.accuracy import Accuracy
from distrib.metrics.auc import AUC
from distrib.metrics.confusion_counts import (
    ConfusionCounts,
    FalseNegatives,
    FalsePositives,
    TrueNegatives,
    TruePositives,
)
from distrib.metrics.mean import Mean, Sum
from distrib.metrics.metric import Metric
from distrib.metrics.precision import Precision
from distrib.metrics.recall import Recall

__all__ = [
    "AUC",
    "Accuracy",
    "ConfusionCounts",
    "FalseNegatives",
    "FalsePositives",
    "Mean",
    "Metric",
    "Precision",
    "Recall",
    "Sum",
    "TrueNegatives",
    "TruePositives",
]
