"""The data of a job in pods and on rented nodes, fetched from a server before a task starts."""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from spartito.errors import SpartitoError
from spartito.launch.fetch import fetch as put_into
from spartito.launch.fetch import path_of

FETCH = ("-m", "spartito.launch.fetch")
OLDER = (
    "import sys, runpy, tarfile; del tarfile.data_filter; "
    "runpy.run_module('spartito.launch.fetch', run_name='__main__')"
)
"""As the Python of Debian 12, whose tarfile knows no filters."""


def tar_of(names: dict[str, bytes], *, link: str = "") -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as tar:
        for name, data in names.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
        if link:
            member = tarfile.TarInfo(link)
            member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
            tar.addfile(member)
    return made.getvalue()


def zip_of(names: dict[str, bytes], *, locked: bool = False) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for name, data in names.items():
            archive.writestr(name, data)
    found = made.getvalue()
    if locked:  # as with a password: a bit of the flags, in the list at the end and of the file
        found = found.replace(b"PK\1\2\x14\3\x14\0\0", b"PK\1\2\x14\3\x14\0\1")
        found = found.replace(b"PK\3\4\x14\0\0", b"PK\3\4\x14\0\1")
    return found


FILES = {"train/a.bin": b"a" * 70_000, "labels.csv": b"1,2"}
SERVED = {
    "/data.tar.gz": tar_of(FILES),
    "/data.zip": zip_of(FILES),
    "/labels.csv": FILES["labels.csv"],
    "/outside.tar.gz": tar_of({"../outside": b"x"}),
    "/link.tar.gz": tar_of(FILES, link="passwd"),
    "/half.tar.gz": tar_of({"a.bin": bytes(range(256)) * 400})[:-60],
    "/none.zip": b"no archive",
    "/cut.csv": b"1,2",
    "/cut.chunks": b"1,2",
    "/locked.zip": zip_of({"a": b"1"}, locked=True),
}


class Server(ThreadingHTTPServer):
    """Serves `SERVED`; ``asked`` counts."""

    asked = 0


class Reply(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, Server)
        self.server.asked += 1
        if self.path == "/moved.zip":
            self.send_response(302)
            self.send_header("Location", "/data.zip")
            self.end_headers()
            return
        data = SERVED.get(self.path)
        self.send_response(404 if data is None else 200)
        if self.path == "/cut.chunks":
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.wfile.write(b"a\r\n1,2")
            return
        more = 10 if self.path == "/cut.csv" else 0
        self.send_header("Content-Length", str(len(data or b"") + more))
        self.end_headers()
        self.wfile.write(data or b"")

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Reply) as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield made
        made.shutdown()


def fetch(server: Server, name: str, folder: Path, older: bool = False) -> tuple[int, str]:
    """How the program ends that runs in a pod, and what it says."""
    url = f"http://127.0.0.1:{server.server_port}/{name}"
    program = ("-c", OLDER) if older else FETCH
    words = [sys.executable, *program, url, str(folder)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stderr


def files(folder: Path) -> dict[str, bytes]:
    found = (path for path in folder.rglob("*") if path.is_file() and path.name != ".fetched")
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


@pytest.mark.parametrize("older", [False, True])
def test_an_archive_is_unpacked_and_not_fetched_twice(
    server: Server, tmp_path: Path, older: bool
) -> None:
    for _ in range(2):  # a pod that is started again
        code, said = fetch(server, "data.tar.gz", tmp_path, older)
        assert code == 0, said
    assert files(tmp_path) == FILES
    assert server.asked == 1


def test_a_zip_behind_another_address_and_a_plain_file(server: Server, tmp_path: Path) -> None:
    assert fetch(server, "moved.zip", tmp_path)[0] == 0
    assert files(tmp_path) == FILES
    (tmp_path / "plain").mkdir()
    assert fetch(server, "labels.csv", tmp_path / "plain")[0] == 0
    assert files(tmp_path / "plain") == {Path(path_of("http://a/labels.csv")).name: b"1,2"}


@pytest.mark.parametrize(
    ("name", "code", "why"),
    [
        ("none.csv", 1, "cannot be fetched: HTTP Error 404"),
        ("cut.csv", 1, "cannot be fetched: 3 of 13 bytes came"),
        ("cut.chunks", 1, "cannot be fetched: IncompleteRead"),
        ("a b.csv", 1, "cannot be fetched: URL can't contain control characters"),
        ("locked.zip", 2, "is encrypted, password required"),
        ("half.tar.gz", 2, "cannot be unpacked: "),
        ("none.zip", 2, "cannot be unpacked: File is not a zip file"),
        ("outside.tar.gz", 2, "cannot be unpacked: "),
        ("link.tar.gz", 2, "cannot be unpacked: "),
    ],
)
@pytest.mark.parametrize("older", [False, True])
def test_what_cannot_be_had_is_said(
    server: Server, tmp_path: Path, name: str, code: int, why: str, older: bool
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    found, said = fetch(server, name, folder, older)
    assert found == code, said
    assert why in said
    assert "Traceback" not in said
    assert not (folder / ".fetched").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_data_is_fetched_and_unpacked_once(tmp_path: Path) -> None:
    served, folder = tmp_path / "served", tmp_path / "data"
    served.mkdir()
    folder.mkdir()
    (served / "text.txt").write_text("to be")
    with tarfile.open(served / "digits.tgz", "w:gz") as tar:
        tar.add(served / "text.txt", "in/text.txt")

    class Quiet(SimpleHTTPRequestHandler):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args, directory=str(served))

        def log_message(self, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        put_into(f"{url}/digits.tgz", folder)
        (folder / "in" / "text.txt").write_text("kept")
        put_into(f"{url}/digits.tgz", folder)
        put_into(f"{url}/text.txt?a=1", folder)
        with pytest.raises(SpartitoError, match="cannot be fetched"):
            put_into(f"{url}/nothing.zip", folder)
        server.shutdown()
    assert (folder / "in" / "text.txt").read_text() == "kept"
    assert (folder / "text.txt").read_text() == "to be"
    assert path_of("https://a/b/digits.tgz") == "/data"
    assert path_of("https://a/b/text.txt?c=d.zip") == "/data/text.txt"
    assert sorted(one.name for one in folder.iterdir()) == [".fetched", "in", "text.txt"]
