"""``spartito data check`` of packed files: every byte, every block, every example.

Blocks are read by the code by which training reads them. Beside that the files are compared with
the checksums of their manifest, images are decoded, numbers must be finite, and no sample of a tar
may have the name of another one.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from json import dumps
from typing import Any, TypeVar

import numpy as np

from spartito.data.blocks.formats import FileIndex, Format, Missing
from spartito.data.blocks.index import Blocks, index_of
from spartito.data.blocks.locating import Located, locate
from spartito.data.blocks.manifest import NAME, Shard, check_whole, find_manifest
from spartito.data.blocks.reading import BlockFiles
from spartito.data.blocks.tars import names_in, split_name
from spartito.data.images.decode import decode
from spartito.data.images.headers import READABLE, ImageFault, promised_format, sniff
from spartito.data.reading.prefetch import read_ahead
from spartito.data.reading.progress import Progress
from spartito.errors import UserError, show
from spartito.storage.files import File, Files, is_for_good, names_folder, open_files, read_range
from spartito.storage.remote import UnreadableError
from spartito.storage.span_cache import SpanCache, default_cache
from spartito.system.capacity import available_cores

R = TypeVar("R")
Told = Callable[[int, int], None]

CHUNK = 8 << 20
"""Bytes that are hashed at once."""
SHOWN = 50
"""Findings of a kind that are printed; with JSON all are."""


@dataclass(frozen=True)
class Fault:
    """What is wrong with a file or with an example in it.

    Attributes:
        file: Its name.
        example: The number of the example there; None: the file or a block of it.
        kind: In a word.
        detail: In some more.
    """

    file: str
    example: int | None
    kind: str
    detail: str

    def __str__(self) -> str:
        where = self.file if self.example is None else f"{self.file}, example {self.example}"
        return f"{self.kind}: {where} ({self.detail})"


@dataclass(frozen=True)
class PackedReport:
    """What a check of packed files found.

    Attributes:
        url: As they were named.
        format: What they are.
        files: How many there are.
        examples: How many were looked at.
        faults: What is wrong, file by file.
    """

    url: str
    format: str
    files: int
    examples: int
    faults: tuple[Fault, ...]

    @property
    def kinds(self) -> dict[str, int]:
        """How many faults there are of each kind, the most frequent first."""
        return dict(Counter(fault.kind for fault in self.faults).most_common())


def check_packed(
    url: str,
    columns: Sequence[str] = (),
    images: bool = True,
    looked: Told = lambda done, total: None,
    progress: Told = lambda done, total: None,
) -> PackedReport:
    """Check packed files.

    Args:
        url: As for `spartito.data.packed`.
        columns: Those that are looked at; () takes all.
        images: Whether images are decoded.
        looked: Is told at how many files was looked, and how many there are.
        progress: Is told how many blocks are done, and how many there are.

    Returns:
        What was found.

    Raises:
        UserError: There are no such files or columns, or a store does not reply.
    """
    where, shards = _files_of(url)
    cache = default_cache()
    names = where.named(columns) if columns else None
    format = where.reads(names)
    looks = (
        partial(_look_at, where.files, file, shards.get(file.name), format, cache)
        for file in where.found
    )
    found = list[tuple[File | None, FileIndex | None, list[Fault]]]()
    for each in _in_threads(looks):
        found.append(each)
        looked(len(found), len(where.found))
    faults = [fault for _, _, file_faults in found for fault in file_faults]
    good = [(file, index) for file, index, _ in found if file is not None and index is not None]
    blocks = Blocks(tuple(file for file, _ in good), tuple(index for _, index in good))
    read = BlockFiles(where.files, format, blocks, None if where.files.local else cache)
    pictures = _image_columns(where) if images else None
    if names and len(blocks):
        _check_columns(read, names, where)
    faults += _check_blocks(where, read, pictures, progress)
    order = {file.name: number for number, file in enumerate(where.found)}
    faults.sort(key=lambda fault: (order[fault.file], fault.example is not None, fault.example))
    examples = int(blocks.edges[-1])
    return PackedReport(url, where.format, len(where.found), examples, tuple(faults))


def main_packed_check(
    url: str, columns: Sequence[str] = (), images: bool = True, json: bool = False
) -> int:
    """Check, print what is wrong, and return the exit code.

    0: all is good. 1: something is wrong. 2: the user's mistake, told on standard error. With
    ``json`` the last line has it all as JSON.
    """
    try:
        with Progress("looked at") as looked, Progress("checked", things="blocks") as progress:
            report = check_packed(url, columns, images, looked.update, progress.update)
    except UserError as error:
        return show(error)
    print(as_text(report))
    if json:
        print(dumps({**asdict(report), "bad": len(report.faults), "kinds": report.kinds}))
    return 1 if report.faults else 0


def as_text(report: PackedReport) -> str:
    """The report for a reader: faults, counts of each kind, and what was looked at."""
    lines: list[str] = []
    for kind, count in report.kinds.items():
        faults = [fault for fault in report.faults if fault.kind == kind]
        lines += map(str, faults[:SHOWN])
        lines += [f"and {count - SHOWN} more; --json has all"] if count > SHOWN else []
    lines += [f"{kind}: {count}" for kind, count in report.kinds.items()]
    lines.append(
        f"checked {report.examples:,} examples in {report.files:,} files of {report.url}: "
        f"{len(report.faults)} bad"
    )
    return "\n".join(lines).encode("utf-8", "backslashreplace").decode()


def _files_of(url: str) -> tuple[Located, dict[str, Shard]]:
    """The files that should be there, whether they are or not."""
    if names_folder(url):
        files = open_files(url)
        manifest = find_manifest(files)
        if manifest is not None:
            check_whole(files, manifest)
            shards = {shard.name: shard for shard in manifest.shards}
            found = tuple(File(name, shard.size) for name, shard in shards.items())
            return Located(files, found, manifest.format, manifest), shards
    return locate(url), {}


def _look_at(
    files: Files, file: File, shard: Shard | None, format: Format, cache: SpanCache
) -> tuple[File | None, FileIndex | None, list[Fault]]:
    """A file as it is, its blocks, and what is wrong with it as a whole."""
    faults: list[Fault] = []

    def found(kind: str, detail: str) -> None:
        faults.append(Fault(file.name, None, kind, detail))

    try:
        there = files.look(file.name)
        if shard is not None and there.size != shard.size:
            found("size", f"{there.size:,} bytes, {NAME} says {shard.size:,}")
        elif shard is not None and _sha256(files, there) != shard.sha256:
            found("checksum", f"its SHA-256 is not the one in {NAME}")
        index = index_of(files, there, format, cache)
        rows = sum(block.rows for block in index.blocks)
        if shard is not None and rows != shard.examples:
            found("count", f"{rows:,} examples, {NAME} says {shard.examples:,}")
    except UserError as error:
        found("unreadable", _why(files, error))
        return None, None, faults
    return there, index, faults


def _check_blocks(
    where: Located, read: BlockFiles, pictures: frozenset[str] | None, progress: Told
) -> Iterator[Fault]:
    """What is wrong with the blocks of all files."""
    blocks, is_tar = read.blocks, where.format == "webdataset"
    check = partial(_check_block, read, pictures, is_tar)
    works = (partial(check, block) for block in range(len(blocks)))
    file, seen = "", set[str]()
    for block, (faults, members) in enumerate(_in_threads(works)):
        yield from faults
        if (name := blocks.find(block)[0].name) != file:
            file, seen = name, set()
        for each in _repeated(members, seen):
            yield Fault(file, None, "duplicate_key", f"{each!r} is there twice")
        progress(block + 1, len(blocks))


def _check_block(
    read: BlockFiles, pictures: frozenset[str] | None, is_tar: bool, block: int
) -> tuple[list[Fault], list[str]]:
    """What is wrong with a block and with the examples in it, and in a tar its files' names."""
    file, _, number = read.blocks.find(block)
    first = int(read.blocks.edges[block] - read.blocks.edges[block - number])
    try:
        parts = read.parts(block)
        columns = read.decoded(block, parts)
    except UserError as error:
        return [Fault(file.name, None, "unreadable", _why(read.files, error))], []
    faults = [
        Fault(file.name, first + row, kind, detail)
        for name, values in columns.items()
        for row, kind, detail in _column_faults(name, values, pictures)
    ]
    return faults, names_in(parts[0][1]) if is_tar else []


def _column_faults(
    name: str, values: Any, pictures: frozenset[str] | None
) -> Iterator[tuple[int, str, str]]:
    """Of each bad value its row, and what is wrong."""
    if isinstance(values, np.ndarray):
        for row in np.flatnonzero(~_finite(values)).tolist():
            yield row, "not_finite", f"{name!r} is not finite"
        return
    known = pictures is not None and (name in pictures or promised_format(f"x.{name}") is not None)
    held = list(values)
    are_images = known or (
        pictures is not None
        and any(isinstance(each, bytes) and sniff(each) in READABLE for each in held)
    )
    for row, value in enumerate(held):
        if isinstance(value, Missing):
            yield row, "damaged" if value.is_damaged else "missing", f"{name!r} {value.why}"
        elif isinstance(value, bytes) and are_images:
            try:
                decode(value, None, "L", (1, 1))
            except ImageFault as fault:
                yield row, str(fault.kind), f"{name!r}: {fault.detail}"
        elif (
            isinstance(value, float | np.ndarray | np.floating)
            and not _finite(np.asarray(value)[None]).all()
        ):
            yield row, "not_finite", f"{name!r} is not finite"


def _finite(values: Any) -> Any:
    """Of each row whether all numbers of it are finite."""
    if values.dtype.kind not in "fc":
        return np.ones(len(values), dtype=bool)
    return np.isfinite(values).reshape(len(values), -1).all(axis=1)


def _image_columns(where: Located) -> frozenset[str]:
    """The columns that the manifest calls images, as the format calls them."""
    if where.manifest is None:
        return frozenset()
    named = where.manifest.names
    columns = where.manifest.columns.items()
    return frozenset(named.get(name, name) for name, kind in columns if kind == "image")


def _check_columns(read: BlockFiles, names: Sequence[str], where: Located) -> None:
    """Raise where a column that somebody named is in none of the first examples."""
    for name, values in read.load(0).items():
        if name in names and all(isinstance(value, Missing) for value in values):
            raise UserError(
                f"none of the first {len(values)} examples of {where.files.url} has a column "
                f"{name!r}",
                "Without --columns all are looked at.",
            )


def _sha256(files: Files, file: File) -> str:
    found = hashlib.sha256()
    for start in range(0, file.size, CHUNK):
        found.update(read_range(files, file, start, min(file.size, start + CHUNK)))
    return found.hexdigest()


def _repeated(names: Iterable[str], seen: set[str]) -> Iterator[str]:
    """Samples of a block of a tar that were ``seen`` before, and files that one has twice."""
    key, columns = "", set[str]()
    for name in names:
        sample, column = split_name(name)
        if sample != key:
            if sample in seen:
                yield sample
            key, columns = sample, set()
            seen.add(sample)
        elif column in columns:
            yield name
        columns.add(column)


def _why(files: Files, error: UserError) -> str:
    """What an error says of a file; raised where it says that nobody could read it just now."""
    cause = error.__cause__
    passing = isinstance(error, UnreadableError) and not isinstance(cause, EOFError)
    if passing and not files.local and isinstance(cause, Exception) and not is_for_good(cause):
        raise error
    return str(error).partition("\n")[0]


def _in_threads(works: Iterable[Callable[[], R]]) -> Iterator[R]:
    """What calls return, in their order, by a thread for each core."""
    threads = available_cores()
    return read_ahead(iter(works), 2 * threads, threads)
