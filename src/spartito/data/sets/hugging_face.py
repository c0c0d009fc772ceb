"""Data sets of Hugging Face's package ``datasets``, read where they lie: in Arrow's files.

They come as objects, so the package is never imported here.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spartito.data.blocks.arrow_columns import column_values
from spartito.data.blocks.formats import Missing
from spartito.data.reading.collate import collate, join
from spartito.data.source import BatchSource, Found
from spartito.errors import CorruptSampleError, UserError

Column = Tensor | list[Any]


def is_table(data: object) -> bool:
    """Whether it is a `datasets.Dataset`."""
    return _is_a(data, "Dataset")


def is_stream(data: object) -> bool:
    """Whether it is a `datasets.IterableDataset`."""
    return _is_a(data, "IterableDataset")


def check_one_split(data: object) -> None:
    """Refuse a `datasets.DatasetDict`, and a stream that was divided among ranks already.

    Raises:
        UserError: It is one.
    """
    if _is_a(data, "DatasetDict") or _is_a(data, "IterableDatasetDict"):
        assert isinstance(data, Mapping)
        names = [repr(name) for name in data]
        raise UserError(
            f"a {type(data).__name__} is several data sets: {', '.join(names)}",
            f"Give one of them: data[{names[0] if names else 'name'}].",
        )
    if is_stream(data) and (node := getattr(data, "_distributed", None)) is not None:
        raise UserError(
            f"an IterableDataset that split_dataset_by_node has divided among {node.world_size}",
            "Spartito deals out the examples itself: leave split_dataset_by_node out.",
        )


def collate_rows(examples: Sequence[Any]) -> Any:
    """As `collate`; lists of numbers are arrays there, and pictures tensors.

    Args:
        examples: As ``datasets`` gives them, or as maps return them.

    Returns:
        A batch. Pictures have the shape ``(channels, height, width)``, as that package's own
        tensors of them.
    """
    first = examples[0]
    if isinstance(first, Mapping):
        return {name: collate_rows([example[name] for example in examples]) for name in first}
    if isinstance(first, tuple):
        return tuple(collate_rows(column) for column in zip(*examples, strict=True))
    values = [_plain(example) for example in examples]
    return values if isinstance(values[0], list) else collate(values)


@dataclass(frozen=True, eq=False)
class TableSource(BatchSource):
    """A `datasets.Dataset`: examples are dicts of its columns, as it gives them.

    Args:
        table: It, in any format for which it gives Python's objects, numpy's or torch's.

    Raises:
        UserError: It is in another format.
    """

    table: Any
    collate = staticmethod(collate_rows)

    def __post_init__(self) -> None:
        if self.format not in (None, "numpy", "torch", "custom"):
            raise UserError(
                f"a Dataset with the format {self.format!r}",
                'Give data.with_format("torch"), or "numpy".',
            )

    @property
    def format(self) -> str | None:
        """What its values are; None: Python's objects, "custom": what a function makes of them."""
        found: str | None = self.table.format["type"]
        return found

    def __len__(self) -> int:
        """How many examples there are."""
        return len(self.table)

    def __getitem__(self, index: int) -> Any:
        """One example.

        Raises:
            CorruptSampleError: It has a picture that cannot be decoded.
        """
        try:
            return self.table[index]
        except OSError as error:  # as Pillow raises it
            raise _undecoded(index, error) from error

    def __getitems__(self, indices: list[int]) -> list[Any]:
        """Several examples, read together."""
        found: list[Any] = self.table.__getitems__(indices)
        return found

    def some_values(self) -> str:
        """The whole numbers and texts of some examples, for which nothing has to be decoded.

        Others may differ by rounding from what another machine has computed.
        """
        features = self.table.features
        inner = {name: getattr(features[name], "feature", features[name])
                 for name in self._plain_columns}  # fmt: skip
        exact = [name for name, kind in inner.items() if "float" not in str(kind.dtype)]
        if not exact or not len(self):
            return ""
        found = self.table.with_format("arrow", columns=exact)
        return repr(found[[number * (len(self) - 1) // 7 for number in range(8)]].to_pylist())

    def describe(self) -> str:
        """As `Described.describe`."""
        names = ", ".join(self.table.column_names)
        return f"a Dataset of Hugging Face: {len(self):,} examples of {names}"

    def read_batch(self, indices: Sequence[int]) -> Found:
        """As `BatchSource.read_batch`: whole columns; what is None or null is corrupt."""
        if not len(indices):
            return Found(None, [], [])
        try:
            columns = self._read(indices if isinstance(indices, range) else list(indices))
        except Exception:
            return self._one_by_one(indices)
        read = {name: _column(values) for name, values in columns.items()}
        wrong = {
            row: f"{name!r} of example {indices[row]} {_missing(value)}"
            for name, column in read.items()
            if isinstance(column, list)
            for row, value in enumerate(column)
            if _missing(value)
        }
        kept = [row for row in range(len(indices)) if row not in wrong]
        corrupt = [(indices[row], wrong[row]) for row in sorted(wrong)]
        if not kept:
            return Found(None, kept, corrupt)
        return Found({name: _kept(read[name], kept) for name in self._names(read)}, kept, corrupt)

    def _read(self, keys: range | list[int]) -> dict[str, Any]:
        """The values of some examples, by column."""
        columns: dict[str, Any] = {}
        if self._numbers is not None:
            found = self._numbers[keys]
            columns.update({name: column_values(found.column(name)) for name in found.column_names})
        if self._others is not None:
            columns.update(self._others[keys])
        return columns

    def _one_by_one(self, indices: Sequence[int]) -> Found:
        """What can be read of examples that cannot all be: a picture that is none is corrupt."""
        found: list[Any] = []
        kept: list[int] = []
        corrupt: list[tuple[int, str]] = []
        for row, index in enumerate(indices):
            try:
                self._read([index])
            except OSError as error:
                corrupt.append((index, str(_undecoded(index, error))))
                continue
            except Exception as error:
                error.add_note(f"This was example {index} of the Dataset.")
                raise
            one = self.read_batch([index])
            corrupt += one.corrupt
            if one.data is not None:
                found.append(one.data)
                kept.append(row)
        return Found(join(found) if found else None, kept, corrupt)

    def _names(self, read: Mapping[str, Any]) -> list[str]:
        """The columns in the order of the table's, then those that a function adds."""
        own = [name for name in self.table.column_names if name in read]
        return own + [name for name in read if name not in own]

    @cached_property
    def _plain_columns(self) -> list[str]:
        """Those whose values are in Arrow as they are, of a table that gives Python's objects."""
        if self.format is not None:
            return []
        features, chosen = self.table.features, self.table.format["columns"]
        return [name for name in chosen if _is_plain(features[name])]

    @cached_property
    def _numbers(self) -> Any:
        """The table of these columns, in Arrow; None where there is none."""
        chosen = self._plain_columns
        return self.table.with_format("arrow", columns=chosen) if chosen else None

    @cached_property
    def _others(self) -> Any:
        """The table of all other columns; None where there is none."""
        plain, chosen = set(self._plain_columns), self.table.format["columns"]
        if not plain:
            return self.table
        others = [name for name in chosen if name not in plain]
        return self.table.with_format(None, columns=others) if others else None


def _undecoded(index: int, error: OSError) -> CorruptSampleError:
    return CorruptSampleError(f"example {index} cannot be decoded: {error}")


def _is_a(data: object, name: str) -> bool:
    kind = getattr(sys.modules.get("datasets"), name, None)
    return isinstance(kind, type) and isinstance(data, kind)


def _is_plain(feature: Any) -> bool:
    """Whether a column is numbers or texts, or lists of them: nothing has to be decoded."""
    inner = getattr(feature, "feature", feature)
    return type(inner).__name__ in ("Value", "ClassLabel")


def _column(values: Any) -> Column:
    """The values of a batch as a tensor where they are one."""
    if isinstance(values, Tensor):
        return values
    if isinstance(values, np.ndarray) and values.dtype.kind in "biufc":
        return torch.from_numpy(values if values.flags.writeable else values.copy())
    return [values[row] for row in range(len(values))]


def _kept(column: Column, kept: list[int]) -> Any:
    if isinstance(column, Tensor):
        return column if len(kept) == len(column) else column[kept]
    return collate_rows([column[row] for row in kept])


def _missing(value: Any) -> str:
    """Why a value cannot be used; "" where it can."""
    if isinstance(value, Missing):
        return value.why
    return "is None" if value is None else ""


def _plain(value: Any) -> Any:
    """What `collate` takes: lists of numbers as arrays, pictures as tensors."""
    if isinstance(value, list):
        try:
            array = np.asarray(value)
        except ValueError:  # lists of several lengths
            return value
        return array if array.dtype.kind in "biuf" else value
    if type(value).__module__.partition(".")[0] == "PIL":
        pixels = np.array(value)
        pixels = pixels[:, :, None] if pixels.ndim == 2 else pixels
        return torch.from_numpy(pixels).permute(2, 0, 1)
    return value
