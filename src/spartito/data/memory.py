"""Arrays in memory as a source: whole batches are gathered at once.

What goes out is always a copy: a model or a ``.map`` that changes its input in place must not
change the user's arrays, and with them every later epoch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from spartito.data.collate import leaves, rows
from spartito.errors import UserError


class Arrays:
    """Examples that are the rows of tensors in memory.

    One array gives tensors, several give tuples; a dict of arrays gives dicts. Both may hold
    further tuples and dicts of arrays: ``arrays((left, right), y)`` gives ``((l, r), y)``.
    """

    def __init__(self, *arrays: Any) -> None:
        alone = len(arrays) == 1 and not _is_nested(arrays[0])
        self._tree = _tree(arrays[0]) if alone else tuple(_tree(array) for array in arrays)
        sizes = [len(tensor) if tensor.dim() else None for tensor in leaves(self._tree)]
        if not sizes:
            raise UserError("arrays() got no array", "Give x, or x and y.")
        if len(set(sizes)) != 1 or sizes[0] is None:
            raise UserError(
                f"arrays of {', '.join(map(str, sizes))} examples",
                "All arrays of a data set have one row per example.",
            )
        self._size = sizes[0]

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Any:
        return rows(self._tree, lambda tensor: tensor[index].clone())

    def gather(self, indices: slice | Tensor) -> Any:
        """The rows at ``indices``, copied."""
        if isinstance(indices, slice):
            return rows(self._tree, lambda tensor: tensor[indices].clone())
        return rows(self._tree, lambda tensor: tensor.index_select(0, indices))


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
        return torch.as_tensor(array)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"an array of {type(array).__name__} is no tensor: {error}") from error
