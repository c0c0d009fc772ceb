"""Plain text: a document in each file, or between separators. A block is a run of documents."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from spartito.data.blocks.formats import (
    TARGET,
    Block,
    Columns,
    FileIndex,
    Missing,
    Span,
    whole_block,
)
from spartito.errors import UserError
from spartito.storage.files import File, RangeReader

LONGEST = 256 << 20
"""Bytes of a document: it is in memory as a whole, several times while it becomes tokens."""
COLUMN = "text"


class Texts:
    """Reads text in UTF-8, with the ends of lines that Python's own files have.

    Args:
        columns: None, or ``("text",)``: there is no other.
        separator: What stands between two documents; None: a file is one document.

    Raises:
        UserError: Another column, or an empty separator.
    """

    suffixes: tuple[str, ...] = (".txt",)

    def __init__(
        self, columns: tuple[str, ...] | None = None, separator: str | None = None
    ) -> None:
        if columns not in (None, (COLUMN,)):
            raise UserError(f"text files have no column {columns[0]!r}", f"It is {COLUMN!r}.")
        if separator == "":
            raise UserError("separator=''", r'For blank lines "\n\n", for lines "\n".')
        self.name = "text" if separator is None else f"text between {separator!r}"
        self._plain = re.compile(re.escape(separator).encode()) if separator else None
        either = re.escape(separator or "").replace(re.escape("\n"), "\r?\n")
        self._either = re.compile(either.encode())

    def index(self, file: RangeReader, facts: File) -> FileIndex:
        """As `Format.index`: reads the file once where there is a separator."""
        if self._plain is None:
            _check_length(facts, facts.size)
            return FileIndex([Block(1, 0, facts.size)] if facts.size else [])
        blocks: list[Block] = []
        start, rest = 0, b""
        while data := file.read(TARGET):
            rest += data
            ends = [found.end() for found in self._separator(rest).finditer(rest)]
            stop = ends[-1] if ends else 0
            _check_length(facts, len(rest) - stop)
            if stop and file.tell() < facts.size:
                blocks.append(Block(len(self._documents(rest[:stop])), start, start + stop))
                start, rest = start + stop, rest[stop:]
        blocks.append(Block(len(self._documents(rest)), start, start + len(rest)))
        return FileIndex([block for block in blocks if block.rows])

    spans = staticmethod(whole_block)

    def columns(self, index: FileIndex, block: int, parts: Sequence[tuple[Span, bytes]]) -> Columns:
        """As `Format.columns`."""
        return {COLUMN: [_text(document) for document in self._documents(parts[0][1])]}

    def _documents(self, data: bytes) -> list[bytes]:
        if self._plain is None:
            return [data]
        return [part for part in self._separator(data).split(data) if part.strip()]

    def _separator(self, data: bytes) -> re.Pattern[bytes]:
        """The separator as it may stand there: an optional character makes it 50 times slower."""
        return self._either if self._plain is None or b"\r" in data else self._plain


def _text(document: bytes) -> Any:
    try:
        text = document.decode()
    except UnicodeDecodeError as error:
        return Missing(f"is no UTF-8: byte {error.start} is {document[error.start]:#04x}", True)
    return text.replace("\r\n", "\n").removeprefix("\ufeff")


def _check_length(facts: File, size: int) -> None:
    if size > LONGEST:
        raise UserError(
            f"{facts.name} has a document of more than {LONGEST >> 20} MiB",
            r'Say what stands between documents: separator="\n\n" for blank lines, "\n" for lines.',
        )
