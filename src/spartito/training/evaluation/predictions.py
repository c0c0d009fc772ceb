"""What a model returns for the batches of a data set, put together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from spartito.data.batch import Batch
from spartito.data.dataset import Dataset
from spartito.data.reading.collate import rows
from spartito.engine.logged import listening
from spartito.errors import UserError
from spartito.heartbeat import EVALUATE, beat
from spartito.strategies import Strategy
from spartito.training.callback import Callback, hooks
from spartito.training.fitting.batch_blame import note_batch


def predicted(
    strategy: Strategy,
    model: nn.Module,
    dataset: Dataset,
    steps: int | None,
    has_loss: bool,
    callbacks: Sequence[Callback],
) -> Any:
    """The outputs for ``steps`` batches of ``dataset``, or all, equal on all replicas.

    With ``has_loss`` a loss is computed of what the model returns; else it computes its own.
    """
    begin, end = (hooks(callbacks, f"on_predict_batch_{when}") for when in ("begin", "end"))
    outputs: list[Any] = []
    for callback in callbacks:
        callback.on_predict_begin()
    batches = strategy.distribute(dataset, training=False)
    with closing(iter(batches)) as stream, listening(None):
        for number, batch in enumerate(islice(stream, steps)):
            beat(None, EVALUATE)
            for hook in begin:
                hook(number)
            try:
                output = strategy.predict(batch, has_loss)
            except Exception as error:
                at = f"in prediction step {number + 1}"
                note_batch(error, batch, dataset, at, model)
                raise
            outputs.append(whole(output, batch, batches.gather))
            for hook in end:
                hook(number, {"outputs": output})
    for callback in callbacks:
        callback.on_predict_end()
    return joined(outputs)


def whole(output: Any, batch: Batch, gather: Callable[[Tensor], Tensor]) -> Any:
    """The outputs for a global batch: all replicas' ``output``, one row for each example.

    Raises `UserError` for a tensor that has another number of rows than this replica's batch, and
    where a collate function has left out examples.
    """
    if batch.left_out:
        raise UserError(
            f"a collate function has left out {batch.left_out} of "
            f"{batch.size + batch.left_out} examples: there is no prediction for them",
            "Predict data that has none of these.",
        )

    def of_all(part: Tensor) -> Tensor:
        if not part.dim() or len(part) != batch.size:
            raise UserError(
                f"an output of {tuple(part.shape)} for {batch.size} examples",
                "Predictions have the examples in their first dim: (examples, ...).",
            )
        return gather(part)[: batch.global_size]

    return rows(output, of_all)


def joined(parts: list[Any]) -> Any:
    """The outputs of all batches, which are tensors in tuples or mappings of one form."""
    if not parts:
        raise UserError("a prediction for no examples", "Give it some data.")
    first = parts[0]
    if isinstance(first, Tensor):
        for number, part in enumerate(parts):
            if part.shape[1:] != first.shape[1:]:
                raise UserError(
                    f"outputs of {tuple(first.shape)} for batch 0, of {tuple(part.shape)} for "
                    f"batch {number}: they do not make one tensor",
                    "Pad all batches to one length, or predict them one by one.",
                )
        return torch.cat(parts)
    if isinstance(first, tuple):
        return tuple(joined(list(column)) for column in zip(*parts, strict=True))
    if isinstance(first, Mapping):
        return {name: joined([part[name] for part in parts]) for name in first}
    raise UserError(f"the model returned {type(first).__name__}", "Predictions are tensors.")
