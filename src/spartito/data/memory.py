"""Arrays in memory as a source: whole batches are gathered at once.

What goes out is always a copy: a model or a ``.map`` that changes its input in place must not
change the user's arrays, and with them every later epoch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spartito.errors import UserError


class Arrays:
    """Examples that are the rows of tensors in memory.

    One array gives tensors, several give tuples; a dict of arrays gives dicts.
    """

    def __init__(self, *arrays: Any) -> None:
        self._names: tuple[str, ...] | None = None
        if len(arrays) == 1 and isinstance(arrays[0], dict):
            self._names = tuple(arrays[0])
            arrays = tuple(arrays[0].values())
        if not arrays:
            raise UserError("arrays() got no array", "Give x, or x and y.")
        self._tensors = tuple(_tensor(array) for array in arrays)
        sizes = [len(tensor) if tensor.dim() else None for tensor in self._tensors]
        if len(set(sizes)) != 1 or sizes[0] is None:
            raise UserError(
                f"arrays of {', '.join(map(str, sizes))} examples",
                "All arrays of a data set have one row per example.",
            )
        self._size = sizes[0]

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Any:
        return self._pack(tuple(tensor[index].clone() for tensor in self._tensors))

    def gather(self, indices: slice | Tensor) -> Any:
        """The rows at ``indices``, copied."""
        if isinstance(indices, slice):
            return self._pack(tuple(tensor[indices].clone() for tensor in self._tensors))
        return self._pack(tuple(tensor.index_select(0, indices) for tensor in self._tensors))

    def _pack(self, parts: tuple[Tensor, ...]) -> Any:
        if self._names is not None:
            return dict(zip(self._names, parts, strict=True))
        return parts if len(parts) > 1 else parts[0]


def _tensor(array: Any) -> Tensor:
    try:
        return torch.as_tensor(array)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"an array of {type(array).__name__} is no tensor: {error}") from error
