"""Metrics of torchmetrics, an optional package, merged by their own reductions."""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from spartito.engine.losses.loss import LossFunction
from spartito.errors import UserError
from spartito.training.metrics.base import NAN, Metric, State, Value, merged
from spartito.training.metrics.tensors import find

_EXAMPLES = "examples"
_KNOWN = {
    "dim_zero_sum": "sum",
    "dim_zero_mean": "mean",
    "dim_zero_max": "max",
    "dim_zero_min": "min",
    "dim_zero_cat": "cat",
}
_INDIVISIBLE = ("BootStrapper", "MetricTracker", "Running")


def is_foreign(given: Any, kind: str = "Metric") -> bool:
    """Whether ``given`` is a metric of torchmetrics, which is not imported for this."""
    package = sys.modules.get("torchmetrics")
    return package is not None and isinstance(given, getattr(package, kind))


class TorchMetric(Metric):
    """A metric of torchmetrics, exact over replicas under every strategy.

    Its states are merged as it declares: sums, maxima and minima as such, rows concatenated,
    means weighted by the examples behind them. It is never synchronized by torchmetrics itself.

    Args:
        metric: Any ``torchmetrics.Metric``; a fresh copy is used.
        name: Under which the figure stands; its class in snake case ("multiclass_accuracy").
        inputs: ``(output, target)`` to the arguments of its ``update``. By default the
            prediction and the labels, where the logits of ``Binary...``, ``Multilabel...`` and
            ``Multiclass...`` metrics are made probabilities: torchmetrics itself would guess
            from the values of each batch whether they are logits.

    Raises:
        UserError: Its state has a reduction of its own, or depends on the order of batches.
    """

    def __init__(
        self,
        metric: Any,
        name: str | None = None,
        inputs: Callable[[Any, Any], Sequence[Any]] | None = None,
    ) -> None:
        self.metric, self.inputs = metric, inputs
        self._logits = True
        kind = type(metric).__name__
        self._check(kind)
        self.costly = any(isinstance(owner._defaults[n], list) for _, owner, n, _ in self._states())
        super().__init__(name or re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", kind).lower())

    def adapt(self, loss: LossFunction | None) -> None:
        self._logits = not isinstance(loss, nn.BCELoss)

    def reset(self) -> None:
        self._examples = 0
        self.metric.reset()

    def update(self, output: Any, target: Any, size: int) -> None:
        given = self._inputs(output, target) if self.inputs is None else self.inputs(output, target)
        where = next((part.device for part in given if isinstance(part, Tensor)), None)
        if where is not None and self.metric.device != where:
            self.metric.to(where)
        self.metric.update(*given)
        self._examples += size

    def compute(self) -> Value:
        return self.metric.compute() if self._examples else NAN

    def state_dict(self) -> State:
        state: State = {_EXAMPLES: torch.tensor(self._examples)}
        for key, owner, name, reduction in self._states():
            value = getattr(owner, name)
            if isinstance(value, Tensor) and value.dim() == _dims(owner, name, reduction):
                value = value[None]
            state[key] = value
        return state

    def merge(self, states: Sequence[State]) -> None:
        self.reset()
        states = [state for state in states if state and state[_EXAMPLES] > 0]
        if not states:
            return
        examples = [int(state[_EXAMPLES]) for state in states]
        self._examples = sum(examples)
        self.metric.to(torch.device("cpu"))
        for key, owner, name, reduction in self._states():
            parts = [state[key] for state in states]
            setattr(owner, name, _reduced(parts, reduction, examples, owner._defaults[name]))
        for _, owner in self._owners():
            owner._update_count, owner._computed = max(1, len(states)), None

    def fresh(self) -> Self:
        made = copy.copy(self)
        made.metric = self.metric.clone()
        made.reset()
        return made

    def _owners(self) -> Iterator[tuple[str, Any]]:
        """The metric and those inside of it, by their path."""
        for path, module in self.metric.named_modules():
            if is_foreign(module):
                yield path, module

    def _states(self) -> Iterator[tuple[str, Any, str, str]]:
        """The states of all of them: (key, owner, name, reduction)."""
        for path, owner in self._owners():
            for name, function in owner._reductions.items():
                yield f"{path}.{name}", owner, name, _reduction(function)

    def _check(self, kind: str) -> None:
        for _, owner in self._owners():
            if type(owner).__name__ in _INDIVISIBLE:
                raise UserError(
                    f"{type(owner).__name__} of torchmetrics depends on the order of batches, "
                    "which no replica sees as a whole",
                    "Give the metric inside of it.",
                )
            owner.sync_on_compute = owner._to_sync = False
        for _, _, name, reduction in self._states():
            if reduction not in {*_KNOWN.values(), "none"}:
                raise UserError(
                    f"the state {name!r} of {kind} is reduced by a function of its own",
                    "Known are sum, mean, max, min, cat and None; or write an sp.metrics.Metric.",
                )

    def _inputs(self, output: Any, target: Any) -> tuple[Tensor, Tensor]:
        scores, labels = find(output, target)
        kind = type(self.metric).__name__
        if self._logits and scores.is_floating_point():
            if kind.startswith(("Binary", "Multilabel")):
                scores = scores.sigmoid()
            elif kind.startswith("Multiclass") and scores.dim() == labels.dim() + 1:
                scores = scores.softmax(1)
        if kind.startswith("Binary") and scores.numel() == labels.numel():
            scores = scores.reshape(labels.shape)
        return scores, labels


def _reduction(function: Any) -> str:
    if function is None:
        return "none"
    return _KNOWN.get(getattr(function, "__name__", ""), "own")


def _dims(owner: Any, name: str, reduction: str) -> int | None:
    """How many dims a state has that is kept beside those of the others, until it is."""
    default = owner._defaults[name]
    return default.dim() if reduction == "none" and isinstance(default, Tensor) else None


def _reduced(parts: Sequence[Any], reduction: str, examples: Sequence[int], default: Any) -> Any:
    """The state of all of ``parts``, as torchmetrics reduces it."""
    if isinstance(default, list):
        lists = [part if isinstance(part, list) else [part] for part in parts]
        return [tensor for part in lists for tensor in part]
    if reduction in ("cat", "none"):
        rows = torch.cat([torch.atleast_1d(part) for part in parts])
        return rows[0] if reduction == "none" and len(rows) == 1 else rows
    if reduction == "mean":
        weighed = [part * count for part, count in zip(parts, examples, strict=True)]
        return merged(weighed, "sum") / sum(examples)
    whole = merged(parts, reduction)
    return whole - default.cpu() * (len(parts) - 1) if reduction == "sum" else whole
