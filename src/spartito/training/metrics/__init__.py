"""Figures beside the loss, exact over replicas and uneven batches."""

from spartito.training.metrics.base import Metric
from spartito.training.metrics.classification import (
    AUC,
    ConfusionMatrix,
    F1Score,
    Precision,
    Recall,
)
from spartito.training.metrics.foreign import TorchMetric
from spartito.training.metrics.mean import MeanMetric, Perplexity

__all__ = [
    "AUC",
    "ConfusionMatrix",
    "F1Score",
    "MeanMetric",
    "Metric",
    "Perplexity",
    "Precision",
    "Recall",
    "TorchMetric",
]


def __dir__() -> list[str]:
    return __all__  # the TAB key shows the API alone
