"""All predictions of an evaluation at once, for figures that are no sums over batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from spartito.data.batch import Batch
from spartito.engine.losses.loss import IGNORED
from spartito.errors import UserError
from spartito.training.metrics.base import State, decode, encode, plain
from spartito.training.metrics.tensors import picked


class EvalPrediction(NamedTuple):
    """What a model said of a data set, in the order of its examples, as Transformers has it.

    Args:
        predictions: The outputs, ``(examples, ...)``. Of batches of several lengths the shorter
            ones are filled up with -100.
        label_ids: The targets, ``(examples, ...)``, filled up in the same way.
    """

    predictions: np.ndarray[Any, Any]
    label_ids: np.ndarray[Any, Any]


ComputeMetrics: TypeAlias = Callable[[EvalPrediction], Mapping[str, float]]
"""Figures by name, of all predictions of an evaluation."""


class Predictions:
    """What this task has seen of an evaluation's outputs and targets.

    Args:
        function: What is computed of those of all tasks.
    """

    def __init__(self, function: ComputeMetrics) -> None:
        self._function = function
        self._state: dict[str, list[Tensor]] = {"at": [], "outputs": [], "targets": []}

    def add(self, output: Any, batch: Batch) -> None:
        """Add the rows of a local batch."""
        if not batch.size:
            return
        found, labels = picked(output, batch.target)
        if len(found) != batch.size:
            raise UserError(
                f"an output of {tuple(found.shape)} for {batch.size} examples",
                "compute_metrics wants one row for each: (examples, ...).",
            )
        self._state["at"].append(batch.offsets.cpu() + (batch.step << 32))
        self._state["outputs"].append(found.detach())
        self._state["targets"].append(labels.detach())

    def state(self) -> bytes:
        """The same for other tasks."""
        return encode([self._state])

    def figures(self, parts: Sequence[bytes], taken: Sequence[str]) -> dict[str, Any]:
        """What the function says of all rows, which ``parts`` have together.

        Args:
            parts: The states of all tasks.
            taken: Names that other figures have.

        Raises:
            UserError: It returns no figures by name, or takes names that are taken.
        """
        states: list[State] = [decode(part)[0] for part in parts]
        at = torch.cat([tensor for state in states for tensor in state["at"]])
        order = at.argsort()
        outputs, targets = (
            _joined([tensor for state in states for tensor in state[name]])[order].numpy()
            for name in ("outputs", "targets")
        )
        found = self._function(EvalPrediction(outputs, targets))
        if not isinstance(found, Mapping):
            raise UserError(
                f"compute_metrics returned {type(found).__name__}", 'Return {"name": figure}.'
            )
        if twice := sorted(found.keys() & set(taken)):
            raise UserError(f"compute_metrics gives {twice[0]!r} too", "Give it another name.")
        return {str(name): plain(value) for name, value in found.items()}


def _joined(parts: list[Tensor]) -> Tensor:
    """All rows, those of fewer columns filled up."""
    sizes = {part.shape[1:] for part in parts}
    if len(sizes) > 1:
        most = [max(dims) for dims in zip(*sizes, strict=True)]
        parts = [_filled(part, most) for part in parts]
    whole = torch.cat(parts)
    return whole.float() if whole.dtype is torch.bfloat16 else whole  # which numpy has not


def _filled(part: Tensor, most: Sequence[int]) -> Tensor:
    edges = [edge for size, wish in zip(part.shape[1:], most, strict=True)
             for edge in (wish - size, 0)]  # fmt: skip
    return functional.pad(part, edges[::-1], value=IGNORED)
