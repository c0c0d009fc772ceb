"""Parts of files, and whole files, by way of this machine's cache where they lie elsewhere."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

from spartito.errors import UserError
from spartito.storage.files import File, Files, match_files, read_range
from spartito.storage.span_cache import Entry, SpanCache, default_cache

PART = 16 << 20
"""Bytes of a long file that are fetched at once."""
THREADS = 8
"""Parts that are fetched together."""


def read_cached(files: Files, file: File, start: int, stop: int, cache: SpanCache | None) -> bytes:
    """The bytes ``start`` to ``stop`` of a file.

    Args:
        files: Where it lies.
        file: Which one.
        start: The first byte.
        stop: The byte after the last.
        cache: Has them, or keeps them; None: they are read where they lie.

    Raises:
        UnreadableError: They could not be had, after some attempts.
    """
    if cache is None:
        return read_range(files, file, start, stop)
    entry = entry_of(files, file, start, stop)
    return cache.get(entry, lambda: read_range(files, file, start, stop))


def entry_of(files: Files, file: File, start: int, stop: int) -> Entry:
    """What the cache has of a part of a file, as `read_cached` keeps it."""
    words = ("span", files.url, file.name, str(file.size), file.version, str(start), str(stop))
    return Entry(words)


def read_whole(url: str | os.PathLike[str]) -> bytes:
    """The content of one file.

    Args:
        url: Its path or URL.

    Raises:
        UserError: It is not there, or is a folder or a pattern of several.
    """
    if os.path.isdir(url):
        raise UserError(f"{os.fspath(url)} is a directory", "Name the file itself.")
    files, found = match_files(os.fspath(url))
    if len(found) != 1:
        raise UserError(f"{os.fspath(url)} has {len(found)} files", "Name one of them.")
    file = found[0]
    cache = None if files.local else default_cache()
    edges = [*range(0, file.size, PART), file.size]
    with ThreadPoolExecutor(THREADS) as pool:
        parts = pool.map(
            lambda start, stop: read_cached(files, file, start, stop, cache), edges, edges[1:]
        )
        return b"".join(parts)
