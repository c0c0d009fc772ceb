"""Where a metric finds the prediction and the labels in what a model and a batch hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from spartito.engine.losses.loss import align, describe, widened
from spartito.errors import UserError


def find(output: Any, target: Any) -> tuple[Tensor, Tensor]:
    """The prediction, in float32 at least with its classes in dim 1, and the labels.

    Of a mapping or object these are "output" or "logits", and "y" or "labels".
    """
    if isinstance(output, Tensor) and isinstance(target, Tensor) and output.dim():
        return widened(output), target
    prediction, labels = picked(output, target)
    if not isinstance(output, Tensor) and prediction.shape[:-1] == labels.shape != (len(labels),):
        prediction = prediction.movedim(-1, 1)  # as in transformers: classes come last
    return widened(prediction), labels


def picked(output: Any, target: Any) -> tuple[Tensor, Tensor]:
    """The prediction and the labels as they are.

    Args:
        output: What a model returned.
        target: A batch's target.

    Raises:
        UserError: One of them is not there.
    """
    prediction = _pick(output, ("output", "logits"), ("loss", "num_items"))
    labels = _pick(target, ("y", "labels", "label"), ())
    if prediction is None or labels is None or not prediction.dim():
        raise misfit(output, target)
    return prediction, labels


def fitting(output: Tensor, target: Tensor) -> Tensor:
    """``target`` in the shape of ``output``; broadcasting would compare all with all."""
    aligned: Tensor = align(output, target)
    if aligned.shape != output.shape:
        raise misfit(output, target)
    return aligned


def misfit(output: Any, target: Any) -> UserError:
    """What to say of an output and a target that do not belong together."""
    return UserError(
        f"a metric does not fit an output of {describe(output)} and a target of {describe(target)}",
        "Both have one value per example, or the output one per class. Of anything else give a "
        "function (output, target).",
    )


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
