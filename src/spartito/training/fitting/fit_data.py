"""The data of a `fit`: what is trained on, what each example weighs, what is kept to validate."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from spartito.data.dataset import Dataset, as_dataset
from spartito.data.reading.stretch import stretch
from spartito.data.source import BlockSource, OrderedSource, Source
from spartito.engine.losses.loss import LossFunction, describe
from spartito.errors import UserError
from spartito.notes import warn

BATCH = 32
"""Examples in a batch where nobody says how many."""


@dataclass(frozen=True)
class Weights:
    """What examples weigh in the loss.

    Args:
        of_classes: By the class that an example is of.
        of_examples: One for each example.
    """

    of_classes: Mapping[int, float] | None
    of_examples: Any

    def __bool__(self) -> bool:
        return self.of_classes is not None or self.of_examples is not None


def training_data(data: Any, batch_size: int | None, weights: Weights, is_chief: bool) -> Dataset:
    """The data of a `fit` in batches, with the weights of examples as the third part.

    Args:
        data: What the user gave.
        batch_size: The global batch size that the user asked for; None: nobody did.
        weights: What examples weigh.
        is_chief: Whether this task speaks to people.

    Raises:
        UserError: The data or the weights are no such.
    """
    if weights.of_examples is not None:
        data = _with_weights(data, weights.of_examples)
    chain = as_dataset(data, BATCH if batch_size is None else batch_size)
    if batch_size is not None and chain.batch_size not in (None, batch_size) and is_chief:
        warn(
            "fit(batch_size=%d), and the data has batches of %d: these count",
            batch_size, chain.batch_size,
        )  # fmt: skip
    return chain


def with_class_weights(chain: Dataset, weights: Weights) -> Dataset:
    """The batches that train, in which an example weighs what its class does.

    Args:
        chain: Without what validates: as in Keras, its loss is one of plain examples.
        weights: What examples weigh.

    Raises:
        UserError: The weights are no such.
    """
    return chain if weights.of_classes is None else chain.map(ByClass(weights.of_classes))


def check_weights(weights: Weights, loss: LossFunction | None) -> None:
    """Refuse weights for a model that computes its own loss."""
    if weights and loss is None:
        raise UserError(
            "weights of examples, and a model that computes its own loss",
            "Give the Trainer a loss, or weigh the examples in the model.",
        )


def split(chain: Dataset, fraction: float) -> tuple[Dataset, Dataset]:
    """The first examples to train on, and the last ones to validate with, as Keras does.

    Args:
        chain: In batches, of examples that have numbers.
        fraction: Of the examples that validate.

    Raises:
        UserError: It is no fraction, or the data has no such parts.
    """
    if not isinstance(fraction, float) or not 0 < fraction < 1:
        raise UserError(
            f"fit(validation_split={fraction!r})", "A fraction between 0 and 1, as 0.2."
        )
    source = chain.source
    is_other = isinstance(source, BlockSource | OrderedSource) or chain.batch_sampler is not None
    if not isinstance(source, Source) or is_other or chain.processes is not None:
        raise UserError(
            f"validation_split of a {type(source).__name__}, which has no last examples",
            "Give validation_data=. sp.data.packed and image_folder take validation_split= and "
            "subset= themselves.",
        )
    count = len(source)
    first = count - math.floor(count * fraction)
    if first in (0, count):
        raise UserError(
            f"validation_split={fraction} of {count} examples leaves one side without any",
            "Give more examples, or another fraction.",
        )
    kept = replace(
        chain,
        source=stretch(source, first, count),
        shuffled=False,
        lengths=None,
        repeats=1,
        drop_remainder=False,
    )
    lengths = None if chain.lengths is None else chain.lengths[:first]
    return replace(chain, source=stretch(source, 0, first), lengths=lengths), kept


@dataclass(frozen=True)
class ByClass:
    """Gives each example of a batch the weight of its class, as a third part.

    Args:
        weights: By class.
    """

    weights: Mapping[int, float]

    def __post_init__(self) -> None:
        good = isinstance(self.weights, Mapping) and all(
            isinstance(key, int) and key >= 0 and isinstance(value, int | float) and value >= 0
            for key, value in self.weights.items()
        )
        if not good or not self.weights:
            raise UserError(
                f"fit(class_weight={self.weights!r})",
                "Numbers by class, from 0 on: {0: 1.0, 1: 5.0}.",
            )

    def __call__(self, *parts: Any) -> Any:
        """The parts of a batch with the weights of its classes."""
        if len(parts) not in (2, 3) or not _is_labels(parts[1]):
            raise UserError(
                f"class_weight, and a batch of {describe(parts)}",
                "Give batches (x, y) whose y has the number of one class per example.",
            )
        x, labels = parts[0], parts[1]
        known = labels.long().clamp(0, len(self._table) - 1)
        found = torch.where(labels.long() == known, self._table[known], math.nan)
        if unknown := labels[found.isnan()].tolist():
            raise UserError(
                f"class_weight has nothing for class {unknown[0]}: it has {[*self.weights]}",
                "Give a number for each class.",
            )
        return x, labels, found * parts[2] if len(parts) == 3 else found

    @cached_property
    def _table(self) -> Tensor:
        """The weight of each class, NaN for one that has none."""
        table = torch.full((1 + max(self.weights),), math.nan, dtype=torch.float64)
        for label, weight in self.weights.items():
            table[label] = weight
        return table


def _is_labels(y: Any) -> bool:
    return isinstance(y, Tensor) and y.dim() == 1 and not y.is_floating_point()


def _with_weights(data: Any, weights: Any) -> Any:
    given = torch.as_tensor(weights)
    if not isinstance(data, tuple) or len(data) != 2 or given.dim() != 1:
        raise UserError(
            f"fit(sample_weight={describe(given)}) for {type(data).__name__}",
            "Give arrays fit((x, y), sample_weight=w) with one number per example, or data of "
            "three parts: sp.data.arrays(x, y, w).",
        )
    return (*data, given if given.is_floating_point() else given.float())
