"""Every port of a job at once: whatever comes there, it harms nobody, costs nothing, and ends."""

from __future__ import annotations

import itertools
import random
import socket
import threading
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from spartito.cluster.store import protocol as store_protocol
from spartito.collectives.membership.store import Membership
from spartito.collectives.sockets.peers import RANK, close_all, connect_all
from spartito.doctor.findings import Outcome, Target
from spartito.doctor.probe.probes import probe
from spartito.doctor.transport import messages as doctor_messages
from spartito.doctor.transport.server import open_server
from spartito.ps.client.work_source import WorkerLink
from spartito.ps.protocol import messages as server_messages
from spartito.ps.protocol import work
from spartito.ps.protocol.rules import Rules
from spartito.ps.scheduler.coordinator import Coordinator
from spartito.ps.scheduler.listener import WorkerListener
from spartito.wire import acceptor
from spartito.wire.addresses import DRAWN, Endpoint
from spartito.wire.frames import PREFIX, START
from spartito.wire.handshake import HELLO, MAGIC, NONCE, PROOF, VERSION, SecretError
from spartito.wire.limits import MOST_UNKNOWN
from spartito.wire.listening import listen
from spartito.wire.secret import Key
from spartito.wire.streams import Connection, Recorded
from tests.callers import call, read_to_end
from tests.cluster.stores import client, served
from tests.commands import eventually
from tests.launch.supervised import LIMIT
from tests.ps.live import Live

HOST = "127.0.0.1"
KEY = Key(b"what the tasks of this job know")
TLS = replace(KEY, encrypts=True)
NAMES = ["worker 0", "worker 1"]


@dataclass(frozen=True)
class Port:
    """A port of a job: ``purpose`` is what its callers prove, ``serves`` what it is there for."""

    number: int
    purpose: str
    key: Key
    serves: Callable[[], None]


@contextmanager
def of_a_store(key: Key, folder: Path) -> Iterator[Port]:
    with served(key) as server:
        waits, asks = client(server, key), client(server, key)
        held = asks.hold("lives")

        def serves() -> None:
            with ThreadPoolExecutor(1) as pool:
                came = pool.submit(waits.get, "a", LIMIT)
                asks.set("a", b"1")
                assert came.result(LIMIT) == b"1"
            asks.delete("a")
            assert asks.gather(["lives"]) == {"lives": b""}

        with closing(held):
            yield Port(server.address[1], store_protocol.PURPOSE, key, serves)


@contextmanager
def of_a_server(key: Key, folder: Path) -> Iterator[Port]:
    live = Live(folder, Rules(2), key=key)
    with closing(live):
        yield Port(
            live.port,
            server_messages.PURPOSE,
            key,
            lambda: live.serves(live.store.work_items),
        )


@contextmanager
def of_a_coordinator(key: Key, folder: Path) -> Iterator[Port]:
    coordinator = Coordinator(NAMES, timeout=LIMIT)
    listener = listen(Endpoint("the chief", HOST, (DRAWN,)), LIMIT)
    port = listener.getsockname()[1]
    WorkerListener(coordinator).listen(listener, key)

    def serves() -> None:
        link = WorkerLink.connect(HOST, port, "the chief", 1, timeout=LIMIT, key=key)
        assert link.generation
        link.close()

    try:
        yield Port(port, work.PURPOSE, key, serves)
    finally:
        coordinator.close()


@contextmanager
def of_a_doctor(key: Key, folder: Path) -> Iterator[Port]:
    server, _ = open_server(Endpoint("worker 1", HOST, (DRAWN,)), 1e9, key=key)
    target = Target("worker 1", HOST, server.port)

    def serves() -> None:
        with ThreadPoolExecutor(1) as pool:
            found = pool.submit(probe, "worker 0", target, 1e9, key).result(LIMIT)
        assert found.outcome is Outcome.OK

    with closing(server):
        yield Port(server.port, doctor_messages.PURPOSE, key, serves)


@contextmanager
def of_a_peer(key: Key, folder: Path) -> Iterator[Port]:
    """It waits for the rank before it, which comes when all is over."""
    endpoint = Endpoint(NAMES[1], HOST, (DRAWN,))
    with served() as server, ThreadPoolExecutor(1) as pool:
        groups = [Membership(rank, NAMES, client(server), LIMIT) for rank in (0, 1)]
        waiting = pool.submit(connect_all, groups[1], endpoint, key)
        _, port, token = groups[0].store.get("1").decode().split()
        yield Port(int(port), f"sockets 0 {token}", key, lambda: None)
        ends = [connect_all(groups[0], endpoint, key), waiting.result(LIMIT)]
        ends[0][1].sendall(b"hello")
        ends[1][0].settimeout(LIMIT)
        assert ends[1][0].recv(5) == b"hello"
        for connections in ends:
            close_all(connections)


PortOf = Callable[[Key, Path], AbstractContextManager[Port]]
PORTS: list[PortOf] = [of_a_store, of_a_server, of_a_coordinator, of_a_doctor, of_a_peer]
GREETING = HELLO.pack(MAGIC, VERSION, b"0.1.0") + bytes(NONCE)


def frame(header: bytes = b"", **facts: int) -> bytes:
    """A frame whose CRC is right, whatever its lengths say."""
    told = {"version": VERSION, "length": len(header), "size": 0} | facts
    fields = MAGIC, told["version"], 1, 0, told["length"], told["size"]
    body = header + bytes(START - PREFIX.size - len(header))
    crc = zlib.crc32(PREFIX.pack(*fields, 0, 0) + body)
    return PREFIX.pack(*fields, crc, 0) + body


def unknown_words(draw: random.Random) -> list[bytes]:
    """What somebody says who does not know the secret, in place of the handshake."""
    hello = [GREETING[:cut] for cut in (1, 4, 5, HELLO.size, len(GREETING) - 1)]
    noise = [draw.randbytes(size) for size in (1, 31, 96, 5000, 1 << 20)]
    return [
        *hello,
        *noise,
        GREETING,
        GREETING + bytes(PROOF - 1),
        GREETING + bytes(PROOF),
        GREETING + draw.randbytes(5000),
        HELLO.pack(MAGIC, VERSION + 1, b"9.1.0") + bytes(NONCE + PROOF),
        HELLO.pack(MAGIC, VERSION, b"\xff" * 27) + bytes(NONCE + PROOF),
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + draw.randbytes(500),
        b"\x16\x03\x01\xff\xff",
        b"",
    ]


def tasks_words(draw: random.Random) -> list[bytes]:
    """What a task of the job says that has gone mad; all of them end their connection."""
    return [
        RANK.pack(77),
        draw.randbytes(300),
        draw.randbytes(1 << 20),
        *(frame()[:cut] for cut in (1, 31, START - 1)),
        frame(version=VERSION + 1),
        frame(length=(1 << 32) - 1),
        frame(size=1 << 62),
        frame(b"\xc1"),
        frame(b"\xdf\xff\xff\xff\xff"),
        frame(b"\x81\xa4kind\xa4none"),
        frame(b"\x93\xa3Set\xa1a\xc4\xff"),
    ]


def say(caller: Connection, words: bytes) -> None:
    """Say it and nothing more; whatever is said to it, the connection ends."""
    with suppress(OSError):  # it may end before all is said
        caller.sendall(words)
        caller.shutdown(socket.SHUT_WR)
    read_to_end(caller)


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("key", [KEY, TLS], ids=["sealed", "tls"])
@pytest.mark.parametrize("port_of", PORTS, ids=lambda one: one.__name__.removeprefix("of_a_"))
def test_whatever_comes_harms_nobody(
    port_of: PortOf,
    key: Key,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    raised: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    draw = random.Random(7)
    with port_of(key, tmp_path) as port:
        port.serves()
        there = threading.active_count(), descriptors()
        for words in unknown_words(draw):
            with socket.create_connection((HOST, port.number), LIMIT) as caller:
                say(caller, words)
        for other, purpose in ((replace(key, secret=b"of another job"), port.purpose), (key, "x")):
            with pytest.raises(SecretError):
                call(port.number, purpose, other)
        for words in tasks_words(draw):
            with call(port.number, port.purpose, key) as known:
                say(known, words)
        with call(port.number, port.purpose, key) as known:
            assert isinstance(known, Recorded)
            say(known._below, draw.randbytes(400))  # as somebody between the ends
        port.serves()
        with ExitStack() as silent:
            for _ in range(2 * MOST_UNKNOWN):
                silent.enter_context(socket.create_connection((HOST, port.number), LIMIT))
            port.serves()
        assert eventually(lambda: (threading.active_count(), descriptors()) <= there)
    assert raised == []


@pytest.mark.parametrize("key", [KEY, TLS], ids=["sealed", "tls"])
@pytest.mark.parametrize("port_of", PORTS, ids=lambda one: one.__name__.removeprefix("of_a_"))
def test_who_is_slow_to_say_who_he_is_is_disconnected(
    port_of: PortOf,
    key: Key,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether he says nothing, or a byte at a time."""
    with port_of(key, tmp_path) as port:
        port.serves()
        monkeypatch.setattr(acceptor, "GREETING_SECONDS", 0.3)
        for said in (b"", GREETING[:20], GREETING):
            with socket.create_connection((HOST, port.number), LIMIT) as caller:
                caller.sendall(said)
                read_to_end(caller)
        with socket.create_connection((HOST, port.number), LIMIT) as caller:
            caller.settimeout(0.01)
            begin = b"\x16\x03\x01\x40\x00" if key.encrypts else GREETING
            words = itertools.chain(begin, itertools.repeat(0))
            ended = False
            while not ended:
                try:
                    caller.sendall(bytes([next(words)]))
                    ended = caller.recv(1 << 16) == b""
                except TimeoutError:
                    pass
                except OSError:
                    ended = True
        monkeypatch.undo()
        port.serves()
