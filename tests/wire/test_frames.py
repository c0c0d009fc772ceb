"""Messages arrive whole or not at all, whatever is sent; nothing that comes is believed."""

from __future__ import annotations

import random
import socket
import threading
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from spartito.wire.frames import PREFIX, START, Gone, ProtocolError, Wire, checksum
from spartito.wire.handshake import MAGIC, VERSION
from spartito.wire.streams import Sealed

LIMIT = 1 << 16
LONG = 60.0  # seconds that no passing test comes near


class Push(msgspec.Struct, tag="push"):
    task: str
    work_items: list[tuple[int, int, int]]


class Note(msgspec.Struct, tag="note"):
    text: str


class Anything(msgspec.Struct, tag="anything"):
    what: object


ACCEPTS = Push | Note
NOTE = Note("hello")


def unix_pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair()


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        return near, listener.accept()[0]


@contextmanager
def wires(
    pair: Callable[[], tuple[socket.socket, socket.socket]] = unix_pair,
    limit: int = LIMIT,
    timeout: float | None = LONG,
) -> Iterator[tuple[Wire, Wire]]:
    near, progress = (Wire(sock, ACCEPTS, limit=limit, timeout=timeout) for sock in pair())
    try:
        yield near, progress
    finally:
        near.close()
        progress.close()


@contextmanager
def reader(
    limit: int = LIMIT, timeout: float | None = LONG, accepts: object = ACCEPTS
) -> Iterator[tuple[socket.socket, Wire]]:
    """A bare socket, and the wire that reads what is written to it."""
    bare, sock = socket.socketpair()
    wire = Wire(sock, accepts, limit=limit, timeout=timeout)
    with bare:
        try:
            yield bare, wire
        finally:
            wire.close()


@contextmanager
def thread(work: Callable[[], object]) -> Iterator[Future[object]]:
    """``work`` in a thread that has ended when the block is left; its result or its error."""
    reply: Future[object] = Future()

    def run() -> None:
        try:
            reply.set_result(work())
        except BaseException as error:
            reply.set_exception(error)

    worker = threading.Thread(target=run, daemon=True)
    worker.start()
    try:
        yield reply
    finally:
        worker.join(LONG)
        assert not worker.is_alive()


def frame(message: msgspec.Struct = NOTE, *payload: bytes) -> bytes:
    """The bytes that a wire sends for it."""
    bare, sock = socket.socketpair()
    with bare:
        wire = Wire(sock, ACCEPTS, timeout=LONG)
        wire.sums = True
        wire.send(message, *payload)
        wire.close()
        return b"".join(iter(lambda: bare.recv(1 << 16), b""))


def forged(header: bytes, payload: bytes = b"", **fields: int) -> bytes:
    """A frame with a right CRC around whatever the test wants in it."""
    sizes = {"header_size": len(header), "payload_size": len(payload)}
    claims = sizes | {"sum": checksum(memoryview(payload))} | fields

    def prefix(crc: int) -> bytes:
        return PREFIX.pack(
            MAGIC, VERSION, claims.get("flags", 0), claims.get("reserved", 0),
            claims["header_size"], claims["payload_size"], crc, claims["sum"],
        )  # fmt: skip

    filled = header + bytes(max(0, START - PREFIX.size - len(header)))
    return prefix(zlib.crc32(prefix(0) + filled)) + filled + payload


def reply_to(data: bytes, limit: int = LIMIT, accepts: object = ACCEPTS) -> object:
    """What a wire makes of ``data`` and then the end of the connection: a message or an error."""
    with reader(limit, accepts=accepts) as (bare, wire):
        bare.sendall(data)
        bare.shutdown(socket.SHUT_WR)
        try:
            return wire.receive()
        except (ProtocolError, Gone) as error:
            return error


@pytest.mark.parametrize("sums", [False, True])
@pytest.mark.parametrize("pair", [unix_pair, tcp_pair])
@pytest.mark.parametrize("sizes", [[], [0], [1], [8], [3, 0, 5, 64, 7], [1000] * 40, [1] * 1500])
def test_a_message_arrives_with_its_payload(
    pair: Callable[[], tuple[socket.socket, socket.socket]], sizes: list[int], sums: bool
) -> None:
    buffers = [random.Random(size).randbytes(size) for size in sizes]
    message = Push("worker 1", [(0, 17, 1), (0, 18, 1)])
    with wires(pair) as (near, progress):
        assert near.sums is progress.sums is False  # nothing leaves the machine
        near.sums = sums
        for _ in range(3):
            near.send(message, *buffers)
            assert progress.receive() == message
            assert progress.payload == b"".join(buffers)
            progress.send(NOTE)
            assert near.receive() == NOTE
            assert len(near.payload) == 0
        assert near.sent == progress.received == 3 * len(frame(message, *buffers))
        assert progress.sent == near.received == 3 * len(frame())


def test_arrays_are_sent_as_they_lie_in_memory() -> None:
    arrays: list[npt.NDArray[Any]] = [
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.ones((), np.int64),
        np.ones((0, 4)),
    ]
    with wires() as (near, progress):
        near.send(NOTE, *arrays)
        progress.receive()
        assert progress.payload == b"".join(array.tobytes() for array in arrays)


def test_only_contiguous_buffers_are_sent() -> None:
    with wires() as (near, _), pytest.raises(TypeError, match="contiguous"):
        near.send(NOTE, np.ones((4, 4))[:, 1])


def test_the_payload_goes_where_it_is_told() -> None:
    target = np.zeros(3, np.float32)
    with wires(limit=0) as (near, progress):
        near.send(NOTE, np.array([1, 2, 3], np.float32))
        assert progress.receive(target.data) == NOTE
        assert target.tolist() == [1, 2, 3]
        near.send(NOTE)
        progress.receive(target.data)
        assert len(progress.payload) == 0
        assert target.tolist() == [1, 2, 3]


@pytest.mark.parametrize("size", [11, 13])
def test_a_payload_of_another_size_than_its_target_leaves_the_target_alone(size: int) -> None:
    target = bytearray(12)
    with wires(limit=13) as (near, progress):
        near.send(NOTE, b"x" * size)
        assert progress.receive(memoryview(target)) == NOTE
        assert progress.payload == b"x" * size
        progress.limit = size - 1
        near.send(NOTE, b"x" * size)
        with pytest.raises(ProtocolError, match=f"{size} bytes of payload came; {size - 1} are"):
            progress.receive(memoryview(target))
    assert target == bytes(12)


@pytest.mark.parametrize("pair", [unix_pair, tcp_pair])
def test_large_payloads_cross_in_both_directions_at_once(
    pair: Callable[[], tuple[socket.socket, socket.socket]],
) -> None:
    size = 8 << 20  # far more than the sockets hold: both directions must move
    data = [np.random.default_rng(seed).bytes(size) for seed in (0, 1)]
    with wires(pair, limit=size) as (near, progress):
        with (
            thread(lambda: near.send(NOTE, data[0][:5], data[0][5:])) as first,
            thread(lambda: progress.send(NOTE, data[1])) as second,
            thread(near.receive) as third,
        ):
            progress.receive()
            for done in (first, second, third):
                done.result(LONG)
        assert progress.payload == data[0]
        assert near.payload == data[1]


def test_a_frame_may_come_in_parts() -> None:
    message = Push("worker 0", [(1, 2, 3)])
    data = frame(message, b"payload")

    with reader() as (bare, wire):

        def drip() -> None:
            for target in range(len(data)):
                bare.sendall(data[target : target + 1])

        with thread(drip) as dripping:
            assert wire.receive() == message
            dripping.result(LONG)
        assert bytes(wire.payload) == b"payload"


def test_a_connection_that_ends_anywhere_is_gone() -> None:
    data = frame(NOTE, b"payload")
    for length in range(len(data)):
        assert isinstance(reply_to(data[:length]), Gone)
    assert reply_to(data) == NOTE


def test_who_keeps_an_error_hides_it_from_nobody() -> None:
    near, far = unix_pair()
    far.close()
    with Sealed(near, bytes(16), bytes(16)) as sealed:
        wire = Wire(sealed, ACCEPTS, limit=LIMIT)
        with pytest.raises(Gone) as kept:
            wire.send(NOTE)
        with pytest.raises(Gone):  # of a thread that does not know of it
            wire.send(NOTE)
    assert kept.tb is not None


def test_a_sender_whose_reader_went_is_told() -> None:
    with wires(tcp_pair) as (near, progress):
        progress.close()

        def send_on() -> None:
            while True:
                near.send(NOTE, bytes(LIMIT))

        with thread(send_on) as sending, pytest.raises(Gone):
            sending.result(LONG)


@pytest.mark.parametrize("pair", [unix_pair, tcp_pair])
def test_closing_wakes_the_thread_that_waits(
    pair: Callable[[], tuple[socket.socket, socket.socket]],
) -> None:
    with wires(pair, timeout=None) as (near, _), thread(near.receive) as waiting:
        near.close()
        near.close()
        with pytest.raises(Gone):
            waiting.result(LONG)


@pytest.mark.parametrize("length", [0, 3, 32, 40, -1])
def test_silence_anywhere_is_a_timeout(length: int) -> None:
    with reader(timeout=0.02) as (bare, wire):
        bare.sendall(frame(NOTE, b"payload")[:length])
        with pytest.raises(TimeoutError):
            wire.receive()


@pytest.mark.parametrize("pair", [unix_pair, tcp_pair])
def test_nobody_who_reads_is_a_timeout(
    pair: Callable[[], tuple[socket.socket, socket.socket]],
) -> None:
    with wires(pair, timeout=0.02) as (near, _):
        for _ in range(2):  # the second time nothing at all is taken
            with pytest.raises(TimeoutError, match="taken"):
                near.send(NOTE, bytes(64 << 20))


def test_the_time_limit_can_be_changed() -> None:
    with wires(timeout=None) as (near, progress):
        progress.timeout = 0.2
        with pytest.raises(TimeoutError, match=r"within 0\.2 s"):
            progress.receive()
        assert near.timeout is None
