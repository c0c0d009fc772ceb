"""Examples into a batch, in the memory layout that the examples have."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from spartito.errors import UserError


def collate(examples: Sequence[Any]) -> Any:
    """Stack examples that are tensors, arrays, numbers, or tuples or dicts of such.

    Images that are views ``(channels, height, width)`` of a ``(height, width, channels)``
    buffer become a channels-last batch without being rearranged. Anything else is a list.
    """
    first = examples[0]
    if isinstance(first, tuple | list):
        return _alike_tuple(first, map(collate, zip(*examples, strict=True)))
    if isinstance(first, Mapping):
        return {name: collate([example[name] for example in examples]) for name in first}
    if isinstance(first, Tensor):
        return _stack(examples)
    if isinstance(first, np.ndarray) and first.dtype.kind in "biufc":
        _alike(examples)
        return torch.from_numpy(np.stack(examples))
    if isinstance(first, float):  # with all of its digits, as in torch's own loader
        return torch.tensor(examples, dtype=torch.float64)
    if isinstance(first, bool | int | np.number | np.bool_):
        return torch.tensor(examples)
    return list(examples)


def tidy(data: Any) -> Any:
    """A batch of somebody else's making as ours are: arrays as tensors, lists of such as tuples,
    any mapping (a tokenizer's ``BatchEncoding``) as a dict.

    torch's own collate function returns a list ``[x, y]`` for examples ``(x, y)``, and of their
    texts a tuple. Lists of anything else (texts, one per example) stay lists, as what has fields
    by name does.
    """
    if isinstance(data, np.ndarray) and data.dtype.kind in "biufc":
        return torch.from_numpy(data)
    if isinstance(data, Mapping):
        return {name: tidy(part) for name, part in data.items()}
    if isinstance(data, PackedSequence):
        return data
    if isinstance(data, tuple | list):
        parts = tuple(tidy(part) for part in data)
        nested = any(isinstance(part, Tensor | tuple | dict) for part in parts)
        if nested or isinstance(data, tuple):
            texts = parts and all(isinstance(part, str | bytes) for part in parts)
            return list(parts) if texts else _alike_tuple(data, parts)
    return data


def _alike_tuple(like: Any, parts: Iterable[Any]) -> Any:
    """A tuple of ``parts``, with the names of ``like`` if it has such."""
    made: Any = type(like)
    return made._make(parts) if hasattr(like, "_make") else tuple(parts)


class Form(NamedTuple):
    """How the examples of a batch lie in it.

    Attributes:
        size: How many there are, as far as one can see.
        kind: "rows": each is a row of every tensor, and an item of every list. "parts": each is
            an item of every part of the batch, as ``tuple(zip(*examples))`` makes it. "whole":
            they cannot be told apart, as where time comes first.
    """

    size: int
    kind: str


def form(data: Any, size: int | None = None) -> Form | None:
    """How the examples of a batch lie in it, of which there are ``size`` if that is known.

    Returns:
        None where there is no tensor and no list.
    """
    counts = set(_counts(data))
    known = sorted(counts - {WHOLE})
    if not known:
        return None
    is_even = len(counts) == 1 and size in (None, known[0])
    parts = data.values() if isinstance(data, Mapping) else data if type(data) is tuple else ()
    lengths = {_length(part) for part in parts}
    if len(lengths) == 1 and any(type(part) is tuple for part in parts):
        length = lengths.pop()
        is_whole = length in (None, WHOLE) or (size is not None and length != size)
        if not is_whole and (not is_even or any(map(_is_of_scalars, parts))):
            return Form(length or 0, "parts")
    return Form(known[0], "rows") if is_even else Form(size or known[0], "whole")


WHOLE = -1
"""The rows of what cannot be cut."""


def _counts(data: Any) -> Iterator[int]:
    """The rows of each tensor of ``data``, and the items of each list."""
    if isinstance(data, Tensor):
        if data.dim():
            yield data.size(0)
    elif isinstance(data, PackedSequence):
        yield from (int(data.batch_sizes[0]), WHOLE)
    elif isinstance(data, list) and not any(isinstance(item, Tensor) for item in data):
        yield len(data)
    elif isinstance(data, tuple | list | Mapping):
        for part in data.values() if isinstance(data, Mapping) else data:
            yield from _counts(part)


def rows_of(tensor: Tensor, which: Tensor | slice) -> Tensor:
    """Some rows of a tensor, whatever its layout is.

    Raises:
        UserError: Torch takes no rows of such a tensor.
    """
    check_rows(tensor)
    if tensor.layout is torch.strided:
        return tensor[which]
    if isinstance(which, slice):
        which = torch.arange(*which.indices(len(tensor)))
    return tensor.index_select(0, which.to(tensor.device))


def check_rows(tensor: Tensor) -> None:
    """Refuse a tensor of which torch takes no rows.

    Raises:
        UserError: It is nested, or sparse in another way than COO.
    """
    if tensor.is_nested or tensor.layout not in (torch.strided, torch.sparse_coo):
        kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        raise UserError(
            f"data in a {kind} tensor, of which no rows can be taken",
            "Give dense tensors (to_dense(), to_padded_tensor()) or sparse ones in COO "
            "(to_sparse()), and make the other form in the model's forward pass.",
        )


def _length(part: Any) -> int | None:
    """The items of a part of a batch, None where it has none."""
    if isinstance(part, Tensor):
        return part.size(0) if part.dim() else None
    return len(part) if type(part) is tuple or isinstance(part, list) else None


def _is_of_scalars(part: Any) -> bool:
    """Whether a tuple has a number, or nothing, for each example."""
    return type(part) is tuple and all(
        not item.dim()
        if isinstance(item, Tensor)
        else item is None or isinstance(item, int | float)
        for item in part
    )


def take(data: Any, which: Tensor | slice) -> Any:
    """The rows ``which`` (offsets, shape ``(n,)``) of a batch, of its tensors and lists.

    Numbers and tensors of one are of the batch as a whole, and stay.
    """
    if isinstance(data, Tensor):
        return rows_of(data, which) if data.dim() else data
    if isinstance(data, tuple):
        return _alike_tuple(data, [take(part, which) for part in data])
    if isinstance(data, list):
        return _items(data, which)
    if isinstance(data, Mapping):
        return {name: take(part, which) for name, part in data.items()}
    return data


def part_of(data: Any, which: Tensor | slice, shape: Form) -> Any:
    """The examples ``which`` of a batch of this form; None where they cannot be told apart."""
    if shape.kind != "parts":
        return take(data, which) if shape.kind == "rows" else None
    if isinstance(data, Mapping):
        return {name: _part(part, which) for name, part in data.items()}
    return tuple(_part(part, which) for part in data)


def _part(part: Any, which: Tensor | slice) -> Any:
    return tuple(_items(part, which)) if type(part) is tuple else take(part, which)


def _items(items: Any, which: Tensor | slice) -> list[Any]:
    if isinstance(which, slice):
        return list(items[which])
    return [items[offset] for offset in which.tolist()]


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


def head(data: Any, count: int, size: int | None = None) -> Any:
    """A copy of the first ``count`` examples of a batch of ``size``; None of what is "whole"."""
    shape = form(data, size)
    if shape is None:
        return data
    return part_of(data, torch.arange(min(count, shape.size)), shape)


def without_rows(data: Any, size: int) -> Any:
    """What a batch of ``size`` examples looks like without any."""
    found = head(data, 0, size)
    return (
        rows(data, lambda tensor: rows_of(tensor, slice(0)) if tensor.dim() else tensor)
        if found is None
        else found
    )


def rows(data: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """``data`` with ``function`` applied to each of its tensors; lists are left as they are."""
    if isinstance(data, Tensor):
        return function(data)
    if isinstance(data, PackedSequence):
        where = (data.sorted_indices, data.unsorted_indices)
        moved = [None if index is None else function(index) for index in where]
        return PackedSequence(function(data.data), data.batch_sizes, *moved)
    if isinstance(data, tuple):
        parts = [function(p) if isinstance(p, Tensor) else rows(p, function) for p in data]
        # most are flat, and this is in every step
        return tuple(parts) if type(data) is tuple else _alike_tuple(data, parts)
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
    """How many examples a batch has: the rows of its tensors."""
    shape = form(data) if next(leaves(data), None) is not None else None
    if shape is not None:
        return shape.size
    raise UserError(
        f"a batch of {type(data).__name__} has no rows",
        "A batch is a tensor, or a tuple or dict of tensors whose first dim is the example.",
    )


def sizes(data: Any) -> list[int]:
    """The different numbers of rows that the tensors and lists of a batch have."""
    return sorted({count for count in _counts(data) if count != WHOLE})


def kept_rows(data: Any, count: int) -> int:
    """How many of ``count`` examples are left in a batch that a function of the user's has made.

    It has left some out where all parts are tensors of so many rows, and none has ``count`` of
    anything: not so where time comes first, or where all lie in one row behind each other.
    """
    parts = tuple(data.values()) if isinstance(data, Mapping) else data
    if isinstance(parts, Tensor):
        parts = (parts,)
    if type(parts) is not tuple or not all(isinstance(p, Tensor) and p.dim() for p in parts):
        return count
    found = {part.size(0) for part in parts}
    if len(found) != 1 or any(count in part.shape[:2] for part in parts):
        return count
    if len(parts) > 1 and len({part.shape[:2] for part in parts}) == 1 == parts[0].size(0):
        return count if parts[0].dim() > 1 else 1
    return int(min(count, *found))


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
