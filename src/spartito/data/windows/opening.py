"""Texts and tokens as a data set of windows."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

from spartito.data.blocks.formats import Format, make_format
from spartito.data.blocks.index import find_blocks
from spartito.data.blocks.locating import locate
from spartito.data.blocks.reading import BlockFiles
from spartito.data.blocks.texts import Texts
from spartito.data.dataset import Dataset
from spartito.data.reading.prefetch import reading_threads
from spartito.data.sets.hugging_face import check_one_split, is_table
from spartito.data.windows.counts import count_tokens
from spartito.data.windows.documents import Documents, PackedDocuments, TableDocuments
from spartito.data.windows.source import Layout, WindowSource
from spartito.data.windows.token_blocks import Encoding, TokenBlocks
from spartito.data.windows.tokenizers import Tokenizer, as_tokenizer
from spartito.errors import UserError
from spartito.names import size
from spartito.notes import warn
from spartito.numeric import is_whole
from spartito.storage.span_cache import SpanCache, default_cache

SMALLEST = 2
"""Bytes of a token in the cache, at least."""

Eos = int | Literal["tokenizer"] | None


def tokens(
    data: Any,
    length: int,
    column: str = "text",
    *,
    tokenizer: Any = None,
    tokenizer_name: str | None = None,
    eos: Eos = "tokenizer",
    separator: str | None = None,
    documents: bool = False,
    for_transformers: bool = False,
    format: str | None = None,
    cache: str | Path | None = None,
) -> Dataset:
    """Windows over the tokens of documents, for language models.

    All documents stand one behind the other, in the order of the files' names, each with the token
    of its end; window ``i`` begins at token ``i * length``. How many tokens each block of the files
    has is counted once: the count and the tokens of texts are kept in the cache.

    Args:
        data: A path or URL as for `packed`: files of one format, here or in a store, text files
            (``.txt``) among these; or a ``Dataset`` of Hugging Face's ``datasets``.
        length: Tokens of an example.
        column: Where a document stands in an example: a text, or a list of tokens.
        tokenizer: Makes tokens of texts: a tokenizer of Transformers or of the package
            ``tokenizers``, or a function from a text to its tokens. None: the column has tokens.
        tokenizer_name: Of a function: what is kept of it in the cache is found by this name.
        eos: The token that is put behind each document that does not end with it. "tokenizer"
            takes that of the tokenizer, and none for columns of tokens; None: no token is put.
        separator: What stands between two documents of a text file: ``"\\n\\n"`` for blank lines;
            None: each file is one document.
        documents: Whether an example says where documents begin, and labels do not cross from one
            to the next.
        for_transformers: Whether labels are the tokens themselves, as Transformers' models want
            them, which move them on by one.
        format: As for `packed`.
        cache: As for `packed`.

    Returns:
        Examples ``(x, y)``, both ``(length,)`` int64: ``y`` is ``x`` moved on by one token. With
        ``documents`` dicts of ``input_ids``, ``position_ids``, which begin at 0 in each document
        and in each window, ``document_ids``, which count the documents of a window from 0, and
        ``y``, which is -100 where the next token is of another document.

        With ``for_transformers`` dicts of ``input_ids`` and ``labels``; with ``documents`` there
        are ``position_ids`` too, and a label is -100 at the first token of a document.

    Raises:
        UserError: As `packed`; or the column has neither texts nor tokens, there are fewer tokens
            than an example has, the token of the end is not known, or a function has no name.
    """
    if not is_whole(length) or length < 1:
        raise UserError(f"tokens(length={length!r})", "An example has at least one token.")
    chosen = None if tokenizer is None else as_tokenizer(tokenizer, tokenizer_name)
    kept = default_cache() if cache is None else SpanCache(cache)
    documents_of, raw = _documents(data, column, separator, format, kept)
    blocks = TokenBlocks(documents_of, Encoding(raw, chosen, _eos(eos, chosen)), kept)
    threads = reading_threads()
    counts = count_tokens(blocks, threads)
    layout = Layout(counts, length, length if for_transformers else length + 1)
    total = int(counts.sum())
    if not len(layout):
        raise UserError(
            f"{documents_of.name} has {total} tokens, too few for an example of {layout.width}",
            "Choose a smaller length.",
        )
    if chosen is not None and SMALLEST * total > kept.limit:
        warn(
            "the cache in %s takes %s, and the tokens of these texts %s: "
            "what does not fit becomes tokens again in each pass; SPARTITO_CACHE_LIMIT or "
            "SPARTITO_CACHE=DIR gives it more",
            kept.folder,
            size(kept.limit),
            size(SMALLEST * total),
        )
    source = WindowSource(blocks, layout, documents, for_transformers)
    return Dataset(source).prefetch(threads + 2, threads)


def _documents(
    data: Any, column: str, separator: str | None, format: str | None, cache: SpanCache
) -> tuple[Documents, str]:
    """What has the documents, and what it calls their column."""
    check_one_split(data)
    if is_table(data) and separator is None and format is None:
        return TableDocuments(data, column), column
    if not isinstance(data, str | os.PathLike):
        raise UserError(
            f"tokens() of a {type(data).__name__}",
            "Give a path, a URL, or a Dataset of Hugging Face without separator and format.",
        )
    located = locate(os.fspath(data), format)
    files, raw = located.files, located.raw(column)
    reads = _format(located.format, raw, separator)
    blocks = find_blocks(files, located.found, reads, cache)
    return PackedDocuments(BlockFiles(files, reads, blocks, None if files.local else cache)), raw


def _format(name: str, column: str, separator: str | None) -> Format:
    if name == "text":
        return Texts((column,), separator)
    if separator is not None:
        raise UserError(
            f"separator={separator!r} for files of {name}",
            "Only text files have one: elsewhere a document is an example.",
        )
    return make_format(name, (column,))


def _eos(eos: Eos, tokenizer: Tokenizer | None) -> int | None:
    if eos != "tokenizer":
        return eos
    if tokenizer is None:
        return None
    if tokenizer.eos is None:
        raise UserError(
            "the tokenizer does not say which token ends a document",
            "Give its number, eos=50256, or eos=None where documents follow each other without.",
        )
    return tokenizer.eos
