"""Packed files as a data set."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from spartito.data.blocks.choosing import ChosenSource, Columnar, Rule, hashes_of, kept_by
from spartito.data.blocks.formats import make_format
from spartito.data.blocks.index import find_blocks
from spartito.data.blocks.locating import locate
from spartito.data.blocks.source import PackedSource
from spartito.data.dataset import Dataset
from spartito.data.images.decode import Color
from spartito.data.images.image_source import Subset, check_split
from spartito.data.reading.prefetch import reading_threads
from spartito.errors import UserError
from spartito.storage.span_cache import SpanCache, default_cache


def packed(
    url: str | os.PathLike[str],
    columns: Sequence[str] | None = None,
    *,
    format: str | None = None,
    image_size: tuple[int, int] | None = None,
    color: Color = "rgb",
    dtype: torch.dtype = torch.float32,
    cache: str | Path | None = None,
    where: Mapping[str, Rule] | None = None,
    validation_split: float | None = None,
    subset: Subset | None = None,
    key: str | None = None,
    seed: int = 1337,
) -> Dataset:
    """Examples packed into few large files: Parquet, WebDataset, MDS, JSON lines and others.

    Which blocks the files have is found out once, and kept in the cache. Parts of remote files are
    kept there too, for all tasks of the machine and for later jobs.

    Args:
        url: A file, a folder, or a pattern of files, here or in a store:
            ``s3://bucket/train``, ``https://host/train-{000..127}.tar``, ``data/*.parquet``.
        columns: Those that an example has; None: all, or what ``spartito data pack`` noted beside
            the files: ``("image", "label")`` of a folder of images, whose classes are known too.
        format: "parquet", "webdataset", "mds", "jsonl", "text", "array_record", "lance", or
            that of another package; None: as the files' names end.
        image_size: Height and width of images, which are decoded then; None: their bytes stay.
        color: Of images, "rgb" or "grayscale".
        dtype: Of images.
        cache: The folder of the cache; None: ``SPARTITO_CACHE``, else ``~/.cache/spartito``.
        where: Keeps the examples whose values all of these functions accept, by column. Each of
            these columns is read once, before training.
        validation_split: The fraction of the examples that is kept for validation, about.
        subset: "training" or "validation".
        key: The column by whose hash examples are divided, so that equal keys are on one side;
            None: an example's file and number. Files that are added move none to the other side.
        seed: What the split is drawn from.

    Returns:
        Examples that are dicts of their columns; with ``columns`` tuples in that order, or the
        value where it is one. Images are of shape ``(channels, height, width)``, 0 to 255.

    Raises:
        UserError: Nothing is there, it may not be read, a file is cut off, there is no such format
            or column, or a package is not installed.
    """
    located = locate(os.fspath(url), format)
    chosen = located.named((columns,) if isinstance(columns, str) else tuple(columns or ()))
    reads = located.reads(chosen)
    kept = default_cache() if cache is None else SpanCache(cache)
    blocks = find_blocks(located.files, located.found, reads, kept)
    source = PackedSource(
        located.files,
        reads,
        blocks,
        None if located.files.local else kept,
        chosen,
        image_size,
        color,
        dtype,
    )
    source.check_columns()
    rules = {located.raw(name): rule for name, rule in (where or {}).items()}
    divided = None if key is None else located.raw(key)
    examples = _chosen(source, kept, rules, validation_split, subset, divided, seed)
    threads = reading_threads()
    return Dataset(examples, classes=located.classes).prefetch(threads + 2, threads)


def _chosen(
    source: PackedSource,
    cache: SpanCache,
    where: Mapping[str, Rule],
    validation_split: float | None,
    subset: Subset | None,
    key: str | None,
    seed: int,
) -> PackedSource | ChosenSource:
    """The examples that rules keep and that are in the subset."""
    check_split(validation_split, subset, seed)
    if key is not None and subset is None:
        raise UserError(f"key={key!r} without a split", "Say validation_split and subset.")
    if subset is None and not where:
        return source
    kept_there = cache if source.cache is None else source.cache
    columnar = Columnar(
        source.files,
        source.blocks,
        lambda name: make_format(source.format.name, (name,)),
        source.cache,
    )
    chosen = np.ones(len(source), dtype=np.bool_)
    if where:
        chosen &= kept_by(columnar, where)
    if validation_split is not None:
        hashes = hashes_of(columnar, key, seed, kept_there)
        validates = hashes < np.uint64(int(validation_split * 2**64))
        chosen &= validates if subset == "validation" else ~validates
    if not chosen.any():
        raise UserError(
            f"none of the {len(source):,} examples of {source.files.url} is left",
            "Look at where=..., validation_split and subset.",
        )
    return ChosenSource(source, np.flatnonzero(chosen))
