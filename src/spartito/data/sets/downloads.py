"""Fetches data sets that have a name: whole and compared with their checksums, or not at all.

parent/
    .spartito-get-mnist/    what was fetched so far, and a lock
    mnist/                  appears when all of it is right
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tarfile
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any, BinaryIO

from spartito.data.reading.progress import Progress
from spartito.data.sets.known_sets import KNOWN, KnownFile, KnownSet
from spartito.errors import UnwritableError, UserError, writable
from spartito.names import nearest
from spartito.notes import note
from spartito.storage.atomic import is_whole, read_manifest, write_directory
from spartito.storage.files import open_files, read_range
from spartito.storage.span_cache import cache_folder

PAUSES = (0.5, 2.0, 8.0)
"""Seconds before a home that failed for a moment is asked again."""
SILENCE = 60.0
"""Seconds in which a home has to say something."""
CHUNK = 1 << 20
PASSING = (408, 425, 429, 500, 502, 503, 504)
"""Codes of replies after which a home is asked again."""
FILTER: Any = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
"""Python 3.11.4 knows what of a tar is safe; before, the checksum has to do."""

Told = Callable[[int], None]


class _OtherError(Exception):
    """What a home has is not the file, or it does not have it: asking again does not help."""


def get(name: str, to: str | os.PathLike[str] | None = None, *, mirror: str | None = None) -> Path:
    """Fetch a data set that has a name, unless it is there.

    A download that was cut off goes on where it was. Of several processes that ask for the same
    set one fetches it, and the others wait. ``spartito data get`` lists the names with their sizes
    and licences.

    Args:
        name: "mnist", "fashion_mnist", "cifar10", "cats_vs_dogs" or "tiny_shakespeare".
        to: The folder in which a folder of that name is made; None: ``sets`` in the cache,
            ``SPARTITO_CACHE`` or ``~/.cache/spartito``.
        mirror: Where the files are instead of at their public homes: a URL, or a folder.

    Returns:
        Its folder, for `idx`, `cifar10`, `image_folder` or `characters`.

    Raises:
        UserError: There is no such name, no home gives the files as their checksums have them, or
            something else has the folder's name.
    """
    if name not in KNOWN:
        raise UserError(f"no data set is called {name!r}", nearest(name, KNOWN))
    known = KNOWN[name]
    parent = Path(cache_folder()) / "sets" if to is None else Path(to).expanduser()
    target = parent / name
    if _is_there(target, known):
        return target
    with writable(parent), _part_folder(parent, name) as parts:
        if not _is_there(target, known):
            _fetch_all(known, parts, (mirror,) if mirror else known.homes)
            _unpack(known, parts, target)
        _clear(known, parts)
    return target


def _is_there(target: Path, known: KnownSet) -> bool:
    """Whether a folder is the data set.

    Raises:
        UserError: It is something else, or was changed.
    """
    if not os.path.lexists(target):
        return False
    if is_whole(target) and read_manifest(target).about.get("set") == known.name:
        return True
    raise UserError(
        f"{target} is there, and is not {known.name} as it was fetched, or no longer",
        "Nothing is replaced: move it somewhere else, or fetch into another folder, --to DIR.",
    )


@contextmanager
def _part_folder(parent: Path, name: str) -> Iterator[Path]:
    """The folder of what was fetched so far, for this process alone."""
    parts = parent / f".spartito-get-{name}"
    while (lock := _locked(parts)) is None:
        pass
    with lock:
        yield parts


def _locked(parts: Path) -> BinaryIO | None:
    """The lock of the folder, held; None where who had it before has cleared the folder."""
    with suppress(FileExistsError):  # it went just now
        parts.mkdir(parents=True, exist_ok=True)
    try:
        lock = open(parts / "lock", "wb")  # noqa: SIM115
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        note("another process fetches into %s: waiting for it", parts.parent)
        fcntl.flock(lock, fcntl.LOCK_EX)
    with suppress(FileNotFoundError):
        if os.path.samestat(os.fstat(lock.fileno()), os.stat(parts / "lock")):
            return lock
    lock.close()
    return None


def _clear(known: KnownSet, parts: Path) -> None:
    """Remove what was fetched, once it is unpacked."""
    for file in known.files:
        (parts / file.name).unlink(missing_ok=True)
    (parts / "lock").unlink(missing_ok=True)
    with suppress(OSError):  # something else lies there
        parts.rmdir()


def _fetch_all(known: KnownSet, parts: Path, homes: tuple[str, ...]) -> None:
    done = 0
    with Progress(f"fetched {known.name}:", things="kB") as progress:
        for file in known.files:

            def told(here: int, before: int = done) -> None:
                progress.update((before + here) // 1000, known.size // 1000)

            _fetch_from_any(file, parts / file.name, homes, told)
            done += file.size


def _fetch_from_any(file: KnownFile, part: Path, homes: tuple[str, ...], told: Told) -> None:
    """A file from the first home that has it as it should be."""
    failed = []
    for home in homes:
        url = f"{home.rstrip('/')}/{file.name}"
        try:
            _fetch(file, part, home, url, told)
            return
        except _OtherError as error:
            failed.append(f"{url}: {error}")
    raise UserError(
        f"{file.name} cannot be fetched: " + "; ".join(failed),
        "Is this machine on the network? Another copy of the files is named by --mirror URL.",
    )


def _fetch(file: KnownFile, part: Path, home: str, url: str, told: Told) -> None:
    """A file from one home, going on with what is there of it; twice, should that be of another."""
    for is_last in (False, True):
        begun = _size(part) > 0
        _fetch_rest(file, part, home, url, told)
        found = _sha256(part)
        if found == file.sha256:
            return
        part.unlink()
        if is_last or not begun:
            raise _OtherError(f"its SHA-256 is {found}, and should be {file.sha256}")


def _fetch_rest(file: KnownFile, part: Path, home: str, url: str, told: Told) -> None:
    """What is missing of a file, asking again where a home fails for a moment."""
    rest = _rest_of_web if url.startswith(("http://", "https://")) else _rest_of_files
    why = ""
    for pause in (0.0, *PAUSES):
        if _size(part) >= file.size:
            return
        time.sleep(pause)
        try:
            rest(file, part, home, url, told)
            why = "it ends too early"
        except urllib.error.HTTPError as error:
            why = f"{error.code} {error.reason}"
            if error.code not in PASSING:
                raise _OtherError(why) from error
        except (OSError, HTTPException) as error:  # urllib's own errors are OSErrors too
            why = str(getattr(error, "reason", error)) or repr(error)
    if _size(part) < file.size:
        raise _OtherError(why)


def _rest_of_web(file: KnownFile, part: Path, home: str, url: str, told: Told) -> None:
    there = _size(part)
    span = {"Range": f"bytes={there}-{file.size - 1}"} if there else {}
    request = urllib.request.Request(url, headers={"User-Agent": "spartito", **span})
    with urllib.request.urlopen(request, timeout=SILENCE) as reply:
        begins = str(reply.headers.get("Content-Range", "")).startswith(f"bytes {there}-")
        goes_on = there and reply.status == 206 and begins
        chunks = iter(lambda: reply.read(CHUNK), b"")
        _append(chunks, part, there if goes_on else 0, file, told)


def _rest_of_files(file: KnownFile, part: Path, home: str, url: str, told: Told) -> None:
    """From a folder or a store, by what reads packed files."""
    try:
        files = open_files(home)
        there = files.look(file.name)
        if there.size != file.size:
            raise _OtherError(f"it has {there.size:,} bytes, and should have {file.size:,}")
        begun = _size(part)
        starts = range(begun, file.size, CHUNK)
        chunks = (read_range(files, there, n, min(file.size, n + CHUNK)) for n in starts)
        _append(chunks, part, begun, file, told)
    except UserError as error:
        raise _OtherError(str(error).partition("\n")[0]) from error


def _append(chunks: Iterable[bytes], part: Path, start: int, file: KnownFile, told: Told) -> None:
    """Write what comes behind what is there up to ``start``."""
    with part.open("r+b" if start else "wb") as out:
        out.truncate(start)
        out.seek(start)
        for data in chunks:
            if out.tell() + len(data) > file.size:
                out.truncate(0)
                raise _OtherError(f"it has more than {file.size:,} bytes")
            try:
                out.write(data)
                out.flush()
            except OSError as error:
                raise UnwritableError(
                    f"{part} cannot be written: {error.strerror}",
                    "Is there space on the disk? What is there stays, and is gone on from.",
                ) from error
            told(out.tell())


def _size(part: Path) -> int:
    return part.stat().st_size if part.exists() else 0


def _unpack(known: KnownSet, parts: Path, target: Path) -> None:
    about = {"set": known.name, "licence": known.licence, "homes": list(known.homes)}
    with write_directory(target, about) as new:
        for file in known.files:
            part = parts / file.name
            if file.name.endswith(".tar.gz"):
                with tarfile.open(part, "r:gz") as tar:
                    tar.extractall(new, **FILTER)
            elif file.name.endswith(".zip"):
                _unzip(part, new)
            else:
                shutil.copyfile(part, new / file.name)


def _unzip(part: Path, new: Path) -> None:
    with zipfile.ZipFile(part) as archive, Progress("unpacked") as progress:
        members = archive.infolist()
        for done, member in enumerate(members, 1):
            archive.extract(member, new)
            progress.update(done, len(members))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
