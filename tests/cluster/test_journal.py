"""A store that was killed comes back with its values; a process that ends lets go of its key."""

from __future__ import annotations

import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from spartito.cluster.store.client import FencedError, StoreError
from spartito.cluster.store.journal import Journal
from spartito.cluster.store.server import Server
from spartito.wire.secret import NO_SECRET
from tests.cluster.stores import KEY, client, served
from tests.commands import eventually, free_port

HOLDS = """
import sys, time
from spartito.wire.secret import NO_SECRET
from spartito.cluster.store.client import Store
held = Store("127.0.0.1", int(sys.argv[1]), NO_SECRET, 30.0).hold("lives")
print("holds", flush=True)
time.sleep(300)
"""


def journaled(path: Path) -> Server:
    return Server(socket.create_server(("127.0.0.1", 0)), KEY, journal=Journal(path))


def test_a_store_comes_back_with_what_it_was_told(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with closing(journaled(path)) as server:
        each = client(server)
        each.set("a", b"1")
        each.add("n", 5)
        assert each.swap("a", b"1", b"2") == b"2"
        assert each.swap("a", b"1", b"3") == b"2"  # nothing changed
        each.set("gone", b"")
        each.delete("gone")
        each.under("old").set("b", b"")
        each.retire("old")
        held = each.hold("held")
        assert each.gather(["held"])
        held.close()
        each.close()
    for torn in (b"", b"\x05", b"\x05\0\0\0\1\2\3\4abc", b"\x03\0\0\0\1\2\3\4abc"):
        with path.open("ab") as file:
            file.write(torn)
        with closing(journaled(path)) as server:
            each = client(server)
            assert each.keys() == {"a": b"2", "n": b"5"}
            with pytest.raises(FencedError):
                each.under("old").set("b", b"")
            each.close()
    with closing(journaled(path)) as server:
        each = client(server)
        assert each.add("n", 1) == 6
        each.close()


def test_a_full_disk_is_no_reply_to_who_could_lose_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(journaled(tmp_path / "journal")) as server:
        each = client(server)
        each.set("a", b"1")
        monkeypatch.setattr("os.write", lambda file, data: 1)
        with pytest.raises(StoreError):
            each.set("b", b"2")


def test_a_key_that_is_held_ends_with_its_process() -> None:
    with served(NO_SECRET) as server:
        each, port = client(server, NO_SECRET), str(server.address[1])
        with subprocess.Popen(
            [sys.executable, "-c", HOLDS, port], stdout=subprocess.PIPE
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"holds\n"
            assert each.keys() == {"lives": b""}
            process.kill()
        assert eventually(lambda: each.keys() == {})
        each.close()


def test_a_store_of_containers_is_a_program_that_may_be_killed(tmp_path: Path) -> None:
    port = free_port()
    words = [sys.executable, "-m", "spartito.cluster.store", f"127.0.0.1:{port}"]
    for number in range(2):
        with subprocess.Popen([*words, str(tmp_path / "journal")], env={}) as process:
            assert eventually(lambda: reached(port))
            each = client(("127.0.0.1", port), NO_SECRET)
            assert each.add("starts", 1) == number + 1
            each.close()
            process.kill() if number == 0 else process.terminate()
            assert process.wait(30) == (-9 if number == 0 else 0)


def reached(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True
