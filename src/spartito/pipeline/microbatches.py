"""A batch in parts that pass a pipeline one after the other, and their outputs as one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Any

import torch
from msgspec import structs
from torch import Tensor

from spartito.data.batch import Batch
from spartito.data.reading.collate import form, part_of, sizes
from spartito.errors import UserError


def divided(batch: Batch, count: int, least: int) -> list[Batch]:
    """The microbatches of a batch: contiguous parts, as equal as can be, none of them empty.

    Args:
        batch: One data shard's rows.
        count: How many parts at most.
        least: Rows of each, where there are so many.

    Returns:
        The parts.
    """
    count = max(1, min(count, batch.size // least))
    each, more = divmod(batch.size, count)
    sizes = [each + (number < more) for number in range(count)]
    return [part(batch, sum(sizes[:number]), size) for number, size in enumerate(sizes)]


def part(batch: Batch, first: int, size: int) -> Batch:
    """Some rows of a batch.

    Args:
        batch: All rows.
        first: The first of them.
        size: How many.

    Returns:
        A batch of the same step.
    """
    last = first + size
    if (shape := form(batch.data, batch.size)) is None or size == batch.size:
        data = batch.data
    elif (data := part_of(batch.data, slice(first, last), shape)) is None:
        raise UserError(
            f"a batch of {batch.size} examples cannot be cut into microbatches: its tensors and "
            f"lists have {', '.join(map(str, sizes(batch.data)))} rows",
            "Set microbatches=1, give tensors of (examples, ...), or choose another strategy.",
        )
    return structs.replace(batch, data=data, size=size, offsets=batch.offsets[first:last])


def joined(outputs: Sequence[Any], sizes: Sequence[float]) -> Any:
    """The outputs of microbatches as that of their batch.

    Args:
        outputs: Tensors, mappings or tuples of one form.
        sizes: The rows of each microbatch.

    Returns:
        The same form; scalars are means over the rows.

    Raises:
        UserError: For tensors whose further dims depend on the rows.
    """
    first = outputs[0]
    if len(outputs) == 1:
        return first
    if isinstance(first, Tensor):
        if first.dim():
            _refuse_compared(outputs)
            return torch.cat(list(outputs))
        pairs = zip(outputs, sizes, strict=True)
        return sum(value * size for value, size in pairs) / sum(sizes)
    if isinstance(first, Mapping):
        found = {name: joined([out[name] for out in outputs], sizes) for name in first}
        if "num_items" in first and "loss" in first:  # a mean over so many items, not rows
            items = [int(out["num_items"]) for out in outputs]
            found["loss"] = joined([out["loss"] for out in outputs], [max(n, 1e-9) for n in items])
            found["num_items"] = torch.tensor(sum(items))
        return found
    if isinstance(first, tuple):
        return tuple(joined(column, sizes) for column in zip(*outputs, strict=True))
    return first


def _refuse_compared(outputs: Sequence[Tensor]) -> None:
    """One row's output is the same whichever rows are beside it, so its shape is too."""
    shapes = list(dict.fromkeys(tuple(output.shape) for output in outputs))
    if len({shape[1:] for shape in shapes}) > 1:
        raise UserError(
            f"an output of {shapes[0]} for one microbatch and of {shapes[-1]} for another: it "
            "compares the rows of a microbatch with each other",
            "Set microbatches=1, or choose mesh.",
        )


def each_tensor(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """What a model returns, with ``function`` applied to each of its tensors, in order.

    Args:
        value: Tensors in tuples, lists and mappings of any kind.
        function: It takes a tensor.

    Returns:
        The same form.
    """
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        found = copy(value)
        for name, part in value.items():
            found[name] = each_tensor(part, function)  # type: ignore[index]
        return found
    if isinstance(value, tuple | list):
        parts = [each_tensor(part, function) for part in value]
        named = isinstance(value, tuple) and hasattr(value, "_fields")
        return type(value)(*parts) if named else type(value)(parts)
    return value
