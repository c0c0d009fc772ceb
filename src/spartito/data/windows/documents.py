"""Where documents come from: packed files, or a table of Hugging Face's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from spartito.data.blocks.arrow_columns import column_values
from spartito.data.blocks.formats import TARGET, Block, Columns, even_blocks
from spartito.data.blocks.reading import BlockFiles, check_unchanged
from spartito.errors import UserError
from spartito.names import nearest

Identity = tuple[str, ...] | None
"""All that documents depend on; None: nobody knows, so nothing is kept of them."""


@dataclass(frozen=True)
class Part:
    """Blocks that follow each other and are counted together.

    Attributes:
        name: What people call it.
        blocks: How many it has.
        identity: As `Identity`.
    """

    name: str
    blocks: int
    identity: Identity


class Documents(Protocol):
    """Blocks of examples, a column of which has documents."""

    @property
    def name(self) -> str:
        """What people call all of them."""
        ...

    @property
    def parts(self) -> Sequence[Part]:
        """All parts, in their order."""
        ...

    def load(self, block: int) -> Columns:
        """The examples of a block.

        Raises:
            UserError: It cannot be read.
        """
        ...

    def identity(self, block: int) -> Identity:
        """What the documents of a block depend on."""
        ...

    def locate(self, block: int) -> str:
        """Where a block lies, for people."""
        ...

    def check_unchanged(self) -> None:
        """Before a pass.

        Raises:
            UserError: They are others than when they were opened.
        """
        ...


@dataclass(frozen=True, eq=False)
class PackedDocuments:
    """Documents in packed files.

    Args:
        read: Reads their blocks.
    """

    read: BlockFiles

    @property
    def name(self) -> str:
        """As `Documents.name`."""
        return f"{self.read.files.url}: {self.read.format.name}"

    @cached_property
    def parts(self) -> Sequence[Part]:
        """As `Documents.parts`: a file is one."""
        found = self.read.blocks
        return [
            Part(
                f"{self.read.files.url}/{file.name}",
                len(index.blocks),
                self._words(number, ",".join(str(block.stop) for block in index.blocks)),
            )
            for number, (file, index) in enumerate(zip(found.files, found.indexes, strict=True))
        ]

    def load(self, block: int) -> Columns:
        """As `Documents.load`."""
        return self.read.load(block)

    def identity(self, block: int) -> Identity:
        """As `Documents.identity`."""
        at = self.read.blocks.block(block)
        file, _ = self.read.blocks.position(block)
        return self._words(file, f"{at.start} {at.stop} {at.rows}")

    def locate(self, block: int) -> str:
        """As `Documents.locate`."""
        file, _, _ = self.read.blocks.find(block)
        return f"{self.read.files.url}/{file.name}"

    def check_unchanged(self) -> None:
        """As `Documents.check_unchanged`."""
        check_unchanged(self.read.files, self.read.blocks.files)

    def _words(self, number: int, which: str) -> Identity:
        file = self.read.blocks.files[number]
        if not file.version:
            return None
        where = (self.read.format.name, self.read.files.url, file.name)
        return *where, str(file.size), file.version, which


@dataclass(frozen=True, eq=False)
class TableDocuments:
    """Documents in a `datasets.Dataset`, which is known by its fingerprint.

    Args:
        table: It.
        column: Where a document stands.

    Raises:
        UserError: There is no such column, or not one example.
    """

    table: Any
    column: str

    def __post_init__(self) -> None:
        if self.column not in self.table.column_names:
            raise UserError(
                f"there is no column {self.column!r}", nearest(self.column, self.table.column_names)
            )
        if not len(self.table):
            raise UserError("the Dataset has no examples")

    @property
    def name(self) -> str:
        """As `Documents.name`."""
        return f"a Dataset of Hugging Face, {len(self.table):,} examples"

    @cached_property
    def parts(self) -> Sequence[Part]:
        """As `Documents.parts`: there is one."""
        return [Part("the Dataset", len(self._blocks), self._words("all"))]

    def load(self, block: int) -> Columns:
        """As `Documents.load`."""
        rows = range(int(self._edges[block]), int(self._edges[block + 1]))
        return {self.column: column_values(self._arrow[rows].column(self.column))}

    def identity(self, block: int) -> Identity:
        """As `Documents.identity`."""
        return self._words(f"{self._edges[block]} {self._edges[block + 1]}")

    def locate(self, block: int) -> str:
        """As `Documents.locate`."""
        return f"the Dataset, examples {self._edges[block]} to {self._edges[block + 1]}"

    def check_unchanged(self) -> None:
        """As `Documents.check_unchanged`: it has a fingerprint because it never is another."""

    def _words(self, which: str) -> Identity:
        return "a table", str(self.table._fingerprint), str(len(self._blocks)), which

    @cached_property
    def _arrow(self) -> Any:
        return self.table.with_format("arrow", columns=[self.column])

    @cached_property
    def _blocks(self) -> Sequence[Block]:
        data, rows = self.table.data, len(self.table)
        return even_blocks(rows, data.nbytes * rows // max(1, data.num_rows), TARGET)

    @cached_property
    def _edges(self) -> Any:
        return np.cumsum([0, *(block.rows for block in self._blocks)])
