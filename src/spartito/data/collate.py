"""Examples into a batch, in the memory layout that the examples have."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spartito.errors import UserError


def collate(examples: Sequence[Any]) -> Any:
    """Stack examples that are tensors, arrays, numbers, or tuples or dicts of such.

    Images that are views ``(channels, height, width)`` of a ``(height, width, channels)``
    buffer become a channels-last batch without being rearranged. Anything else is a list.
    """
    first = examples[0]
    if isinstance(first, tuple | list):
        return tuple(collate(column) for column in zip(*examples, strict=True))
    if isinstance(first, Mapping):
        return {name: collate([example[name] for example in examples]) for name in first}
    if isinstance(first, Tensor):
        return _stack(examples)
    if isinstance(first, np.ndarray) and first.dtype.kind in "biufc":
        _alike(examples)
        return torch.from_numpy(np.stack(examples))
    if isinstance(first, bool | int | float | np.number | np.bool_):
        return torch.tensor(examples)
    return list(examples)


def tidy(data: Any) -> Any:
    """A batch of somebody else's making as ours are: arrays as tensors, lists of such as tuples,
    any mapping (a tokenizer's ``BatchEncoding``) as a dict.

    torch's own collate function returns a list ``[x, y]`` for examples ``(x, y)``. Lists of
    anything else (texts, one per example) stay lists.
    """
    if isinstance(data, np.ndarray) and data.dtype.kind in "biufc":
        return torch.from_numpy(data)
    if isinstance(data, Mapping):
        return {name: tidy(part) for name, part in data.items()}
    if isinstance(data, tuple | list):
        parts = tuple(tidy(part) for part in data)
        nested = any(isinstance(part, Tensor | tuple | dict) for part in parts)
        return parts if nested or isinstance(data, tuple) else data
    return data


def take(data: Any, offsets: Tensor) -> Any:
    """The rows of a batch at ``offsets``, shape ``(n,)``, of its tensors and lists."""
    if isinstance(data, Tensor):
        return data[offsets]
    if isinstance(data, tuple):
        return tuple(take(part, offsets) for part in data)
    if isinstance(data, list):
        return [data[offset] for offset in offsets.tolist()]
    if isinstance(data, Mapping):
        return {name: take(part, offsets) for name, part in data.items()}
    return data


def join(batches: Sequence[Any]) -> Any:
    """The rows of several batches as one batch, one after the other.

    Args:
        batches: Each of tensors or lists, or of tuples or dicts of them, all of one form.

    Raises:
        UserError: Their forms differ: other columns, shapes, dtypes.
    """
    first = batches[0]
    if len(batches) == 1:
        return first
    if len({type(batch) for batch in batches}) > 1:
        kinds = sorted({type(batch).__name__ for batch in batches})
        raise UserError(f"{' and '.join(kinds)} in one batch", "All examples have one form.")
    if isinstance(first, Tensor):
        for batch in batches[1:]:
            _alike([first[:1].reshape(first.shape[1:]), batch[:1].reshape(batch.shape[1:])])
        return torch.cat(list(batches))
    if isinstance(first, Mapping):
        if len({tuple(sorted(map(str, batch))) for batch in batches}) > 1:
            columns = " and ".join(str(sorted(map(str, batch))) for batch in batches)
            raise UserError(f"the columns {columns} in one batch", "All examples have the same.")
        return {name: join([batch[name] for batch in batches]) for name in first}
    if isinstance(first, tuple):
        if len({len(batch) for batch in batches}) > 1:
            counts = sorted({len(batch) for batch in batches})
            raise UserError(f"examples of {counts} parts in one batch", "All have the same parts.")
        return tuple(join(column) for column in zip(*batches, strict=True))
    return [row for batch in batches for row in batch]


def head(data: Any, count: int) -> Any:
    """A copy of the first ``count`` rows of a batch, of what has so many."""
    if isinstance(data, Tensor):
        return data[:count].clone() if data.dim() else data
    if isinstance(data, tuple):
        return tuple(head(part, count) for part in data)
    if isinstance(data, Mapping):
        return {name: head(part, count) for name, part in data.items()}
    return data[:count] if isinstance(data, list) else data


def rows(data: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """``data`` with ``function`` applied to each of its tensors; lists are left as they are."""
    if isinstance(data, Tensor):
        return function(data)
    if isinstance(data, tuple):
        return tuple(
            [function(p) if isinstance(p, Tensor) else rows(p, function) for p in data]
        )  # most are flat, and this is in every step
    if isinstance(data, Mapping):
        return {name: rows(part, function) for name, part in data.items()}
    return data


def leaves(data: Any) -> Iterator[Tensor]:
    """The tensors of ``data``, in tuples, lists and mappings of any depth."""
    if isinstance(data, Tensor):
        yield data
    elif isinstance(data, tuple | list | Mapping):
        for part in data.values() if isinstance(data, Mapping) else data:
            yield from leaves(part)


def count_rows(data: Any) -> int:
    """How many examples a batch has: the rows of its first tensor."""
    first = next(leaves(data), None)
    if first is not None and first.dim():
        return first.shape[0]
    raise UserError(
        f"a batch of {type(data).__name__} has no rows",
        "A batch is a tensor, or a tuple or dict of tensors whose first dim is the example.",
    )


def _stack(examples: Sequence[Tensor]) -> Tensor:
    first = examples[0]
    _alike(examples)
    if first.device.type != "cpu" or first.dtype == torch.bfloat16:
        return torch.stack(list(examples))
    last = first.dim() == 3 and not first.is_contiguous() and first.permute(1, 2, 0).is_contiguous()
    layout = torch.channels_last if last else torch.contiguous_format
    out = torch.empty((len(examples), *first.shape), dtype=first.dtype, memory_format=layout)
    target = out.numpy()  # numpy copies in this thread; torch would wake its pool for it
    for row, example in enumerate(examples):
        target[row] = example.detach().numpy()
    return out


def _alike(examples: Sequence[Tensor] | Sequence[Any]) -> None:
    """Refuse examples that make no batch: torch and numpy would cast the one to the other."""
    if len({example.shape for example in examples}) > 1:
        shapes = sorted({tuple(example.shape) for example in examples})
        raise UserError(
            f"examples of the shapes {shapes} in one batch",
            "All examples of a batch have one shape: resize or pad them in .map().",
        )
    if len({example.dtype for example in examples}) > 1:
        dtypes = sorted({str(example.dtype) for example in examples})
        raise UserError(
            f"examples of the dtypes {', '.join(dtypes)} in one batch",
            "All examples of a batch have one dtype: convert them in .map().",
        )
