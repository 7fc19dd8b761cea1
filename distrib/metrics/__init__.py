"""Metrics over all replicas."""

from distrib.metrics.accuracy import Accuracy
from distrib.metrics.mean import Mean, Sum
from distrib.metrics.metric import Metric

__all__ = ["Accuracy", "Mean", "Metric", "Sum"]
