"""What a sealed connection hands out is what the peer sent: as a whole, in order, once."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress

import pytest

from spartito.wire.handshake import challenge, prove
from spartito.wire.limits import RECORD
from spartito.wire.secret import Key
from spartito.wire.streams import HEAD, Connection, ForgedError, Sealed
from spartito.wire.tls import Encrypted

LIMIT = 30.0
SECRET = b"what the tasks of this job know"
KEYS = bytes(32), bytes([1]) * 32


@contextmanager
def encrypted() -> Iterator[tuple[Connection, Connection]]:
    """Both ends of a connection by TLS."""
    below, other = socket.socketpair()
    end = time.monotonic() + LIMIT
    with below, other, ThreadPoolExecutor(1) as pool:
        calling = pool.submit(Encrypted, below, SECRET, listens=False, end=end)
        listening = Encrypted(other, SECRET, listens=True, end=end)
        yield calling.result(LIMIT), listening


@contextmanager
def sealed() -> Iterator[tuple[Connection, Connection, socket.socket]]:
    """Both ends of a connection, and the socket below the first one."""
    below, other = socket.socketpair()
    with below, other:
        below.settimeout(LIMIT)
        other.settimeout(LIMIT)
        yield Sealed(below, *KEYS), Sealed(other, *reversed(KEYS)), below


def record(number: int, data: bytes) -> bytes:
    """The bytes on the wire of one that the first end sends."""
    below, other = socket.socketpair()
    with below, other:
        end = Sealed(below, *KEYS)
        for _ in range(number):
            end.sendall(b"before")
        other.recv(1 << 16) if number else None
        end.sendall(data)
        return other.recv(1 << 16)


def change_a_bit(wire: bytes) -> bytes:
    position = random.Random(7).randrange(len(wire) * 8)
    changed = bytearray(wire)
    changed[position // 8] ^= 1 << position % 8
    return bytes(changed)


@pytest.mark.parametrize(
    "forged",
    [
        change_a_bit,
        lambda wire: wire[: HEAD.size] + b"GRADIENT" + wire[HEAD.size + 8 :],
        lambda wire: HEAD.pack(0, bytes(16)) + wire,
        lambda wire: HEAD.pack(RECORD + 1, bytes(16)) + wire,
        lambda _: record(1, b"gradient 1"),  # one that was sent, later
        lambda _: record(0, b"gradient 1")[:4] + bytes(16) + b"gradient 1",
    ],
)
def test_not_a_byte_is_handed_out_of_what_is_not_the_peers(
    forged: Callable[[bytes], bytes],
) -> None:
    with sealed() as (_, end, below):
        below.sendall(forged(record(0, b"gradient 1")))
        below.shutdown(socket.SHUT_WR)
        with pytest.raises(ForgedError):
            end.recv(10)


def test_what_was_sent_once_comes_once() -> None:
    wire = record(0, b"gradient 1")
    with sealed() as (_, end, below):
        below.sendall(wire + wire)
        assert end.recv(10) == b"gradient 1"
        with pytest.raises(ForgedError):
            end.recv(10)


@pytest.mark.parametrize("both", [sealed, encrypted])
def test_bytes_cross_in_both_directions_however_they_are_cut(
    both: Callable[[], AbstractContextManager[tuple[Connection, ...]]],
) -> None:
    """Without blocking, in parts from 1 byte to many records, that end anywhere."""
    draw = random.Random(3)
    said = [draw.randbytes(3 * RECORD + 1234) for _ in range(2)]
    with both() as (first, second, *_):
        ends, left = [first, second], [memoryview(data) for data in said]
        heard: list[bytearray] = [bytearray(), bytearray()]
        for end in ends:
            end.setblocking(False)
        deadline = time.monotonic() + LIMIT
        while any(left) or [len(data) for data in heard] != [len(said[1]), len(said[0])]:
            assert time.monotonic() < deadline
            for number, end in enumerate(ends):
                cut = draw.choice([1, 100, RECORD, 5 * RECORD])
                try:
                    view = left[number]
                    left[number] = view[end.sendmsg([view[:cut], view[cut : 2 * cut]]) :]
                except BlockingIOError:
                    pass
                with suppress(BlockingIOError):
                    heard[number] += end.recv(draw.choice([1, 1000, RECORD, 5 * RECORD]))
        assert [bytes(data) for data in heard] == said[::-1]


def test_who_sends_may_write_to_the_memory_once_the_call_is_back() -> None:
    with sealed() as (first, second, _):
        for end in (first, second):
            end.setblocking(False)
        data, sent, heard = bytearray(b"x" * RECORD), 0, b""
        with suppress(BlockingIOError):
            while count := first.sendmsg([data]):
                sent += count
        data[:] = b"y" * RECORD  # a part of a record is on its way
        while len(heard) < sent + RECORD:
            with suppress(BlockingIOError):
                heard += second.recv(1 << 20)
            if len(heard) == sent:
                with suppress(BlockingIOError):
                    first.sendmsg([b"x" * RECORD])
        assert set(heard) == {ord("x")}


def test_two_connections_of_one_job_have_different_keys() -> None:
    """What was recorded on one says nothing on another."""
    key, heard = Key(b"the secret of this job"), []

    def listen(listener: socket.socket) -> None:
        below = listener.accept()[0]
        with challenge(below, key, "test", time.monotonic() + LIMIT):
            heard.append(below.recv(100))

    for _ in range(2):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            thread = threading.Thread(target=listen, args=(listener,))
            thread.start()
            below = socket.create_connection(listener.getsockname(), LIMIT)
            with prove(below, "it", key, "test", time.monotonic() + LIMIT) as end:
                end.sendall(b"gradient")
                thread.join()
    assert heard[0][4 : HEAD.size] != heard[1][4 : HEAD.size]
    assert heard[0][HEAD.size :] == heard[1][HEAD.size :] == b"gradient"
