"""Packed files as a data set."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from spartito.cluster.resolver import replicas_here
from spartito.data.blocks.formats import SUFFIXES, make_format
from spartito.data.blocks.index import find_blocks
from spartito.data.blocks.source import PackedSource
from spartito.data.dataset import Dataset
from spartito.data.decode import Color
from spartito.data.folders import MOST_THREADS
from spartito.errors import UserError
from spartito.storage.files import match_files
from spartito.storage.span_cache import SpanCache, default_cache
from spartito.system.capacity import available_cores


def packed(
    url: str | os.PathLike[str],
    columns: Sequence[str] | None = None,
    *,
    format: str | None = None,
    image_size: tuple[int, int] | None = None,
    color: Color = "rgb",
    dtype: torch.dtype = torch.float32,
    cache: str | Path | None = None,
) -> Dataset:
    """Examples packed into few large files: Parquet, tars of WebDataset, MDS, JSON lines.

    Which blocks the files have is found out once, and kept in the cache. Parts of remote files are
    kept there too, for all tasks of the machine and for later jobs.

    Args:
        url: A file, a folder, or a pattern of files, here or in a store:
            ``s3://bucket/train``, ``https://host/train-{000..127}.tar``, ``data/*.parquet``.
        columns: Those that an example has; None: all.
        format: "parquet", "webdataset", "mds", "jsonl", or that of another package; None: as the
            files' names end.
        image_size: Height and width of images, which are decoded then; None: their bytes stay.
        color: Of images, "rgb" or "grayscale".
        dtype: Of images.
        cache: The folder of the cache; None: ``SPARTITO_CACHE``, else ``~/.cache/spartito``.

    Returns:
        Examples that are dicts of their columns; with ``columns`` tuples in that order, or the
        value where it is one. Images are of shape ``(channels, height, width)``, 0 to 255.

    Raises:
        UserError: Nothing is there, it may not be read, a file is cut off, there is no such format
            or column, or a package is not installed.
    """
    where = os.fspath(url)
    files, found = match_files(where, tuple(SUFFIXES) if format is None else ())
    chosen = (columns,) if isinstance(columns, str) else tuple(columns or ()) or None
    reads = make_format(format or _format_of([file.name for file in found]), chosen)
    if format is not None and any(file.name.endswith(reads.suffixes) for file in found):
        found = [file for file in found if file.name.endswith(reads.suffixes)]
    kept = default_cache() if cache is None else SpanCache(cache)
    blocks = find_blocks(files, found, reads, kept)
    source = PackedSource(
        files,
        reads,
        blocks,
        None if files.local else kept,
        chosen,
        image_size,
        color,
        dtype,
    )
    source.check_columns()
    threads = min(MOST_THREADS, max(1, available_cores() // replicas_here()))
    return Dataset(source).prefetch(threads + 2, threads)


def _format_of(names: Sequence[str]) -> str:
    kinds = {SUFFIXES.get(os.path.splitext(name)[1].lower(), "") for name in names}
    if len(kinds) != 1 or not (kind := kinds.pop()):
        raise UserError(
            f"files of several formats, as {names[0]!r} and {names[-1]!r}",
            'Say which: format="parquet", or name them by a pattern.',
        )
    return kind
