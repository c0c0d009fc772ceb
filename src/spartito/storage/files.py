"""Files under a path or a URL, listed and read in ranges: on this machine or in a store.

`S3`, `GCS` and Azure are spoken to by obstore, as is HTTP; what fsspec knows besides (HDFS, SFTP,
the Hugging Face hub) by fsspec. Credentials are found the way these libraries find them.
"""

from __future__ import annotations

import importlib
import io
import os
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import product
from typing import Any, Protocol, TypeVar

from spartito.errors import UserError
from spartito.storage.limited import SilentError, limited
from spartito.storage.object_client import advice, by_obstore, connect_objects, no_package, reason
from spartito.storage.remote import AbsentError, UnreadableError
from spartito.urls import is_remote, local_path

T = TypeVar("T")

THREADS = 16
"""Files that are looked at together."""

SILENCE = 60.0
"""Seconds after which a call of a client that tells of no progress is given up."""

PAUSES = (0.02, 0.2, 1.0, 4.0, 8.0)
"""Seconds before a range that could not be read is asked for again."""

_PATTERN = re.compile(r"[*?\[{]")
_BRACES = re.compile(r"\{([^{}]*)\}")
_FOR_GOOD = re.compile(r"status code: (400|401|403|404|405|416)\b")
"""What obstore says where it knows no kind of error."""
_NUMBER = re.compile(r"-\d{5}-of-\d{5}$")
_COUNTED = re.compile(r"(\d+)\.\.(\d+)")


@dataclass(frozen=True, slots=True)
class File:
    """A file that is there.

    Attributes:
        name: below the URL of its `Files`.
        size: in bytes.
        version: changes when its content does: a tag of the store, or a time; "" where none says.
    """

    name: str
    size: int
    version: str = ""


class Files(Protocol):
    """Files below one path or URL."""

    url: str
    """What a user calls it."""
    local: bool
    """Whether they lie in a file system of this machine."""

    def find(self) -> list[File]:
        """All files below it, by name; hidden ones are left out.

        Raises:
            UserError: There is no such folder, or nobody can list it.
        """
        ...

    def look(self, name: str) -> File:
        """One file.

        Raises:
            AbsentError: It is not there.
            UserError: It may not be read.
        """
        ...

    def read(self, name: str, start: int, stop: int) -> bytes:
        """The bytes ``start`` to ``stop`` of a file, or fewer where it ends before.

        Raises:
            OSError, or what the client of a store raises.
        """
        ...


@dataclass(frozen=True)
class LocalFiles(Files):
    """Files in a folder of this machine.

    Args:
        url: its path.
    """

    url: str
    local = True

    def find(self) -> list[File]:
        if not os.path.isdir(self.url):
            raise UserError(f"there is no folder {self.url!r}", "Check the path.")
        found: list[str] = []
        for folder, inner, names in os.walk(self.url, followlinks=True):
            inner[:] = sorted(name for name in inner if not name.startswith("."))
            found += (os.path.join(folder, name) for name in names if not name.startswith("."))
        return [self.look(os.path.relpath(path, self.url)) for path in sorted(found)]

    def look(self, name: str) -> File:
        try:
            status = os.stat(os.path.join(self.url, name))
        except OSError as error:
            kind = AbsentError if isinstance(error, FileNotFoundError) else UnreadableError
            raise kind(
                f"{os.path.join(self.url, name)!r} cannot be read: {error.strerror}",
                "Check the path.",
            ) from error
        return File(name, status.st_size, str(status.st_mtime_ns))

    def read(self, name: str, start: int, stop: int) -> bytes:
        with open(os.path.join(self.url, name), "rb", buffering=0) as file:
            return os.pread(file.fileno(), stop - start, start)


class ObjectFiles(Files):
    """Files in an object store or on a web server, by obstore.

    Args:
        url: As ``s3://bucket/folder``.

    Raises:
        UserError: obstore is not installed, or refuses the URL or the configuration.
    """

    local = False

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._web = url.startswith("http")
        self._client, self._store = connect_objects(url, retries=0)  # `attempts` tries again

    def find(self) -> list[File]:
        if self._web:
            raise UserError(
                f"{self.url} cannot be listed: a web server does not say what it has",
                "Name its files: https://host/train-{000..127}.tar.",
            )
        found = attempts(
            lambda: [meta for part in self._client.list(self._store) for meta in part],
            self.url,
            "listed",
        )
        files = (_file_of(meta["path"], meta) for meta in found)
        return sorted((f for f in files if not _is_hidden(f.name)), key=lambda file: file.name)

    def look(self, name: str) -> File:
        meta = attempts(lambda: self._client.head(self._store, name), f"{self.url}/{name}", "read")
        return _file_of(name, meta)

    def read(self, name: str, start: int, stop: int) -> bytes:
        return bytes(self._client.get_range(self._store, name, start=start, end=stop))


class FsspecFiles(Files):
    """Files under a URL of any protocol that fsspec knows.

    Args:
        url: As ``hdfs://host/folder``; options and keys are those of fsspec's configuration.

    Raises:
        UserError: The protocol is unknown, its package is not installed, or it cannot be reached.
    """

    local = False

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        try:
            core: Any = importlib.import_module("fsspec.core")
            self._files, root = limited(lambda _: core.url_to_fs(self.url), SILENCE)
        except (ImportError, ValueError) as error:
            raise no_package(url, error) from error
        except Exception as error:  # some protocols connect here
            raise refused(url, "reached", error) from error
        self._root = root.rstrip("/")

    def find(self) -> list[File]:
        def find() -> dict[str, Any]:
            found: dict[str, Any] = limited(
                lambda _: self._files.find(self._root, detail=True), SILENCE
            )
            return found

        found = attempts(find, self.url, "listed")
        cut = len(self._root) + 1
        files = (_of_fsspec(path[cut:], facts) for path, facts in found.items())
        return sorted((f for f in files if not _is_hidden(f.name)), key=lambda file: file.name)

    def look(self, name: str) -> File:
        path = f"{self._root}/{name}"
        facts = attempts(lambda: limited(lambda _: self._files.info(path), SILENCE), path, "read")
        return _of_fsspec(name, facts)

    def read(self, name: str, start: int, stop: int) -> bytes:
        path = f"{self._root}/{name}"
        return limited(lambda _: bytes(self._files.cat_file(path, start=start, end=stop)), SILENCE)


def open_files(url: str) -> Files:
    """The files below a path or URL.

    Args:
        url: A path, or ``protocol://...``.

    Returns:
        Them; nothing is read yet.

    Raises:
        UserError: The protocol is unknown, or its package is not installed.
    """
    if not is_remote(url) or local_path(url):
        return LocalFiles(os.path.abspath(os.path.expanduser(local_path(url))))
    return (ObjectFiles if by_obstore(url) else FsspecFiles)(url)


def match_files(url: str, suffixes: tuple[str, ...] = ()) -> tuple[Files, list[File]]:
    """The files that a path, a URL or a pattern of one names.

    Args:
        url: A file; a folder, of which all files are taken whose names end so; a pattern with
            ``*`` and ``?``, or with ``{000..127}`` and ``{a,b}``, whose files are there all.
        suffixes: How names in a folder end; () takes any.

    Returns:
        Where they lie, and the files by name.

    Raises:
        UserError: There is none.
    """
    folder, name = _parted(url)
    files = open_files(folder)
    if "{" in name:
        with ThreadPoolExecutor(THREADS) as pool:
            return files, list(pool.map(files.look, braced(name)))
    if name and not _PATTERN.search(name):
        return files, [files.look(name)]
    found = files.find()
    if name:
        chosen = [file for file in found if fnmatchcase(file.name, name)]
        rule = f"has no file that {name!r} describes"
    else:
        chosen = [file for file in found if unnumbered(file.name).endswith(suffixes or ("",))]
        rule = f"has no file that ends with {' or '.join(suffixes)}" if suffixes else "has no file"
    if not chosen:
        others = f"It has {len(found)} others, as {found[0].name!r}." if found else "It is empty."
        raise UserError(f"{files.url} {rule}", others)
    return files, chosen


def is_pattern(url: str) -> bool:
    """Whether a path or URL says with ``*``, ``?``, ``[`` or ``{`` which files it means."""
    return _PATTERN.search(url) is not None


def unnumbered(name: str) -> str:
    """The name of a file in lower case, without a shard's number that stands behind its ending.

    Args:
        name: As ``train.array_record-00000-of-00004``, which TensorFlow's data sets write.
    """
    return _NUMBER.sub("", name.lower())


def names_folder(url: str) -> bool:
    """Whether a path or URL names a folder, by how it is written: no file, and no pattern."""
    return not _parted(url)[1]


def braced(name: str) -> list[str]:
    """The names that one with braces stands for, as a shell writes them.

    Args:
        name: As ``train-{000..127}.tar`` or ``{train,more}.tar``.

    Returns:
        All of them, in order; numbers are as wide as the first one.

    Raises:
        UserError: A range that ends before it begins.
    """
    texts = _BRACES.split(name)
    return ["".join(parts) for parts in product(*map(_choices, texts, _alternate(len(texts))))]


def attempts(read: Callable[[], T], what: str, done: str) -> T:
    """What ``read`` returns, which is called again where a store fails for a moment.

    Args:
        read: Asks the store.
        what: Of which file or folder, and which part of it.
        done: What was to be done with it, in a word.

    Raises:
        UnreadableError: It failed for good, or too often.
    """
    for pause in (*PAUSES, None):
        try:
            return read()
        except UserError:
            raise
        except Exception as error:
            if pause is None or is_for_good(error):
                raise refused(what, done, error) from error
            time.sleep(pause)
    raise AssertionError


def is_for_good(error: Exception) -> bool:
    """Whether asking again cannot help: what is not there, and what may not be read."""
    if isinstance(error, FileNotFoundError | PermissionError | IsADirectoryError | SilentError):
        return True
    if _FOR_GOOD.search(str(error)):
        return True
    return type(error).__name__ in {
        "NotFoundError",
        "PermissionDeniedError",
        "UnauthenticatedError",
        "InvalidPathError",
        "NotSupportedError",
        "UnknownConfigurationKeyError",
    }


class Seekable(io.RawIOBase):
    """What has ``size`` bytes and is read from any of them on, as Python's libraries read files."""

    def __init__(self, size: int) -> None:
        self._size, self._at = size, 0

    def readable(self) -> bool:
        """As of any file."""
        return True

    def seekable(self) -> bool:
        """As of any file."""
        return True

    def tell(self) -> int:
        """As of any file."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """As of any file."""
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = max(0, start + offset)
        return self._at


class RangeReader(Seekable):
    """A file that is read in ranges, as an object that Python's libraries read.

    Args:
        files: Where it lies.
        file: Which one.
    """

    def __init__(self, files: Files, file: File) -> None:
        super().__init__(file.size)
        self._files, self._file = files, file

    @property
    def url(self) -> str:
        """Its path or URL, for libraries that read it by themselves."""
        return f"{self._files.url}/{self._file.name}"

    @property
    def local(self) -> bool:
        """Whether it lies in a file system of this machine."""
        return self._files.local

    def readall(self) -> bytes:
        """All that follows, by one request: Python's own reads it in small parts."""
        start, self._at = self._at, max(self._at, self._file.size)
        return read_range(self._files, self._file, start, self._at) if start < self._at else b""

    def readinto(self, buffer: Any) -> int:
        """As of any file."""
        stop = min(self._file.size, self._at + len(buffer))
        if stop <= self._at:
            return 0
        data = read_range(self._files, self._file, self._at, stop)
        buffer[: len(data)] = data
        self._at = stop
        return len(data)


def read_range(files: Files, file: File, start: int, stop: int) -> bytes:
    """The bytes ``start`` to ``stop`` of a file, all of them.

    Raises:
        UnreadableError: They could not be had, after some attempts.
    """
    where = f"{files.url}/{file.name}, bytes {start:,} to {stop:,},"

    def read() -> bytes:
        data = files.read(file.name, start, stop)
        if len(data) != stop - start:
            raise EOFError(f"{len(data):,} bytes came")
        return data

    return attempts(read, where, "read")


def _parted(url: str) -> tuple[str, str]:
    """The folder of a path or URL, and the name or pattern of files in it; "" for the folder."""
    if not is_remote(url) or local_path(url):
        path = os.path.abspath(os.path.expanduser(local_path(url)))
        if os.path.isdir(path):
            return path, ""
    else:
        path = url
    at = _PATTERN.search(path)
    folder, name = path[: at.start()] if at else path, path[at.start() :] if at else ""
    head, _, tail = folder.rpartition("/")
    is_file = at is not None or not is_remote(url) or "." in tail
    bucket_only = is_remote(url) and head.endswith((":/", ":"))
    return (head, tail + name) if is_file and not bucket_only else (path, "")


def _choices(text: str, is_braced: bool) -> list[str]:
    if not is_braced:
        return [text]
    counted = _COUNTED.fullmatch(text)
    if counted is None:
        return text.split(",")
    first, last = counted.groups()
    if int(first) > int(last):
        raise UserError(f"{{{text}}} ends before it begins", "Write {000..127}.")
    return [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]


def _alternate(count: int) -> Iterator[bool]:
    return (bool(number % 2) for number in range(count))


def _is_hidden(name: str) -> bool:
    return any(part.startswith(".") for part in name.split("/"))


def _file_of(name: str, meta: Any) -> File:
    version = meta.get("e_tag") or meta.get("version") or str(meta.get("last_modified", ""))
    return File(name, int(meta["size"]), str(version).strip('"'))  # lists leave quotes out


def _of_fsspec(name: str, facts: Any) -> File:
    tags = ("ETag", "etag", "mtime", "LastModified", "last_modified", "modified")
    version = next((str(facts[tag]) for tag in tags if facts.get(tag)), "")
    return File(name, int(facts.get("size") or 0), version)


def refused(what: str, done: str, error: Exception) -> UserError:
    """The error for what a store refuses.

    Args:
        what: Which file or folder.
        done: What was to be done with it, in a word.
        error: What the store's client said.
    """
    kind = AbsentError if _is_absent(error) else UnreadableError
    return kind(f"{what} cannot be {done}: {reason(error)}", advice(error))


def _is_absent(error: Exception) -> bool:
    return isinstance(error, FileNotFoundError) or type(error).__name__ == "NotFoundError"
