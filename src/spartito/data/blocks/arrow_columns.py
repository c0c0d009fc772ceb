"""Columns of arrow's as arrays, where they are numbers, else as sequences."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from spartito.data.blocks.formats import Missing


def column_values(chunked: Any) -> Any:
    """A column with a row for each example: an array, or a sequence of values.

    Args:
        chunked: A `pyarrow.ChunkedArray`.

    Returns:
        Numbers, and lists of numbers that are equally long, as a numpy array, which may be arrow's
        own memory; anything else as an `ArrowColumn`.
    """
    types: Any = importlib.import_module("pyarrow").types
    column = chunked.combine_chunks()
    if hasattr(column, "chunks"):  # of some types it stays in parts
        column = column.chunk(0)
    kind = column.type
    plain = types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)
    if plain and column.null_count == 0:
        return column.to_numpy(zero_copy_only=False)
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    inner = kind.value_type if is_list else None
    numbers = is_list and (types.is_integer(inner) or types.is_floating(inner))
    rows = _rows(column, types) if numbers and column.null_count == 0 else None
    return ArrowColumn(column, numbers) if rows is None else rows


class ArrowColumn(Sequence[Any]):
    """Values of arrow's that become Python's when somebody asks for one.

    Args:
        column: An array of arrow's.
        numbers: Whether its values are lists of numbers, which become arrays.
    """

    def __init__(self, column: Any, numbers: bool) -> None:
        self._column, self._numbers = column, numbers

    def __len__(self) -> int:
        return len(self._column)

    @property
    def nbytes(self) -> int:
        """The memory that its values take."""
        return int(self._column.nbytes)

    def __getitem__(self, row: Any) -> Any:
        scalar = self._column[row]
        if not scalar.is_valid:
            return Missing("is null")
        if self._numbers and scalar.values.null_count:
            return Missing("has a null among its numbers", True)
        if self._numbers:
            return scalar.values.to_numpy(zero_copy_only=False)
        value = scalar.as_py()
        if isinstance(value, dict) and isinstance(value.get("bytes"), bytes):
            return value["bytes"]  # how Hugging Face's data sets keep images
        return value


def _rows(column: Any, types: Any) -> Any:
    """Lists of numbers that are all as long as an array ``(rows, length)``; else None."""
    values = column.flatten()
    if values.null_count or not len(column) or len(values) % len(column):
        return None
    length = len(values) // len(column)
    if not types.is_fixed_size_list(column.type):
        lengths = np.diff(column.offsets.to_numpy())
        if (lengths != length).any():
            return None
    return values.to_numpy(zero_copy_only=False).reshape(len(column), length)
