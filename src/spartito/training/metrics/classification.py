"""Metrics of classifiers that are no means over examples: counts per class, and ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from spartito.accelerators import wide
from spartito.engine.losses.loss import IGNORED, LossFunction
from spartito.errors import UserError
from spartito.names import nearest
from spartito.training.metrics.base import NAN, Metric, State, Value
from spartito.training.metrics.tensors import find, fitting, misfit

AVERAGES = ("binary", "macro", "micro", "weighted")
AUTO = "auto"
CURVES = ("PR", "ROC")


class Classes(NamedTuple):
    """What a batch of a classifier means: ``scores`` and ``labels`` have one row per decision.

    ``kind`` is "binary" (both of shape ``(rows,)``), "classes" (scores ``(rows, classes)``,
    labels ``(rows,)``) or "labels" (several yes or no: both ``(rows, labels)``). ``counted``
    marks the rows whose label is not ignored; None: all.
    """

    kind: str
    scores: Tensor
    labels: Tensor
    counted: Tensor | None = None


class ClassMetric(Metric):
    """What metrics of classifiers share: how outputs and targets are read.

    ``(batch, classes, ...)`` with class indices ``(batch, ...)`` or with their probabilities is
    one of several classes. ``(batch,)`` or ``(batch, 1)`` is a yes or no. An output shaped as
    its target is several yes or no where the loss is one for that (``BCELoss``,
    ``BCEWithLogitsLoss``).

    Args:
        name: Under which the figure stands in logs and history.
        from_logits: Whether outputs are logits; None: they are, unless the trainer's loss is
            ``nn.BCELoss``, which wants probabilities.
    """

    def __init__(self, name: str, *, from_logits: bool | None = None) -> None:
        self.from_logits = from_logits
        self._ignored, self._several = IGNORED, False
        super().__init__(name)

    def adapt(self, loss: LossFunction | None) -> None:
        if self.from_logits is None:
            self.from_logits = not isinstance(loss, nn.BCELoss)
        self._ignored = getattr(loss, "ignore_index", IGNORED)
        self._several = isinstance(loss, nn.BCELoss | nn.BCEWithLogitsLoss)

    @property
    def threshold(self) -> float:
        """Outputs above this are a yes."""
        return 0.5 if self.from_logits is False else 0.0

    def reset(self) -> None:
        self.state = {}

    def read(self, output: Any, target: Any) -> Classes:
        """What an output and a target mean.

        Args:
            output: What the model returned.
            target: The batch's target.

        Returns:
            Scores and labels, one row per decision.

        Raises:
            UserError: The two do not belong together.
        """
        scores, labels = find(output, target)
        if scores.dim() == labels.dim() + 1 and scores.shape[1] > 1:
            at = 1 if scores.shape[2:] == labels.shape[1:] else -1
            scores = scores.movedim(at, -1)
            if scores.shape[:-1] != labels.shape:
                raise misfit(output, target)
            scores, labels = scores.flatten(0, -2), labels.flatten().long()
            counted = torch.ne(labels, self._ignored)
            return Classes("classes", scores, labels.masked_fill(~counted, 0), counted)
        if scores.shape == labels.shape and scores.dim() > 1 and scores.shape[1] > 1:
            if self._several:
                scores, labels = scores.movedim(1, -1), labels.movedim(1, -1)
                return Classes("labels", scores.flatten(0, -2), labels.flatten(0, -2) > 0.5)
            return Classes(
                "classes",
                scores.movedim(1, -1).flatten(0, -2),
                labels.argmax(1).flatten(),
            )
        return Classes("binary", scores.flatten(), fitting(scores, labels).flatten() > 0.5)

    def _add(self, name: str, counts: Tensor) -> None:
        held = self.state.get(name)
        self.state[name] = counts if held is None else held.to(counts.device) + counts


class _PerClass(ClassMetric):
    """Counts, for each class, of what was right, what was predicted and what was there."""

    default: ClassVar[str]

    def __init__(
        self,
        name: str | None = None,
        *,
        average: str | None = AUTO,
        from_logits: bool | None = None,
    ) -> None:
        if average is not None and average not in (AUTO, *AVERAGES):
            raise UserError(f"average is {average!r}", nearest(average, (AUTO, *AVERAGES)))
        self.average = average
        super().__init__(name or self.default, from_logits=from_logits)

    def update(self, output: Any, target: Any, size: int) -> None:
        kind, scores, labels, counted = self.read(output, target)
        if kind == "classes":
            found = scores.argmax(1)
            rows = torch.ones_like(found) if counted is None else counted.long()
            empty = found.new_zeros(scores.shape[1])
            parts = [
                empty.scatter_add(0, found, rows * torch.eq(found, labels)),
                empty.scatter_add(0, found, rows),
                empty.scatter_add(0, labels, rows),
            ]
        else:
            yes = scores > self.threshold
            parts = [(yes & labels).sum(0), yes.sum(0), labels.sum(0)]
        counts = torch.stack(parts, dim=-1)
        self._add("counts", counts if counts.dim() == 2 else counts[None])

    def compute(self) -> Value:
        """Average the figure over the classes.

        Returns:
            A float, or one for each class.

        Raises:
            UserError: ``average="binary"`` of more than two classes.
        """
        if not self.state:
            return NAN
        counts = wide(self.state["counts"])
        average = self.average
        if average == AUTO:
            average = "binary" if len(counts) == 2 and not self._several else "macro"
        if average == "micro":
            counts = counts.sum(0, keepdim=True)
        right, found, there = counts.unbind(1)
        values = self._score(right, found, there)
        values = values.where(values.isfinite(), 0.0)  # nothing to divide by
        if average is None:
            return values.tolist()
        if average == "binary":
            if len(values) > 2:
                raise UserError(
                    f'{self.name} with average="binary" of {len(values)} classes',
                    'Take "macro", "micro" or "weighted".',
                )
            return values[-1].item()
        weights = there if average == "weighted" else wide(found + there > 0)
        total = weights.sum().item()
        return (values * weights).sum().item() / total if total else 0.0

    def _score(self, right: Tensor, found: Tensor, there: Tensor) -> Tensor:
        raise NotImplementedError


class Precision(_PerClass):
    """Which part of what was predicted is right: true positives / predicted positives.

    Counts are added up over all examples and replicas before anything is divided. A class that
    was never predicted has 0.

    Args:
        name: Under which the figure stands; "precision".
        average: Over the classes: "macro" is their plain mean (of those that occur in the
            targets or predictions), "weighted" weighs them by their examples, "micro" adds their
            counts up first, "binary" takes class 1 of two, None gives the list of all. "auto" is
            "binary" for two classes, as in scikit-learn and GLUE, and "macro" for more. A model
            with one output per example has the one class "yes", whichever average.
        from_logits: Whether outputs are logits; None: unless the loss is ``nn.BCELoss``.
    """

    default = "precision"

    def _score(self, right: Tensor, found: Tensor, there: Tensor) -> Tensor:
        return right / found


class Recall(_PerClass):
    """Which part of what is there was found: true positives / positives among the targets.

    Args:
        name: Under which the figure stands; "recall".
        average: As of `Precision`.
        from_logits: As of `Precision`.
    """

    default = "recall"

    def _score(self, right: Tensor, found: Tensor, there: Tensor) -> Tensor:
        return right / there


class F1Score(_PerClass):
    """The harmonic mean of precision and recall, of each class: 2 TP / (2 TP + FP + FN).

    Args:
        name: Under which the figure stands; "f1".
        average: As of `Precision`.
        from_logits: As of `Precision`.
    """

    default = "f1"

    def _score(self, right: Tensor, found: Tensor, there: Tensor) -> Tensor:
        return 2 * right / (found + there)


class ConfusionMatrix(ClassMetric):
    """How often class i (row) was taken for class j (column), as nested lists of counts.

    A model with one output per example has the classes no (0) and yes (1).

    Args:
        name: Under which the figure stands; "confusion_matrix".
        from_logits: As of `Precision`.
    """

    def __init__(self, name: str = "confusion_matrix", *, from_logits: bool | None = None) -> None:
        super().__init__(name, from_logits=from_logits)

    def update(self, output: Any, target: Any, size: int) -> None:
        """Add the counts of a local batch.

        Raises:
            UserError: Several labels may hold at once.
        """
        kind, scores, labels, counted = self.read(output, target)
        if kind == "labels":
            raise UserError(
                f"{self.name} of {scores.shape[1]} labels that may all hold at once",
                "Take precision, recall or f1, with average=None for each label.",
            )
        several = kind == "classes"
        found = scores.argmax(1) if several else (scores > self.threshold).long()
        classes = scores.shape[1] if several else 2
        rows = torch.ones_like(found) if counted is None else counted.long()
        counts = found.new_zeros(classes * classes)
        counts = counts.scatter_add(0, labels.long() * classes + found, rows)
        self._add("counts", counts.reshape(classes, classes))

    def compute(self) -> Value:
        return self.state["counts"].tolist() if self.state else NAN


class AUC(ClassMetric):
    """The area under a curve over all thresholds, exact: it keeps the score of every example.

    Scores of all replicas are gathered at the end of an epoch or evaluation: 4 bytes per example
    and class, and 8 for its label.

    ``curve="ROC"`` is the probability that a positive example has a higher score than a negative
    one (ties count for a half; Hanley and McNeil 1982). ``curve="PR"`` is the average precision:
    the precision at each threshold times the recall that it adds, without interpolation.
    Of more than two classes it is the mean of each class against the rest; classes that lack
    positives or negatives have no curve and are left out. NaN where none has one.

    Args:
        name: Under which the figure stands; "auc".
        curve: "ROC" or "PR".
        from_logits: As of `Precision`. Scores of several classes are compared between examples
            as probabilities, so logits pass through a softmax.
    """

    costly = True

    def __init__(
        self, name: str = "auc", *, curve: str = "ROC", from_logits: bool | None = None
    ) -> None:
        if curve not in CURVES:
            raise UserError(f"curve is {curve!r}", nearest(curve, CURVES))
        self.curve = curve
        super().__init__(name, from_logits=from_logits)

    def update(self, output: Any, target: Any, size: int) -> None:
        kind, scores, labels, counted = self.read(output, target)
        if kind == "classes":
            if scores.shape[1] == 2:
                scores = scores[:, 1] - scores[:, 0]  # in the order of the softmax of class 1
            elif self.from_logits is not False:
                scores = scores.softmax(1)
        labels = labels.long() if counted is None else labels.masked_fill(~counted, -1)
        self.state.setdefault("scores", []).append(scores.detach().clone())
        self.state.setdefault("labels", []).append(labels.clone())

    def state_dict(self) -> State:
        return {name: [torch.cat(parts)] for name, parts in self.state.items()}

    def compute(self) -> Value:
        if not self.state:
            return NAN
        scores, labels = torch.cat(self.state["scores"]), torch.cat(self.state["labels"])
        if scores.isnan().any():
            return NAN
        area = _roc if self.curve == "ROC" else _average_precision
        found = [area(*column) for column in _columns(scores, labels)]
        known = [value for value in found if value == value]
        return sum(known) / len(known) if known else NAN


def _columns(scores: Tensor, labels: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The scores of each class and whether it holds, without rows that are ignored."""
    if labels.dim() == 1:
        kept = labels >= 0
        scores, labels = scores[kept], labels[kept]
    if scores.dim() == 1:
        yield scores, labels == 1
        return
    for number, column in enumerate(scores.unbind(1)):
        yield column, labels == number if labels.dim() == 1 else labels[:, number] == 1


def _levels(scores: Tensor, positive: Tensor) -> tuple[Tensor, Tensor]:
    """How many positives and negatives have each score, the highest first."""
    values, index = torch.unique(scores, return_inverse=True)
    yes = torch.bincount(index, wide(positive), len(values)).flip(0)
    return yes, wide(torch.bincount(index, minlength=len(values))).flip(0) - yes


def _roc(scores: Tensor, positive: Tensor) -> float:
    yes, no = _levels(scores, positive)
    pairs = yes.sum() * no.sum()
    above = yes.cumsum(0) - yes / 2
    return ((no * above).sum() / pairs).item() if pairs else NAN


def _average_precision(scores: Tensor, positive: Tensor) -> float:
    yes, no = _levels(scores, positive)
    total = yes.sum()
    if not total:
        return NAN
    right = yes.cumsum(0)
    return (right / (right + no.cumsum(0)) * yes / total).sum().item()
