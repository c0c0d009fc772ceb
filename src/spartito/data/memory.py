"""Arrays in memory as a source: whole batches are gathered at once.

What goes out is always a copy: a model or a ``.map`` that changes its input in place must not
change the user's arrays, and with them every later epoch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from spartito.data.reading.collate import check_rows, leaves, rows, rows_of
from spartito.data.reading.placing import HOST, Placing
from spartito.data.sets.hugging_face import TableSource
from spartito.data.source import Source
from spartito.errors import UserError

CHUNK = 1 << 20  # bytes of small batches that are copied at once
MOST = 16  # such batches


class Arrays:
    """Examples that are the rows of tensors in memory.

    One array gives tensors, several give tuples; a dict of arrays gives dicts. Both may hold
    further tuples and dicts of arrays: ``arrays((left, right), y)`` gives ``((l, r), y)``.
    """

    def __init__(self, *arrays: Any) -> None:
        alone = len(arrays) == 1 and not _is_nested(arrays[0])
        self._tree = _tree(arrays[0]) if alone else tuple(_tree(array) for array in arrays)
        for tensor in leaves(self._tree):
            check_rows(tensor)
        sizes = [len(tensor) if tensor.dim() else None for tensor in leaves(self._tree)]
        if not sizes:
            raise UserError("arrays() got no array", "Give x, or x and y.")
        if len(set(sizes)) != 1 or sizes[0] is None:
            raise UserError(
                f"arrays of {', '.join(map(str, sizes))} examples",
                "All arrays of a data set have one row per example.",
            )
        self._size = sizes[0]
        parts = list(leaves(self._tree))
        nbytes = sum(part.numel() * part.element_size() for part in parts)
        self._bytes = max(1, nbytes // max(1, self._size))
        self._is_plain = all(map(_is_plain, parts))

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Any:
        return rows(self._tree, lambda tensor: tensor[index].clone())

    def stretch(self, start: int, stop: int) -> Arrays:
        """The examples from ``start`` to before ``stop``, of the same memory."""
        made = copy(self)
        made._tree = rows(self._tree, lambda tensor: rows_of(tensor, slice(start, stop)))
        made._size = stop - start
        return made

    def tensors(self) -> Iterator[Tensor]:
        """All arrays."""
        return leaves(self._tree)

    def gather(self, indices: slice | Tensor) -> Any:
        """The rows at ``indices``, copied."""
        if isinstance(indices, slice):
            return rows(self._tree, lambda tensor: rows_of(tensor, indices).clone())
        return rows(self._tree, lambda tensor: tensor.index_select(0, indices))

    def at_once(self, size: int) -> int:
        """How many batches of ``size`` examples `gather_each` is for: such as a cache holds."""
        fit = CHUNK // (self._bytes * max(1, size))
        return min(max(1, fit), MOST) if self._is_plain else 1

    def gather_each(self, batches: Sequence[slice | Tensor], placing: Placing = HOST) -> list[Any]:
        """As `gather` of each, with one copy for all of them, and one to where they are to be.

        They share memory and, as ``.data`` has it, nothing else: a write into one batch is seen
        neither in another one nor by the graph of another one.
        """
        numbers = [
            np.arange(b.start, b.stop) if isinstance(b, slice) else b.numpy() for b in batches
        ]
        found = self.gather(torch.from_numpy(np.concatenate(numbers)))
        sizes = [*map(len, numbers)]
        parts = [placing.move_parts(tensor, sizes) for tensor in leaves(found)]
        if isinstance(found, Tensor):
            return list(parts[0])
        if isinstance(found, tuple) and all(map(torch.is_tensor, found)):
            return list(zip(*parts, strict=True))
        each = (iter(part) for part in zip(*parts, strict=True))
        return [rows(found, lambda _, part=part: next(part)) for part in each]  # type: ignore[misc]


def _is_plain(tensor: Tensor) -> bool:
    """Whether it is ordinary memory of the host, which nothing is differentiated by."""
    is_strided = tensor.is_cpu and tensor.layout == torch.strided
    return is_strided and tensor.is_contiguous() and not tensor.requires_grad


def _is_nested(array: Any) -> bool:
    """Whether a tuple holds arrays; one of numbers is an array."""
    return isinstance(array, tuple) and any(
        isinstance(part, tuple | Mapping) or hasattr(part, "__array__") for part in array
    )


def _tree(array: Any) -> Any:
    if isinstance(array, Mapping):
        return {name: _tree(part) for name, part in array.items()}
    return tuple(_tree(part) for part in array) if _is_nested(array) else _tensor(array)


def _tensor(array: Any) -> Tensor:
    try:
        if isinstance(array, np.ndarray) and min(array.strides, default=0) < 0:
            array = array.copy()  # as one that was turned round
        return torch.as_tensor(array)
    except (TypeError, ValueError, RuntimeError) as error:
        if "'str'" in str(error) or "numpy.str_" in str(error):
            raise UserError(
                "texts are no numbers, which a batch is made of",
                "Tokenize them first, or give a data set of dicts; sp.data.tokens reads texts.",
            ) from error
        raise UserError(
            f"data that is a {type(array).__name__} makes no tensor: {error}",
            "Give arrays or tensors of numbers, one row per example.",
        ) from error


def few_rows(source: object) -> list[Tensor]:
    """Some rows of each array of a source in memory, to compare with another task's.

    Args:
        source: Of a data set.

    Returns:
        Float64, none of it infinite or no number; empty where ``source`` is not in memory.
    """
    if isinstance(source, Arrays):
        tensors = list(source.tensors())
    elif type(source) is TensorDataset:
        tensors = list(source.tensors)
    else:
        return []
    found = []
    for tensor in tensors:
        if tensor.layout == torch.strided and len(tensor):
            rows = tensor[torch.linspace(0, len(tensor) - 1, 8).long()]
            numbers = torch.view_as_real(rows) if rows.is_complex() else rows
            found.append(numbers.double().nan_to_num(0.0, 0.0, 0.0))
    return found


def which_examples(source: object) -> int:
    """A checksum of which examples a source has, to compare with another task's.

    It tells one part of a data set from another: who divided it by ranks has given each task a
    part, of which each would read a part again.

    Args:
        source: Of a data set.

    Returns:
        0 for a stream; of most kinds of data sets it knows the number of examples alone.
    """
    if not isinstance(source, Source):
        return 0
    found = crc32(b"%d" % len(source))
    if isinstance(source, Subset):
        found = crc32(np.asarray(source.indices, dtype=np.int64).tobytes(), found)
        return found ^ which_examples(source.dataset)
    if isinstance(source, ConcatDataset):
        return crc32(repr([which_examples(part) for part in source.datasets]).encode(), found)
    if isinstance(source, TableSource):
        return crc32(source.some_values().encode(), found)
    return found
