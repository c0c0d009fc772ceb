"""Who knows the job's secret comes in, who does not learns nothing, and floods change nothing."""

from __future__ import annotations

import logging
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import pytest

from spartito.errors import TaskLostError, UserError
from spartito.notes import shown
from spartito.wire.acceptor import Acceptor
from spartito.wire.addresses import DRAWN, Endpoint
from spartito.wire.dialing import reach
from spartito.wire.handshake import HELLO, MAGIC, NONCE, PROOF, VERSION, OtherReleaseError
from spartito.wire.limits import MOST_UNKNOWN
from spartito.wire.listening import listen
from spartito.wire.secret import NO_SECRET, Key
from spartito.wire.streams import Connection
from tests.callers import LIMIT, call, read_to_end

GREETING = HELLO.pack(MAGIC, VERSION, b"0.0.1") + bytes(NONCE)
HOST, KEY, PURPOSE = "127.0.0.1", Key(b"what the tasks of this job know"), "test"


@contextmanager
def echo(key: Key = KEY) -> Iterator[int]:
    """An acceptor that sends back what it receives; its port."""

    def enter(caller: Connection) -> None:
        with caller:
            while said := caller.recv(64):
                caller.sendall(said)

    listener = listen(Endpoint("ps 0", HOST, (DRAWN,)), 30.0)
    port = listener.getsockname()[1]
    door = Acceptor(listener, enter, key=key, purpose=PURPOSE, name="ps 0")
    try:
        yield port
    finally:
        door.close()


def is_let_in(port: int, key: Key = KEY) -> bool:
    with reach(HOST, port, "ps 0", LIMIT, key=key, purpose=PURPOSE) as caller:
        caller.settimeout(LIMIT)
        caller.sendall(b"hello")
        heard: bytes = caller.recv(5, socket.MSG_WAITALL)
        return heard == b"hello"


@pytest.mark.parametrize("key", [KEY, NO_SECRET])
def test_who_knows_the_secret_is_let_in(key: Key) -> None:
    with echo(key) as port:
        assert is_let_in(port, key)


@pytest.mark.parametrize(
    ("key", "purpose"), [(NO_SECRET, PURPOSE), (Key(b"other"), PURPOSE), (KEY, "ps")]
)
def test_who_does_not_is_told_nothing(
    key: Key, purpose: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), echo() as port:
        with pytest.raises(UserError, match=r"ps 0 .* does not know the secret of this task"):
            reach(HOST, port, "ps 0", LIMIT, key=key, purpose=purpose)
        with socket.create_connection((HOST, port)) as raw:
            raw.sendall(GREETING + bytes(PROOF))
            heard = read_to_end(raw)
        assert heard[: len(MAGIC)] == MAGIC
        assert heard[len(GREETING) :] == bytes(PROOF)
        assert is_let_in(port)
    assert "ps 0 refused 127.0.0.1: it does not know the job's secret" in caplog.text
    assert len(caplog.records) == 1  # the second within ten seconds is left out


@pytest.mark.parametrize(
    ("says", "what"),
    [
        (b"220 mail.example ESMTP\r\n", "is no task of Spartito"),
        (GREETING + bytes(PROOF), "does not know the secret"),
    ],
)
def test_a_listener_must_prove_itself_too(says: bytes, what: str) -> None:
    with socket.create_server((HOST, 0)) as server, ThreadPoolExecutor(1) as pool:
        port = server.getsockname()[1]
        calling = pool.submit(is_let_in, port)
        with server.accept()[0] as theirs:
            theirs.sendall(says)
            with pytest.raises(UserError, match=f"ps 0 at {HOST}:{port} {what}"):
                calling.result(LIMIT)


def test_another_release_is_refused_by_its_name_on_both_sides(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A later one may say more in its hello, or go on at once."""
    later = HELLO.pack(MAGIC, VERSION + 1, b"9.1.0") + bytes(NONCE + PROOF)
    said = f"runs Spartito 9.1.0 (protocol {VERSION + 1}), and this task"
    with echo() as port:
        with socket.create_connection((HOST, port)) as raw:
            raw.sendall(later)
            assert read_to_end(raw)[: HELLO.size][: len(MAGIC) + 1] == MAGIC + bytes([VERSION])
        assert is_let_in(port)
    assert f"ps 0 refused 127.0.0.1: it {said}" in caplog.text
    with socket.create_server((HOST, 0)) as server, ThreadPoolExecutor(1) as pool:
        calling = pool.submit(is_let_in, server.getsockname()[1])
        with server.accept()[0] as theirs:
            theirs.sendall(later)
            with pytest.raises(OtherReleaseError, match=re.escape(said)):
                calling.result(LIMIT)


def test_the_limit_of_a_task_that_is_gone_is_reported_as_it_was_given() -> None:
    with socket.create_server((HOST, 0)) as server, ThreadPoolExecutor(1) as pool:
        port = server.getsockname()[1]
        calling = pool.submit(reach, HOST, port, "ps 0", 1.0, key=KEY, purpose=PURPOSE)
        server.accept()[0].close()
        server.close()
        with pytest.raises(TaskLostError, match=f"ps 0 did not come to {HOST}:{port} within 1 s"):
            calling.result(LIMIT)


def test_more_unknown_peers_than_are_accepted() -> None:
    with echo() as port, ExitStack() as unknown:
        for _ in range(3 * MOST_UNKNOWN):
            unknown.enter_context(socket.create_connection((HOST, port), LIMIT))
        assert is_let_in(port)


FEW = """
import resource, socket, sys
from spartito.wire.acceptor import Acceptor
from spartito.wire.addresses import DRAWN, Endpoint
from spartito.wire.secret import Key
from spartito.wire.listening import listen

def enter(caller):
    kept.append(caller)
    caller.sendall(b"in")

kept = []
listener = listen(Endpoint("ps 0", "127.0.0.1", (DRAWN,)), 30.0)
resource.setrlimit(resource.RLIMIT_NOFILE, (24, 24))
door = Acceptor(listener, enter, key=Key(b"k"), purpose="test", name="ps 0")
print(listener.getsockname()[1], flush=True)
sys.stdin.readline()
for caller in kept:
    caller.close()
kept.clear()
print("some are free", flush=True)
sys.stdin.readline()
door.close()
"""


def test_more_connections_than_descriptors() -> None:
    """Tasks and unknown peers take all descriptors; when some come free the next one is let in."""
    with ExitStack() as ends:
        program = ends.enter_context(
            subprocess.Popen(
                [sys.executable, "-c", FEW],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
        ends.callback(program.kill)
        assert program.stdin is not None
        assert program.stdout is not None
        port = int(program.stdout.readline())
        for _ in range(15):
            ends.enter_context(call(port, PURPOSE, Key(b"k")))
        for _ in range(40):
            ends.enter_context(socket.create_connection((HOST, port), LIMIT))
        print("go", file=program.stdin, flush=True)
        assert program.stdout.readline() == "some are free\n"
        ends.enter_context(reach(HOST, port, "ps 0", LIMIT, key=Key(b"k"), purpose=PURPOSE))


def test_what_an_unknown_peer_is_called_is_one_line_of_plain_text() -> None:
    assert shown("worker 1") == "worker 1"
    assert shown("a\nspartito: all is well\x1b[2J") == "a?spartito: all is well?[2J"
    assert shown("x" * 5000) == "x" * 100 + "..."
