"""Means over examples, and the functions that they are means of."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from math import fsum
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from spartito.accelerators import exact, wide
from spartito.data.reading.placing import known_to_host
from spartito.engine.devices.host_reads import Number, added, read
from spartito.engine.losses.loss import IGNORED, LossFunction, count_kept, describe, widened
from spartito.errors import UserError
from spartito.training.metrics.base import NAN, Metric, State
from spartito.training.metrics.tensors import find, fitting, misfit

MetricFunction = Callable[[Any, Any], Any]
"""``(output, target)`` to one value per example, shape ``(batch,)``, their scalar mean, or the
tuple ``(sum, count)`` where something else than examples is counted."""


class MeanMetric(Metric):
    """The mean of a function over all examples.

    Sum and count stay on the device of the outputs until somebody reads them.

    Args:
        name: Under which the figure stands in logs and history.
        function: ``(output, target)`` to one value per example, shape ``(batch,)`` or
            ``(batch, ...)``, to their scalar mean, or to the tuple ``(sum, count)`` where
            something else than examples is counted.
    """

    _sum: Number
    _count: Number

    def __init__(self, name: str, function: MetricFunction) -> None:
        self.function = function
        super().__init__(name)

    def update(self, output: Any, target: Any, size: int) -> None:
        found = self.function(widened(output), target)
        total, count = found if isinstance(found, tuple) else (self._total(found, size), size)
        self._sum, self._count = added(self._sum, total), added(self._count, count)

    def reset(self) -> None:
        self._sum = self._count = 0

    def compute(self) -> float:
        total, count = self.sums
        return total / count if count else NAN

    def state_dict(self) -> State:
        there = [part for part in (self._sum, self._count) if isinstance(part, Tensor)]
        if not there:
            return {"sums": torch.tensor([self._sum, self._count], dtype=torch.float64)}
        like = wide(there[0])  # where one is, the other goes too: nobody waits for it here
        both = (self._sum, self._count)
        return {"sums": torch.stack([_beside(like, part) for part in both])}

    def merge(self, states: Sequence[State]) -> None:
        pairs = [state["sums"].tolist() for state in states if state]
        self._sum = torch.tensor(fsum(total for total, _ in pairs), dtype=torch.float64)
        self._count = torch.tensor(fsum(count for _, count in pairs), dtype=torch.float64)

    @property
    def sums(self) -> list[float]:
        """The sum of values, and what to divide it by; this waits for the device."""
        return read([self._sum, self._count])

    def _total(self, found: Any, size: int) -> Any:
        try:
            value = torch.as_tensor(found)
        except (TypeError, ValueError, RuntimeError) as error:
            raise UserError(
                f"the metric {self.name} returned {describe(found)}",
                "It gives one value per example, their mean, or (sum, count).",
            ) from error
        if value.dim() == 0:
            return wide(value) * size
        if value.dtype == torch.bool and value.numel() == size:
            return value.count_nonzero()
        if value.shape[0] == size:
            return value.sum(dtype=exact(value)) * (size / value.numel())
        raise UserError(
            f"the metric {self.name} returned {describe(value)} for {size} examples",
            "It gives one value per example, or their mean.",
        )


class Perplexity(MeanMetric):
    """How many classes a model wavers between: the exponential of its mean cross-entropy.

    It is that of all tokens together, not a mean over batches: 1 is certain and right, and the
    number of classes is a guess. Outputs are logits with the classes in the last dim. Targets of
    the loss's ``ignore_index`` (-100) do not count.

    Args:
        name: Under which the figure stands in logs and history.
    """

    def __init__(self, name: str = "perplexity") -> None:
        self._ignored = IGNORED
        super().__init__(name, lambda output, target: self._surprise(*find(output, target)))

    def adapt(self, loss: LossFunction | None) -> None:
        self._ignored = getattr(loss, "ignore_index", IGNORED)

    def compute(self) -> float:
        """Compute the perplexity.

        Returns:
            A float: NaN before the first token, infinite where it is too large.
        """
        mean = super().compute()
        return math.inf if mean > LARGEST else math.exp(mean)

    def _surprise(self, output: Tensor, target: Tensor) -> tuple[Any, Any]:
        """The sum of the cross-entropies, and how many there are."""
        if output.shape[:-1] != target.shape:
            raise misfit(output, target)
        logits, labels = output.detach().flatten(0, -2), target.flatten()
        total = F.cross_entropy(logits, labels, ignore_index=self._ignored, reduction="sum")
        known = known_to_host(target)
        if known is not None:
            return total, count_kept(known, self._ignored)
        return total, torch.ne(labels.long(), self._ignored).count_nonzero()


LARGEST = 709.0
"""The exponential of more is no float."""


def _beside(like: Tensor, part: Number) -> Tensor:
    """``part`` as ``like`` is."""
    return part.to(like) if isinstance(part, Tensor) else torch.full_like(like, part)


def accuracy(output: Tensor, target: Tensor, threshold: float = 0.0, ignored: int = IGNORED) -> Any:
    """Where the class with the largest output is the target: (how many are right, of how many).

    Targets that are ``ignored`` do not count. Classes are in dim 1, or in the last one if only
    that fits. For outputs shaped as the target (or ``(batch, 1)``) it is `binary_accuracy`.
    """
    if output.dim() == target.dim() + 1 and output.shape[1] > 1:
        found = output.argmax(_classes_of(output, target))
        return _counted(torch.eq(found, target), target, ignored)
    if output.shape == target.shape and output.dim() > 1 and output.shape[1] > 1:
        return torch.eq(output.argmax(1), target.argmax(1))  # targets are probabilities of classes
    return binary_accuracy(output, target, threshold)


def _counted(right: Tensor, target: Tensor, ignored: int) -> tuple[Tensor | int, Tensor | int]:
    """How many are ``right`` of the targets that are not ``ignored``, and how many these are.

    They are numbers where nobody waits for them: of what lies in the host's memory, or came from
    there.
    """
    known = None if target.is_floating_point() else known_to_host(target)
    if known is not None:
        if ignored >= 0:  # else no output is right about them
            right = right & torch.ne(target, ignored)
        hits: Any = right.count_nonzero().tolist() if right.is_cpu else right.sum()
        return hits, count_kept(known, ignored)
    if ignored < 0 and not target.dtype.is_signed:  # -100 would become 156
        return right.count_nonzero(), target.numel()
    counted = torch.ne(target, ignored)
    if ignored >= 0:
        right = right & counted
    return right.count_nonzero(), counted.count_nonzero()


def binary_accuracy(output: Tensor, target: Tensor, threshold: float = 0.0) -> Tensor:
    """1 where the output lies on the target's side of ``threshold``, shape of the output."""
    return torch.eq(output > threshold, fitting(output, target) > 0.5)


def top_k_accuracy(output: Tensor, target: Tensor, k: int = 5, ignored: int = IGNORED) -> Any:
    """Where the target is among the ``k`` largest outputs; the tuple as `accuracy`."""
    if output.shape == target.shape and output.dim() > 1:
        target = target.argmax(1)  # it is probabilities of classes
    if output.dim() != target.dim() + 1:
        raise misfit(output, target)
    dim = _classes_of(output, target)
    if output.shape[dim] == 1:  # it is always among the best
        raise misfit(output, target)
    best = output.topk(min(k, output.shape[dim]), dim=dim).indices
    return _counted(torch.eq(best, target.unsqueeze(dim)).any(dim), target, ignored)


def _classes_of(output: Tensor, target: Tensor) -> int:
    """The dim of the classes: 1, or the last one if only that fits."""
    if output.shape[:1] + output.shape[2:] == target.shape:
        return 1
    if output.shape[:-1] == target.shape:
        return -1
    raise misfit(output, target)


def mean_absolute_error(output: Tensor, target: Tensor) -> Tensor:
    """|output - target|, shape of the output."""
    return torch.abs(output - fitting(output, target))


def mean_squared_error(output: Tensor, target: Tensor) -> Tensor:
    """(output - target) squared, shape of the output."""
    return torch.square(output - fitting(output, target))
