"""Parts of remote files that are kept on this machine, for all its tasks and for later jobs.

One folder (``SPARTITO_CACHE``, else ``~/.cache/spartito``) with a limit. An entry's name is drawn
from what it is: the URL of a file, its version, and which bytes; so an entry never changes, and
that of a file which did is never asked for. Of several tasks that want one, one fetches it and the
others wait for its lock. An entry proves itself by a checksum. Those that were not read for the
longest time go first.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from spartito.errors import UserError
from spartito.names import ENV_CACHE, ENV_CACHE_LIMIT
from spartito.notes import warn

FREE = 0.5
"""The part of the free disk that a cache without a limit may take."""
SWEPT = 0.9
"""The part of its limit that a sweep leaves."""
LOOK = 32
"""How often an entry is added in that part of the limit before others are counted again."""

_TAIL = struct.Struct("<QI")  # the bytes before it, and their CRC-32
_FOLDER = re.compile("[0-9a-f]{2}")
_FILE = re.compile(r"[0-9a-f]{30}(\.[0-9a-f]{8}\.new)?")
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def space_in(folder: Path, named: str, remedy: str) -> int:
    """Make the folder of a cache.

    Args:
        folder: It may be there.
        named: As the user knows it.
        remedy: What he may do where it cannot be.

    Returns:
        The bytes that are free there.

    Raises:
        UserError: It cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return shutil.disk_usage(folder).free
    except OSError as error:
        raise UserError(f"{named} cannot be made: {error.strerror or error}", remedy) from error


@dataclass(frozen=True, slots=True)
class Entry:
    """What is kept: its words are all that it depends on.

    Args:
        words: the URL, the version, the range.
    """

    words: tuple[str, ...]

    @property
    def name(self) -> str:
        """Its file in the folder."""
        digest = blake2b("\0".join(self.words).encode(), digest_size=16).hexdigest()
        return f"{digest[:2]}/{digest[2:]}"


class SpanCache:
    """Keeps what was fetched, in one folder, up to a limit.

    Args:
        folder: It is made.
        limit: Bytes that it may take; None: half of what is free on that disk.

    Raises:
        UserError: The folder cannot be made.
    """

    def __init__(self, folder: str | os.PathLike[str], limit: int | None = None) -> None:
        self.folder = Path(folder)
        free = space_in(
            self.folder,
            f"the cache folder {os.fspath(folder)!r}",
            f"Name one that this process may write to: {ENV_CACHE}=DIR.",
        )
        self.limit = limit if limit is not None else int(FREE * (free + self._used()))
        self._writes = True
        self._added = self.limit  # so that the first one looks
        self._counting = threading.Lock()

    def __reduce__(self) -> tuple[object, ...]:
        """In another process it is the same folder with the same limit."""
        return SpanCache, (self.folder, self.limit)

    def get(self, entry: Entry, fetch: Callable[[], bytes]) -> bytes:
        """The bytes of an entry, by ``fetch`` where they are not there yet.

        Args:
            entry: Which ones.
            fetch: Is called by one task of those that ask at the same time.

        Raises:
            Whatever ``fetch`` raises.
        """
        path = self.folder / entry.name
        found = self._load(path)
        if found is not None:
            return found
        if not self._writes:
            return fetch()
        with self._claimed(path):
            found = self._load(path)
            if found is None:
                found = fetch()
                self._store(path, found)
            return found

    def has(self, entry: Entry) -> bool:
        """Whether an entry is there."""
        return (self.folder / entry.name).exists()

    def _load(self, path: Path) -> bytes | None:
        try:
            with open(path, "rb", buffering=0) as file:
                size = max(0, os.fstat(file.fileno()).st_size - _TAIL.size)
                data, tail = file.read(size), file.read(_TAIL.size)
        except OSError:
            return None
        if len(tail) < _TAIL.size or _TAIL.unpack(tail) != (len(data), zlib.crc32(data)):
            return None
        with suppress(OSError):  # a cache that others filled may be read-only
            os.utime(path)
        return data

    def _store(self, path: Path, data: bytes) -> None:
        new = path.with_name(f"{path.name}.{secrets.token_hex(4)}.new")
        try:
            with open(new, "wb") as file:
                file.write(data)
                file.write(_TAIL.pack(len(data), zlib.crc32(data)))
            os.replace(new, path)
        except OSError as error:
            with suppress(OSError):
                os.unlink(new)
            if self._writes:
                warn(
                    "the cache in %s takes no more: %s; what is not in it is fetched in each epoch",
                    self.folder,
                    error.strerror,
                )
            self._writes = False
            return
        self._trim(len(data))

    @contextmanager
    def _claimed(self, path: Path) -> Iterator[None]:
        """While this task alone fetches an entry; a task that is killed lets go of it."""
        claim = path.with_name(f"{path.name}.claim")
        try:
            path.parent.mkdir(exist_ok=True)
            file = open(claim, "wb")  # noqa: SIM115
        except OSError:  # it is read-only: each task fetches for itself
            yield
            return
        with file:
            fcntl.flock(file, fcntl.LOCK_EX)
            try:
                yield
            finally:
                with suppress(OSError):
                    os.unlink(claim)

    def _trim(self, size: int) -> None:
        """Remove what was not read for the longest time, once it may be too much."""
        with self._counting:
            self._added += size
            if self._added * LOOK < self.limit:
                return
            self._added = 0
        entries = self._entries()
        used = sum(status.st_size for _, status in entries)
        if used <= self.limit:
            return
        for path, status in sorted(entries, key=lambda each: each[1].st_mtime_ns):
            if used <= SWEPT * self.limit:
                break
            with suppress(OSError):  # another task removes as well
                os.unlink(path)
            used -= status.st_size

    def _used(self) -> int:
        return sum(status.st_size for _, status in self._entries())

    def _entries(self) -> list[tuple[Path, os.stat_result]]:
        """The entries, and what killed tasks have left of some; nothing else that lies here."""
        found = []
        for folder in os.scandir(self.folder):
            if not _FOLDER.fullmatch(folder.name) or not folder.is_dir(follow_symlinks=False):
                continue
            for file in os.scandir(folder.path):
                if _FILE.fullmatch(file.name) and file.is_file(follow_symlinks=False):
                    with suppress(OSError):  # it was just removed
                        found.append((Path(file.path), file.stat()))
        return found


def cache_folder() -> str:
    """The folder of caches: ``SPARTITO_CACHE``, else one in the user's folder of caches."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.environ.get(ENV_CACHE) or os.path.join(home, "spartito")


def default_cache() -> SpanCache:
    """The cache that the environment names.

    Returns:
        That in ``SPARTITO_CACHE``, else in the user's folder of caches.

    Raises:
        UserError: ``SPARTITO_CACHE_LIMIT`` is no number of bytes, or the folder cannot be made.
    """
    folder = cache_folder()
    limit = os.environ.get(ENV_CACHE_LIMIT)
    return SpanCache(folder, None if not limit else bytes_of(limit, ENV_CACHE_LIMIT))


def bytes_of(text: str, name: str) -> int:
    """The number of bytes that a text says.

    Args:
        text: As ``200GB``, ``1.5 TB`` or ``1000000``.
        name: Of the variable or option.

    Raises:
        UserError: It says no such number.
    """
    upper = text.strip().upper()
    base = 1024 if upper.endswith("IB") else 1000
    plain = upper.removesuffix("IB").removesuffix("B").strip()
    number, power = (plain[:-1], plain[-1:]) if plain[-1:] in _POWERS else (plain, "")
    try:
        value = float(number) * base ** _POWERS[power]
    except ValueError:
        value = 0.0
    if not 0 < value < 2**62:
        raise UserError(f"{name}={text!r} is not a number of bytes", "For example 200GB.")
    return int(value)
