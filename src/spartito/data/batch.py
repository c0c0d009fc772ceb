"""One data shard of a global batch, and the offsets of its rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import torch


class Batch(msgspec.Struct, frozen=True):
    """The local batch of one step.

    It unpacks and indexes as its data do: ``x, y = batch`` of a tuple, ``batch["labels"]`` and
    ``model(**batch)`` of a dict.

    Attributes:
        data: A tensor, a tuple ``(x, y)`` or a dict, its tensors of shape ``(size, ...)``; their
            parts may be tuples and dicts again.
        size: The rows of this data shard. Without corrupt examples that is what the order gave.
        global_size: The examples that the order gave to the step over all data shards; a corrupt
            example is counted there.
        offsets: The rows' positions inside the global batch, shape ``(size,)`` int64.
        epoch: The pass over the data, from 0.
        step: The step in the pass, from 0.
        drawn: A checksum of the order of the whole pass; of a stream, of some values of its first
            batch. 0 where tasks make batches of their own.
        spare: Stands in for ``data`` without rows where a model has to be run in any case: up to
            two rows of other examples, which count for nothing; None where there are rows.
        left_out: How many examples a collate function has left out. It does not say which, so
            the offsets may be those of others.
    """

    data: Any
    size: int
    global_size: int
    offsets: torch.Tensor
    epoch: int
    step: int
    drawn: int = 0
    spare: Any = None
    left_out: int = 0

    @property
    def x(self) -> Any:
        """The input: the first part of a tuple, the whole of anything else."""
        return self.data[0] if isinstance(self.data, (tuple, list)) else self.data

    @property
    def y(self) -> Any:
        """The target: the second part of a tuple, ``"y"`` of a dict, else None."""
        data = self.data
        if isinstance(data, (tuple, list)):
            return data[1] if len(data) > 1 else None
        return data.get("y") if isinstance(data, dict) else None

    @property
    def target(self) -> Any:
        """What a loss or metric compares with: `y`, or all of the data where there is none."""
        y = self.y
        return self.data if y is None else y

    def __iter__(self) -> Iterator[Any]:
        return iter(self.data)

    def __getitem__(self, key: Any) -> Any:
        return self.data[key]

    def keys(self) -> Any:
        """The names of a dict's entries.

        Returns:
            A view of them, with which ``**batch`` is the dict.
        """
        return self.data.keys()
