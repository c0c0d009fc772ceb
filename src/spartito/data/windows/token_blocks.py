"""The documents of a block as tokens, one behind the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from spartito.data.blocks.formats import Columns, Missing
from spartito.data.reading.order import Indices
from spartito.data.windows.documents import Documents
from spartito.data.windows.tokenizers import Tokenizer
from spartito.errors import UserError
from spartito.storage.span_cache import Entry, SpanCache

VERSION = "1"
"""Of what is kept of a block."""
TOGETHER = 1 << 20
"""Characters that become tokens at once: what tokenizers return takes a hundred times as much."""
MOST = 2**31
"""Tokens are below it."""

Tokens = npt.NDArray[Any]


@dataclass(frozen=True)
class TokenBlock:
    """Tokens of documents.

    Attributes:
        tokens: Of any type of whole numbers, ``(tokens,)``.
        starts: Where each document begins in it, the first one at 0: ``(documents,)``. None of
            them is empty.
        missing: How many documents could not be read.
        first: The number of the first of these in its block, and why; "" where there is none.
    """

    tokens: Tokens
    starts: Indices
    missing: int = 0
    first: str = ""

    def part(self, start: int, stop: int) -> TokenBlock:
        """The tokens from ``start`` to ``stop``; what is left of a document is one."""
        starts = np.unique(np.maximum(self.starts - start, 0))
        return TokenBlock(self.tokens[start:stop], starts[starts < stop - start])


def join(blocks: Sequence[TokenBlock]) -> TokenBlock:
    """The documents of several blocks, one behind the other."""
    if len(blocks) == 1:
        return blocks[0]
    edges = np.cumsum([0, *(len(block.tokens) for block in blocks)])
    starts = [block.starts + edge for block, edge in zip(blocks, edges[:-1], strict=True)]
    return TokenBlock(
        np.concatenate([block.tokens for block in blocks]), np.concatenate(starts).astype(np.int64)
    )


@dataclass(frozen=True)
class Encoding:
    """How documents become tokens.

    Args:
        column: Where a document stands in an example.
        tokenizer: For texts; None: the column has tokens.
        eos: Is put behind each document that does not end with it; None: nothing is.
    """

    column: str
    tokenizer: Tokenizer | None
    eos: int | None

    @property
    def words(self) -> tuple[str, ...]:
        """All that tokens depend on besides the documents."""
        identity = "" if self.tokenizer is None else self.tokenizer.identity
        return self.column, identity, str(self.eos)

    def encode(self, columns: Columns) -> TokenBlock:
        """The tokens of a block's documents.

        Raises:
            UserError: The column has something else.
        """
        values = columns[self.column]
        if isinstance(values, np.ndarray) and values.dtype.kind in "iu" and values.ndim == 2:
            documents: list[Any] = list(values)
        else:
            documents = [values[row] for row in range(len(values))]
        wrong = [(row, each.why) for row, each in enumerate(documents) if isinstance(each, Missing)]
        first = f"number {wrong[0][0]} {wrong[0][1]}" if wrong else ""
        found = [each for each in documents if not isinstance(each, Missing)]
        parts = [self._ended(each) for each in self._tokens(found) if len(each)]
        lengths = np.array([len(each) for each in parts], dtype=np.int64)
        tokens = np.concatenate(parts) if parts else np.zeros(0, np.int64)
        return TokenBlock(self._small(tokens), np.cumsum(lengths) - lengths, len(wrong), first)

    def _tokens(self, documents: list[Any]) -> Iterator[Tokens]:
        wanted = "tokens" if self.tokenizer is None else "texts"
        for document in documents:
            if (wanted == "texts") != isinstance(document, str):
                raise self._other(document, wanted)
        if self.tokenizer is None:
            yield from (self._array(document) for document in documents)
            return
        for texts in _groups(documents):
            yield from (self._array(found) for found in self.tokenizer.encode(texts))

    def _array(self, tokens: Any) -> Tokens:
        array = np.asarray(tokens)
        if array.ndim != 1 or (array.dtype.kind not in "iu" and len(array)):
            raise self._other(tokens, "tokens")
        return array.astype(np.int64)

    def _ended(self, tokens: Tokens) -> Tokens:
        if self.eos is None or tokens[-1] == self.eos:
            return tokens
        return np.append(tokens, np.int64(self.eos))

    def _small(self, tokens: Tokens) -> Tokens:
        """The same in fewer bytes."""
        least, most = (int(tokens.min()), int(tokens.max())) if len(tokens) else (0, 0)
        if least < 0 or most >= MOST:
            raise UserError(
                f"a token is {least if least < 0 else most} in the column {self.column!r}",
                f"Tokens are numbers from 0 to {MOST - 1}.",
            )
        return tokens.astype(np.uint16 if most < 1 << 16 else np.int32)

    def _other(self, document: Any, wanted: str) -> UserError:
        kind = type(document).__name__
        if isinstance(document, np.ndarray):
            kind = f"arrays of {document.dtype}, {document.ndim}-dimensional"
        hint = "Is it the column? column=... names another one."
        if wanted == "tokens" and isinstance(document, str):
            hint = "Texts want a tokenizer: tokenizer=..."
        if wanted == "tokens" and self.tokenizer is not None:
            return UserError(
                f"the tokenizer returns {kind} of a text", "It returns whole numbers, in a list."
            )
        if wanted == "texts":
            hint = "Without a tokenizer a column of tokens is taken as it is; column=... names it."
        return UserError(f"the column {self.column!r} has no {wanted}: it has {kind}", hint)


@dataclass(frozen=True, eq=False)
class TokenBlocks:
    """Blocks of documents as tokens.

    Args:
        documents: Reads the blocks.
        encoding: What becomes of one.
        cache: Keeps the tokens of texts.
    """

    documents: Documents
    encoding: Encoding
    cache: SpanCache

    def load(self, block: int) -> TokenBlock:
        """The tokens of a block.

        Raises:
            UserError: It cannot be read, or has something else in the column.
        """
        identity = self.documents.identity(block)
        if self.encoding.tokenizer is None or identity is None:
            return self._encoded(block)
        entry = Entry(("tokens", VERSION, *identity, *self.encoding.words))
        return _read(self.cache.get(entry, lambda: _written(self._encoded(block))))

    def _encoded(self, block: int) -> TokenBlock:
        columns = self.documents.load(block)
        try:
            return self.encoding.encode(columns)
        except UserError as error:
            raise UserError(f"{self.documents.locate(block)}: {error}") from error
        except Exception as error:
            error.add_note(f"The tokenizer had documents of {self.documents.locate(block)}.")
            raise


class _Kept(msgspec.Struct, frozen=True):
    """A `TokenBlock` in the cache."""

    kind: str
    tokens: bytes
    starts: bytes
    missing: int
    first: str


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Kept)


def _written(block: TokenBlock) -> bytes:
    kind, tokens, starts = block.tokens.dtype.str, block.tokens.tobytes(), block.starts.tobytes()
    return _encoder.encode(_Kept(kind, tokens, starts, block.missing, block.first))


def _read(data: bytes) -> TokenBlock:
    kept = _decoder.decode(data)
    tokens = np.frombuffer(kept.tokens, kept.kind)
    return TokenBlock(tokens, np.frombuffer(kept.starts, np.int64), kept.missing, kept.first)


def _groups(texts: list[str]) -> Iterator[list[str]]:
    """Texts in groups that are not long."""
    group: list[str] = []
    size = 0
    for text in texts:
        if group and size + len(text) > TOGETHER:
            yield group
            group, size = [], 0
        group.append(text)
        size += len(text)
    if group:
        yield group
