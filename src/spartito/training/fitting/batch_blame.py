"""What an error inside of the model or the loss was about: the batch that it was given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from spartito.data.batch import Batch
from spartito.data.dataset import Dataset
from spartito.data.memory import Arrays
from spartito.data.source import BatchStream, ExampleStream, PerWorker
from spartito.errors import SpartitoError
from spartito.training.fitting.missing_operations import note_missing

MOST = 8
"""Parts of a tuple or dict that are shown."""


def note_batch(
    error: Exception, batch: Batch, chain: Dataset, where: str, model: nn.Module
) -> None:
    """Add notes to an error that is not ours, once: what the model was given, what torch lacks.

    Args:
        error: What a step has raised.
        batch: The local batch of it.
        chain: The data set.
        where: What was done: "step 3 of epoch 1".
        model: What was given it.
    """
    if isinstance(error, SpartitoError) or any("spartito:" in note for note in _notes(error)):
        return
    error.add_note(
        f"spartito: {where}, a batch of {name_of(chain)} with {batch.size} of "
        f"{batch.global_size} rows here: {described(batch.data)}"
    )
    note_missing(error, model)


def described(data: Any) -> str:
    """The shapes and dtypes of a batch, in the form that it has."""
    if isinstance(data, torch.Tensor):
        return f"{str(data.dtype).removeprefix('torch.')} {tuple(data.shape)}"
    if isinstance(data, Mapping):
        parts = [f"{name!r}: {described(value)}" for name, value in [*data.items()][:MOST]]
        return "{" + ", ".join(parts + ["..."] * (len(data) > MOST)) + "}"
    if isinstance(data, list | tuple):
        parts = [described(value) for value in data[:MOST]] + ["..."] * (len(data) > MOST)
        return f"[{', '.join(parts)}]" if isinstance(data, list) else f"({', '.join(parts)})"
    return type(data).__name__


def name_of(chain: Dataset) -> str:
    """What a user calls the data: the class that he has brought."""
    source: Any = chain.source
    if isinstance(source, Arrays):
        return "arrays"
    if isinstance(source, PerWorker):
        return getattr(source.function, "__qualname__", type(source.function).__qualname__)
    if isinstance(source, ExampleStream):
        source = source.examples
    elif isinstance(source, BatchStream):
        source = source.batches
    inner = getattr(source, "dataset", None)  # of a Subset, or of a loader
    name = type(source).__qualname__
    return name if inner is None else f"{name} of {type(inner).__qualname__}"


def _notes(error: Exception) -> list[str]:
    return getattr(error, "__notes__", [])
