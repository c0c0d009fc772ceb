"""Metrics as a user gives them: by name, as functions, or as objects."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

from torch import nn

from spartito.engine.losses.loss import IGNORED, LossFunction
from spartito.errors import UserError
from spartito.names import nearest
from spartito.training.metrics.base import Metric
from spartito.training.metrics.classification import (
    AUC,
    AVERAGES,
    ConfusionMatrix,
    F1Score,
    Precision,
    Recall,
)
from spartito.training.metrics.foreign import TorchMetric, is_foreign
from spartito.training.metrics.mean import (
    MeanMetric,
    MetricFunction,
    Perplexity,
    accuracy,
    binary_accuracy,
    mean_absolute_error,
    mean_squared_error,
    top_k_accuracy,
)
from spartito.training.metrics.tensors import find

MetricLike: TypeAlias = Any
"""A name, a function ``(output, target)``, a `Metric`, or a metric of torchmetrics."""

GRADIENT_NORM = "gradient_norm"
"""The mean over the updates of an epoch: asked for as a metric, it is none of outputs."""

_MEANS: dict[str, MetricFunction] = {
    "accuracy": accuracy,
    "binary_accuracy": binary_accuracy,
    "mae": mean_absolute_error,
    "mean_absolute_error": mean_absolute_error,
    "mean_squared_error": mean_squared_error,
    "mse": mean_squared_error,
    "top_k_accuracy": top_k_accuracy,
}
_COUNTS: dict[str, Callable[..., Metric]] = {
    "f1": F1Score,
    "f1_score": F1Score,
    "precision": Precision,
    "recall": Recall,
}
_KERAS = {
    "acc": "accuracy",
    "categorical_accuracy": "accuracy",
    "sparse_categorical_accuracy": "accuracy",
    "sparse_top_k_categorical_accuracy": "top_5_accuracy",
    "top_k_categorical_accuracy": "top_5_accuracy",
}
"""What Keras calls metrics that have another name here."""
_OBJECTS: dict[str, Callable[[str], Metric]] = {
    "auc": AUC,
    "average_precision": partial(AUC, curve="PR"),
    "confusion_matrix": ConfusionMatrix,
    "perplexity": Perplexity,
    "pr_auc": partial(AUC, curve="PR"),
    "roc_auc": AUC,
    **_COUNTS,
    **{
        f"{name}_{average}": partial(kind, average=average)
        for name, kind in _COUNTS.items()
        for average in AVERAGES
    },
}


def make_metrics(
    given: MetricLike | Sequence[MetricLike], loss: LossFunction | None
) -> list[Metric]:
    """The metrics that a user gave, one or several.

    Names of means over examples: accuracy, binary_accuracy, top_k_accuracy (k = 5) or
    top_3_accuracy, mean_absolute_error (mae), mean_squared_error (mse). Of classifiers: auc
    (roc_auc), pr_auc (average_precision), precision, recall, f1, each also as precision_micro,
    _macro, _weighted or _binary, and confusion_matrix. "loss" is always there. "gradient_norm" is
    the trainer's own.

    Binary outputs count as logits, unless ``loss`` is ``nn.BCELoss``, which wants probabilities.
    Of a model that returns a dict or object they look at "output" or "logits", and of a batch
    that is one at "y" or "labels". Classes of the loss's ``ignore_index`` (-100) do not count.

    Raises:
        UserError: A name that is not known, or two metrics of one name.
    """
    if isinstance(given, str) or not isinstance(given, Sequence):
        given = [given]
    own = ("loss", GRADIENT_NORM)
    wanted = [metric for metric in given if not (isinstance(metric, str) and metric in own)]
    metrics = [made for metric in wanted for made in _made(metric, loss)]
    for metric in metrics:
        metric.adapt(loss)
    names = [metric.name for metric in metrics]
    twice = {name for name in names if names.count(name) > 1}
    if twice or "loss" in names:
        raise UserError(f"two metrics are named {twice or {'loss'}}", "Give each its own name.")
    return metrics


def _made(given: Any, loss: LossFunction | None) -> Iterator[Metric]:
    if isinstance(given, str):
        yield _named(given, loss)
    elif is_foreign(given, "MetricCollection"):
        for name, metric in given.items():
            yield TorchMetric(metric, name).fresh()
    elif is_foreign(given):
        yield TorchMetric(given).fresh()
    elif isinstance(given, Metric):
        yield given.fresh()
    elif isinstance(given, type):
        raise UserError(f"the metric {given.__name__} is a class", f"Give {given.__name__}().")
    elif callable(given):
        yield MeanMetric(getattr(given, "__name__", type(given).__name__), given)
    else:
        raise UserError(
            f"{given!r} is no metric",
            "Give a name, a function (output, target), an sp.metrics.Metric, or a metric of "
            "torchmetrics.",
        )


def _named(name: str, loss: LossFunction | None) -> Metric:
    if name in _OBJECTS:
        return _OBJECTS[name](name)
    threshold = 0.5 if isinstance(loss, nn.BCELoss) else 0.0
    ignored = getattr(loss, "ignore_index", IGNORED)
    if name in _KERAS:
        raise UserError(f"the metric {name!r} is called {_KERAS[name]!r} here", "Take that name.")
    top = re.fullmatch(r"top_?([1-9][0-9]*)(_accuracy)?", name)
    if not top and name not in _MEANS:
        raise UserError(
            f"unknown metric {name!r}", nearest(name, [*_MEANS, *_OBJECTS, "loss", GRADIENT_NORM])
        )
    function: MetricFunction = top_k_accuracy if top else _MEANS[name]
    if top:
        function = partial(top_k_accuracy, k=int(top[1]), ignored=ignored)
    elif function is accuracy:
        function = partial(function, threshold=threshold, ignored=ignored)
    elif function is binary_accuracy:
        function = partial(function, threshold=threshold)
    elif function is top_k_accuracy:
        function = partial(function, ignored=ignored)
    return MeanMetric(name, lambda output, target: function(*find(output, target)))
