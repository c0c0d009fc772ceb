"""Figures beside the loss: means over examples, exact over replicas and uneven batches."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from spartito.engine.loss import LossFunction, align, describe
from spartito.errors import UserError
from spartito.names import nearest

MetricFunction = Callable[[Any, Any], Tensor]
"""``(output, target)`` to one value per example, shape ``(batch,)``, or their scalar mean."""


@dataclass
class MeanMetric:
    """A mean over examples: this replica's sum of values, and how many there were."""

    name: str
    function: MetricFunction
    total: float = field(default=0.0, init=False)
    count: float = field(default=0.0, init=False)

    def update(self, output: Any, target: Any, size: int) -> None:
        """Take in the ``size`` examples of a local batch."""
        if isinstance(output, Tensor) and output.dtype in (torch.bfloat16, torch.float16):
            output = output.float()  # as the loss does: targets would be rounded to 3 digits
        value = torch.as_tensor(self.function(output, target))
        if value.dim() == 0:
            self.total += value.item() * size
        elif value.dtype == torch.bool and value.numel() == size:
            self.total += int(value.count_nonzero())
        elif value.shape[0] == size:
            self.total += value.sum(dtype=torch.float64).item() * size / value.numel()
        else:
            raise UserError(
                f"the metric {self.name} answered {describe(value)} for {size} examples",
                "It gives one value per example, or their mean.",
            )
        self.count += size

    def reset(self) -> None:
        """Start again."""
        self.total = self.count = 0.0

    @property
    def value(self) -> float:
        """The mean over this replica's examples so far; NaN before the first."""
        return self.total / self.count if self.count else float("nan")


def make_metrics(
    given: Sequence[str | MetricFunction], loss: LossFunction | None
) -> list[MeanMetric]:
    """Metrics by name or function.

    Names: accuracy, binary_accuracy, top_k_accuracy (k = 5) or top_3_accuracy,
    mean_absolute_error (mae), mean_squared_error (mse). "loss" is always there.
    Binary outputs count as logits, unless ``loss`` is ``nn.BCELoss``, which wants probabilities.
    """
    threshold = 0.5 if isinstance(loss, nn.BCELoss) else 0.0
    metrics = [
        _named(metric, threshold)
        if isinstance(metric, str)
        else MeanMetric(getattr(metric, "__name__", type(metric).__name__), metric)
        for metric in given
        if metric != "loss"
    ]
    names = [metric.name for metric in metrics]
    twice = {name for name in names if names.count(name) > 1}
    if twice or "loss" in names:
        raise UserError(f"two metrics are named {twice or {'loss'}}", "Give each its own name.")
    return metrics


def accuracy(output: Tensor, target: Tensor, threshold: float = 0.0) -> Tensor:
    """1 where the class with the largest output is the target, shape ``(batch, ...)``.

    For outputs shaped as the target (or ``(batch, 1)``) it is `binary_accuracy`.
    """
    if output.dim() == target.dim() + 1 and output.shape[1] > 1:
        return torch.eq(output.argmax(1), target)
    if output.shape == target.shape and output.dim() > 1 and output.shape[1] > 1:
        return torch.eq(output.argmax(1), target.argmax(1))  # targets are probabilities of classes
    return binary_accuracy(output, target, threshold)


def binary_accuracy(output: Tensor, target: Tensor, threshold: float = 0.0) -> Tensor:
    """1 where the output lies on the target's side of ``threshold``, shape of the output."""
    return torch.eq(output > threshold, _fitting(output, target) > 0.5)


def top_k_accuracy(output: Tensor, target: Tensor, k: int = 5) -> Tensor:
    """1 where the target is among the ``k`` largest outputs, shape ``(batch,)``."""
    best = output.topk(min(k, output.shape[1]), dim=1).indices
    return torch.eq(best, target.unsqueeze(1)).any(1)


def mean_absolute_error(output: Tensor, target: Tensor) -> Tensor:
    """|output - target|, shape of the output."""
    return torch.abs(output - _fitting(output, target))


def mean_squared_error(output: Tensor, target: Tensor) -> Tensor:
    """(output - target) squared, shape of the output."""
    return torch.square(output - _fitting(output, target))


def _fitting(output: Tensor, target: Tensor) -> Tensor:
    """``target`` in the shape of ``output``; broadcasting would compare all with all."""
    aligned: Tensor = align(output, target)
    if aligned.shape != output.shape:
        raise UserError(
            f"a metric does not fit an output of {describe(output)} "
            f"and a target of {describe(target)}",
            "Both have one value per example, or the output one per class.",
        )
    return aligned


_NAMES: dict[str, MetricFunction] = {
    "accuracy": accuracy,
    "binary_accuracy": binary_accuracy,
    "mae": mean_absolute_error,
    "mean_absolute_error": mean_absolute_error,
    "mean_squared_error": mean_squared_error,
    "mse": mean_squared_error,
    "top_k_accuracy": top_k_accuracy,
}


def _named(name: str, threshold: float) -> MeanMetric:
    top = re.fullmatch(r"top_?([1-9][0-9]*)(_accuracy)?", name)
    if top:
        return MeanMetric(name, partial(top_k_accuracy, k=int(top[1])))
    if name not in _NAMES:
        raise UserError(f"unknown metric {name!r}", nearest(name, [*_NAMES, "loss"]))
    function = _NAMES[name]
    if function in (accuracy, binary_accuracy):
        function = partial(function, threshold=threshold)
    return MeanMetric(name, function)
