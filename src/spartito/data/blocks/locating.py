"""Which packed files a path or a URL names, and what they are."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from spartito.data.blocks.formats import SUFFIXES, Columns, Format, make_format
from spartito.data.blocks.index import Blocks, find_blocks
from spartito.data.blocks.lance_tables import NAME as TABLE
from spartito.data.blocks.lance_tables import is_table, open_table
from spartito.data.blocks.manifest import Manifest, find_manifest, shards_of
from spartito.data.blocks.reading import BlockFiles, BlockReader
from spartito.data.images.headers import EXTENSIONS
from spartito.data.images.walk import has_images, is_image
from spartito.errors import UserError
from spartito.storage.files import (
    File,
    Files,
    is_pattern,
    match_files,
    names_folder,
    open_files,
    unnumbered,
)
from spartito.storage.span_cache import SpanCache, default_cache
from spartito.urls import is_remote, local_path

COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zstd", ".lz4", ".br", ".zip")


@dataclass(frozen=True)
class Located:
    """Packed files.

    Attributes:
        files: Where they lie.
        found: They, by name.
        format: What they are.
        manifest: What their folder says of them; None where it says nothing.
    """

    files: Files
    found: tuple[File, ...]
    format: str
    manifest: Manifest | None = None

    def named(self, columns: Sequence[str]) -> tuple[str, ...] | None:
        """The columns that are meant, as the format calls them.

        Args:
            columns: Those that somebody chose; () takes those that the manifest says, else all.

        Returns:
            Them; None: all.
        """
        said = self.manifest.example if self.manifest else ()
        return tuple(self.raw(name) for name in columns or said) or None

    def raw(self, name: str) -> str:
        """What the format calls a column."""
        return self.manifest.names.get(name, name) if self.manifest else name

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the labels, where the manifest knows them."""
        return tuple(self.manifest.classes) if self.manifest else ()

    def reads(self, columns: tuple[str, ...] | None) -> Format:
        """The format, to read columns by its own names for them; None: all.

        Raises:
            UserError: A package that it needs is not installed.
        """
        return make_format(self.format, columns)


def images_at(url: str) -> str | None:
    """The folder of images that a path or URL names; None where it names packed files.

    A folder holds packed files if it has a manifest, or such files and no images: packed files
    beside images are named by a pattern. A web server says of no folder what it has.

    Args:
        url: A path or URL.

    Raises:
        UserError: A store cannot be listed.
    """
    path = os.path.expanduser(local_path(url) or url)
    if is_table(path):
        return None
    if not is_remote(path) and not os.path.isdir(path):
        is_packed = bool(_kind(path)) or os.path.isfile(path) or is_pattern(path)
        return None if is_packed else path
    if not names_folder(path) or path.startswith("http"):
        return None
    files = open_files(path)
    if find_manifest(files) is not None:
        return None
    if files.local:
        names = [name for _, _, names in os.walk(path) for name in names]
        images = has_images(path)
    else:
        names = [file.name for file in files.find()]
        images = any(is_image(name.rpartition("/")[2], EXTENSIONS) for name in names)
    return path if images or not any(map(_kind, names)) else None


def locate(url: str, format: str | None = None) -> Located:
    """The packed files that a path, a URL or a pattern of one names.

    Args:
        url: As for `spartito.data.packed`.
        format: What they are; None: as their names end, or their manifest says.

    Returns:
        Them.

    Raises:
        UserError: There is none, they are of several formats, or not what their manifest says.
    """
    if format == TABLE or (format is None and is_table(url)):
        files, name, found = open_table(url)
        return Located(files, tuple(found), name)
    if names_folder(url):
        files = open_files(url)
        manifest = find_manifest(files)
        if manifest is not None:
            if format not in (None, manifest.format):
                raise UserError(
                    f"format={format!r} of {url}, which holds {manifest.format}",
                    "Leave it out: the folder says what it holds.",
                )
            return Located(files, tuple(shards_of(files, manifest)), manifest.format, manifest)
    files, found = match_files(url, tuple(SUFFIXES) if format is None else ())
    if format is None:
        if not is_pattern(url):
            found = _without_notes(found)
        return Located(files, tuple(found), _format_of([file.name for file in found]))
    suffixes = make_format(format, None).suffixes
    chosen = [file for file in found if unnumbered(file.name).endswith(suffixes)]
    return Located(files, tuple(chosen or found), format)


def _without_notes(found: list[File]) -> list[File]:
    """The files without texts, unless these are all: a README lies beside many data sets."""
    return [file for file in found if _kind(file.name) != "text"] or found


def _kind(name: str) -> str:
    """The format of a file by its name; "" where it says none."""
    return SUFFIXES.get(os.path.splitext(unnumbered(name))[1], "")


def _format_of(names: Sequence[str]) -> str:
    for name in names:
        if name.lower().endswith(COMPRESSED):
            raise UserError(
                f"{name!r} is compressed as a whole, so no part of it can be read",
                "Unpack it, or write Parquet, which is compressed in parts.",
            )
    kinds = set(map(_kind, names))
    if len(kinds) != 1 or not (kind := kinds.pop()):
        raise UserError(
            f"files of several formats, as {names[0]!r} and {names[-1]!r}",
            'Say which: format="parquet", or name them by a pattern.',
        )
    return kind


@dataclass(frozen=True)
class PackedSet:
    """Packed files whose blocks are known.

    Attributes:
        where: The files.
        columns: Those that are read, as the format calls them; None: all.
        format: Reads them.
        blocks: All blocks.
        read: Reads blocks one by one.
        reader: Reads blocks ahead, and keeps some.
        cache: Where parts of remote files are kept.
    """

    where: Located
    columns: tuple[str, ...] | None
    format: Format
    blocks: Blocks
    read: BlockFiles
    reader: BlockReader[Columns]
    cache: SpanCache


def open_set(where: Located, columns: tuple[str, ...] | None) -> PackedSet:
    """Find the blocks of packed files.

    Args:
        where: The files.
        columns: Those that are read, as the format calls them; None: all.

    Raises:
        UserError: A file is cut off, or the cache cannot be made.
    """
    kept = default_cache()
    format = where.reads(columns)
    blocks = find_blocks(where.files, where.found, format, kept)
    read = BlockFiles(where.files, format, blocks, None if where.files.local else kept)
    return PackedSet(where, columns, format, blocks, read, BlockReader(read.load), kept)
