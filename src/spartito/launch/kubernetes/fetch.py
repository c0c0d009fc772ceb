"""Fetches the data of a job into a folder: python -m spartito.launch.kubernetes.fetch URL FOLDER.

An archive (tar, zip) is unpacked; another file is put there as it is. What is there already is
taken, for a pod that is started again.
"""

from __future__ import annotations

import shutil
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path, PurePosixPath
from urllib.error import URLError
from urllib.parse import urlsplit
from urllib.request import urlopen

from spartito.errors import SpartitoError, UserError
from spartito.log import note

DONE = ".fetched"
ARCHIVES = (".tar", ".tgz", ".tar.gz", ".tar.bz2", ".tar.xz", ".zip")
"""What is unpacked, by the end of its name."""

SECONDS = 60.0
"""For a reply, and between two parts of it."""


def path_of(url: str) -> str:
    """Where the data of ``url`` is in a pod: the folder, or the one file in it."""
    name = _name(url)
    return "/data" if name.endswith(ARCHIVES) else f"/data/{name}"


def fetch(url: str, folder: Path) -> None:
    """Put what is at ``url`` into ``folder``; `SpartitoError` where that fails."""
    done = folder / DONE
    if done.is_file() and done.read_text() == url:
        return
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        file = Path(scratch) / "file"
        try:
            with urlopen(url, timeout=SECONDS) as reply, file.open("wb") as to:
                shutil.copyfileobj(reply, to, 1 << 20)
        except (URLError, OSError, ValueError) as error:
            raise SpartitoError(f"{url} cannot be fetched: {error}") from error
        note("%s: %.1f MB", url, file.stat().st_size / 1e6)
        try:
            _put(file, folder, _name(url))
        except (tarfile.TarError, zipfile.BadZipFile, OSError) as error:
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
            tar.extractall(folder, filter="data")  # nothing outside of the folder


if __name__ == "__main__":
    fetch(sys.argv[1], Path(sys.argv[2]))
