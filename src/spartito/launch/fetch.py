"""Fetches the data of a job into a folder: python -m spartito.launch.fetch URL FOLDER.

In a pod, or on a node of a cloud tool. An archive (tar, zip) is unpacked; another file is put there
as it is. What is there already is taken, for a pod that is started again.
"""

from __future__ import annotations

import re
import shutil
import sys
import tarfile
import tempfile
import zipfile
from http.client import HTTPException
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit
from urllib.request import urlopen

from spartito.errors import SpartitoError, UserError, show
from spartito.notes import note

DONE = ".fetched"
ARCHIVES = (".tar", ".tgz", ".tar.gz", ".tar.bz2", ".tar.xz", ".zip")
"""What is unpacked, by the end of its name."""

URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/+(.*)")
"""A URL, as a path has it: with one slash."""

SCHEMES = ("http", "https")
"""What is fetched."""

SECONDS = 60.0
"""For a reply, and between two parts of it."""


def path_of(url: str, folder: str = "/data") -> str:
    """Where the data of ``url`` is once it is in ``folder``: all of it, or the one file in it."""
    name = _name(url)
    return folder if name.endswith(ARCHIVES) else f"{folder}/{name}"


def parse_url(text: str) -> tuple[str, str] | None:
    """Scheme and rest of a URL, which may have gone through a path; None where it is none."""
    found = URL.fullmatch(text)
    return None if found is None else (found[1], found[2])


def fetch(url: str, folder: Path) -> None:
    """Put what is at ``url`` into ``folder``.

    Args:
        url: Of an archive or a file.
        folder: Where it goes.

    Raises:
        SpartitoError: It cannot be had, or not all of it came.
        UserError: It is no such archive.
    """
    done = folder / DONE
    if done.is_file() and done.read_text() == url:
        return
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        file = Path(scratch) / "file"
        try:
            with urlopen(url, timeout=SECONDS) as reply, file.open("wb") as to:
                shutil.copyfileobj(reply, to, 1 << 20)
                size, came = reply.headers.get("Content-Length"), to.tell()
            if size is not None and came != int(size):  # of which urllib says nothing
                raise OSError(f"{came} of {size} bytes came")
        except (HTTPException, OSError, ValueError) as error:
            raise SpartitoError(f"{url} cannot be fetched: {error}") from error
        note("%s: %.1f MB", url, file.stat().st_size / 1e6)
        try:
            _put(file, folder, _name(url))
        except Exception as error:  # each kind of archive has errors of its own
            raise UserError(f"{url} cannot be unpacked: {error}") from error
    done.write_text(url)


def _name(url: str) -> str:
    return PurePosixPath(urlsplit(url).path).name or "data"


def _put(file: Path, folder: Path, name: str) -> None:
    """Unpack an archive, else keep the file by its ``name``."""
    if not name.endswith(ARCHIVES):
        file.rename(folder / name)
    elif name.endswith(".zip"):
        with zipfile.ZipFile(file) as archive:
            archive.extractall(folder)
    else:
        with tarfile.open(file) as tar:
            _unpack(tar, folder)


def _unpack(tar: tarfile.TarFile, folder: Path) -> None:
    """All of an archive, and nothing outside of the folder."""
    if hasattr(tarfile, "data_filter"):
        tar.extractall(folder, filter="data")
        return
    for member in tar:  # Python before 3.11.4
        inside = (folder / member.name).resolve().is_relative_to(folder.resolve())
        if not inside or not (member.isfile() or member.isdir()):
            raise tarfile.TarError(f"{member.name!r} is a link, or lies outside of the archive")
        tar.extract(member, folder)


if __name__ == "__main__":
    try:
        fetch(sys.argv[1], Path(sys.argv[2]))
    except SpartitoError as error:
        sys.exit(show(error))
