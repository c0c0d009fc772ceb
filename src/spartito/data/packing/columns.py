"""What a column of examples holds, as the writers of formats need to know it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from spartito.data.blocks.formats import Columns, Missing
from spartito.data.images.headers import READABLE, sniff
from spartito.errors import UserError

Kind = Literal["image", "bytes", "string", "integer", "number", "boolean", "array", "json"]

KEY = "key"
"""The column by which an example is known."""

INTEGERS, NUMBERS = "int64", "float64"


@dataclass(frozen=True)
class Column:
    """One column.

    Attributes:
        name: As users call it.
        kind: What a value is.
        dtype: Of numbers and of arrays, as numpy calls it; of images the format, "" for several.
    """

    name: str
    kind: Kind
    dtype: str = ""

    def __str__(self) -> str:
        if self.kind == "array":
            return f"{self.dtype} array"
        return self.dtype if self.kind in ("integer", "number") else self.kind


@dataclass(frozen=True)
class Row:
    """An example, to be packed.

    Attributes:
        key: Which one it is.
        values: By column; those that it does not have are left out.
    """

    key: str
    values: Mapping[str, Any]


def column_of(name: str, values: Iterable[Any]) -> Column:
    """What a column holds, by the values of one block.

    Args:
        name: Of the column.
        values: An array, or a sequence.

    Raises:
        UserError: No value is there, or it is of a type that no format has.
    """
    if isinstance(values, np.ndarray) and values.ndim > 1:
        return Column(name, "array", values.dtype.name)
    found = next((value for value in values if not isinstance(value, Missing)), None)
    if found is None:
        raise UserError(
            f"the first block has no value of {name!r}",
            "Choose columns without it: --columns a,b.",
        )
    if isinstance(found, bytes):
        image = sniff(found)
        return Column(name, "image", image) if image in READABLE else Column(name, "bytes")
    if isinstance(found, np.ndarray):
        return Column(name, "array", found.dtype.name)
    if isinstance(found, str):
        return Column(name, "string")
    if isinstance(found, bool | np.bool_):
        return Column(name, "boolean")
    if isinstance(found, int | np.integer):
        return Column(name, "integer", getattr(found, "dtype", np.dtype(INTEGERS)).name)
    if isinstance(found, float | np.floating):
        return Column(name, "number", getattr(found, "dtype", np.dtype(NUMBERS)).name)
    if isinstance(found, dict | list):
        return Column(name, "json")
    raise UserError(
        f"{name!r} holds {type(found).__name__}, which is not packed",
        "Choose columns without it: --columns a,b.",
    )


def columns_of(block: Columns) -> tuple[Column, ...]:
    """What the columns of a block hold."""
    return tuple(column_of(name, values) for name, values in block.items())


def keys_of(paths: Sequence[str]) -> list[str]:
    """What examples are known by: paths without their endings, if these differ, else with them.

    Args:
        paths: Of files.

    Returns:
        A key for each. It is text, and has no dot after the last slash, where a sample of
        WebDataset ends.
    """
    short = [os.path.splitext(path)[0] for path in paths]
    return [plain_key(key) for key in (short if len({*short}) == len(short) else paths)]


def plain_key(key: str) -> str:
    """A key without dots in its last part, as text that UTF-8 can hold."""
    head, slash, last = key.replace(os.sep, "/").rpartition("/")
    text = f"{head}{slash}{last.replace('.', '%2E')}"
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
