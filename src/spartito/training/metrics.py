"""Figures beside the loss: means over examples, exact over replicas and uneven batches."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from spartito.engine.loss import IGNORED, LossFunction, align, describe
from spartito.errors import UserError
from spartito.names import nearest

MetricFunction = Callable[[Any, Any], Any]
"""``(output, target)`` to one value per example, shape ``(batch,)``, their scalar mean, or the
tuple ``(sum, count)`` where something else than examples is counted."""


class MeanMetric:
    """A mean over examples: this replica's sum of values, and how many there were.

    Both stay on the device of the outputs until somebody reads them.
    """

    _sum: Tensor | int
    _count: Tensor | int

    def __init__(self, name: str, function: MetricFunction) -> None:
        self.name, self.function = name, function
        self.reset()

    def update(self, output: Any, target: Any, size: int) -> None:
        """Add the ``size`` examples of a local batch."""
        if isinstance(output, Tensor) and output.dtype in (torch.bfloat16, torch.float16):
            output = output.float()  # as the loss does: targets would be rounded to 3 digits
        found = self.function(output, target)
        total, count = found if isinstance(found, tuple) else (self._total(found, size), size)
        self._sum = self._sum + _wide(total)
        self._count = self._count + _wide(count)

    def reset(self) -> None:
        """Start again."""
        self._sum = self._count = 0

    @property
    def sums(self) -> list[float]:
        """The sum of values, and what to divide it by; this waits for the device."""
        return [float(self._sum), float(self._count)]

    @property
    def value(self) -> float:
        """The mean over this replica's examples so far; NaN before the first."""
        total, count = self.sums
        return total / count if count else float("nan")

    def _total(self, found: Any, size: int) -> Any:
        value = torch.as_tensor(found)
        if value.dim() == 0:
            return value.double() * size
        if value.dtype == torch.bool and value.numel() == size:
            return value.count_nonzero()
        if value.shape[0] == size:
            return value.sum(dtype=torch.float64) * (size / value.numel())
        raise UserError(
            f"the metric {self.name} returned {describe(value)} for {size} examples",
            "It gives one value per example, or their mean.",
        )


def _wide(value: Any) -> Tensor | int:
    """``value`` in a type that adds up without loss."""
    if isinstance(value, int):
        return value
    if not isinstance(value, Tensor):
        return torch.tensor(value, dtype=torch.float64)
    return value.double() if value.is_floating_point() else value.long()


def make_metrics(
    given: str | MetricFunction | Sequence[str | MetricFunction], loss: LossFunction | None
) -> list[MeanMetric]:
    """Metrics by name or function, one or several.

    Names: accuracy, binary_accuracy, top_k_accuracy (k = 5) or top_3_accuracy,
    mean_absolute_error (mae), mean_squared_error (mse). "loss" is always there.
    Binary outputs count as logits, unless ``loss`` is ``nn.BCELoss``, which wants probabilities.
    Of a model that answers a dict or object they look at "output" or "logits", and of a batch
    that is one at "y" or "labels". Classes of the loss's ``ignore_index`` (-100) do not count.
    """
    if isinstance(given, str) or not isinstance(given, Sequence):
        given = [given]
    metrics = [
        _named(metric, loss)
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


def accuracy(output: Tensor, target: Tensor, threshold: float = 0.0, ignored: int = IGNORED) -> Any:
    """Where the class with the largest output is the target: (how many are right, of how many).

    Targets that are ``ignored`` do not count. Classes are in dim 1, or in the last one if only
    that fits. For outputs shaped as the target (or ``(batch, 1)``) it is `binary_accuracy`.
    """
    if output.dim() == target.dim() + 1 and output.shape[1] > 1:
        found = output.argmax(1 if output.shape[2:] == target.shape[1:] else -1)
        if found.shape != target.shape:
            raise _misfit(output, target)
        return _counted(torch.eq(found, target), target, ignored)
    if output.shape == target.shape and output.dim() > 1 and output.shape[1] > 1:
        return torch.eq(output.argmax(1), target.argmax(1))  # targets are probabilities of classes
    return binary_accuracy(output, target, threshold)


def _counted(right: Tensor, target: Tensor, ignored: int) -> tuple[Tensor, Tensor | int]:
    """How many are ``right`` of the targets that are not ``ignored``, and how many these are."""
    if ignored < 0 and not target.dtype.is_signed:  # -100 would become 156
        return right.count_nonzero(), target.numel()
    counted = torch.ne(target, ignored)
    if ignored >= 0:  # else no output is right about them
        right = right & counted
    return right.count_nonzero(), counted.count_nonzero()


def binary_accuracy(output: Tensor, target: Tensor, threshold: float = 0.0) -> Tensor:
    """1 where the output lies on the target's side of ``threshold``, shape of the output."""
    return torch.eq(output > threshold, _fitting(output, target) > 0.5)


def top_k_accuracy(output: Tensor, target: Tensor, k: int = 5, ignored: int = IGNORED) -> Any:
    """Where the target is among the ``k`` largest outputs; the tuple as `accuracy`."""
    best = output.topk(min(k, output.shape[1]), dim=1).indices
    return _counted(torch.eq(best, target.unsqueeze(1)).any(1), target, ignored)


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
        raise _misfit(output, target)
    return aligned


def _misfit(output: Any, target: Any) -> UserError:
    return UserError(
        f"a metric does not fit an output of {describe(output)} and a target of {describe(target)}",
        "Both have one value per example, or the output one per class. Of anything else give a "
        "function (output, target).",
    )


def _on_tensors(function: MetricFunction, output: Any, target: Any) -> Any:
    """``function`` of the prediction and the labels, wherever these are."""
    prediction = _pick(output, ("output", "logits"), ("loss", "num_items"))
    labels = _pick(target, ("y", "labels", "label"), ())
    if prediction is None or labels is None or not prediction.dim():
        raise _misfit(output, target)
    if not isinstance(output, Tensor) and prediction.shape[:-1] == labels.shape != (len(labels),):
        prediction = prediction.movedim(-1, 1)  # as in transformers: classes come last
    if prediction.dtype in (torch.bfloat16, torch.float16):
        prediction = prediction.float()
    return function(prediction, labels)


def _pick(value: Any, names: Sequence[str], others: Sequence[str]) -> Tensor | None:
    """The tensor under one of ``names``; else the only one that is none of ``others``."""
    if isinstance(value, Tensor):
        return value
    parts = value if isinstance(value, Mapping) else getattr(value, "__dict__", {})
    tensors = {name: part for name, part in parts.items() if isinstance(part, Tensor)}
    for name in names:
        if name in tensors:
            return tensors[name]
    left = [part for name, part in tensors.items() if name not in others]
    return left[0] if len(left) == 1 else None


_NAMES: dict[str, MetricFunction] = {
    "accuracy": accuracy,
    "binary_accuracy": binary_accuracy,
    "mae": mean_absolute_error,
    "mean_absolute_error": mean_absolute_error,
    "mean_squared_error": mean_squared_error,
    "mse": mean_squared_error,
    "top_k_accuracy": top_k_accuracy,
}


def _named(name: str, loss: LossFunction | None) -> MeanMetric:
    threshold = 0.5 if isinstance(loss, nn.BCELoss) else 0.0
    ignored = getattr(loss, "ignore_index", IGNORED)
    top = re.fullmatch(r"top_?([1-9][0-9]*)(_accuracy)?", name)
    if not top and name not in _NAMES:
        raise UserError(f"unknown metric {name!r}", nearest(name, [*_NAMES, "loss"]))
    function: MetricFunction = top_k_accuracy if top else _NAMES[name]
    if top:
        function = partial(top_k_accuracy, k=int(top[1]), ignored=ignored)
    elif function is accuracy:
        function = partial(function, threshold=threshold, ignored=ignored)
    elif function is binary_accuracy:
        function = partial(function, threshold=threshold)
    elif function is top_k_accuracy:
        function = partial(function, ignored=ignored)
    return MeanMetric(name, partial(_on_tensors, function))
