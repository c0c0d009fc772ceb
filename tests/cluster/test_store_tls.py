"""The store where its job encrypts: who is in between reads nothing, and a half greeting ends."""

from __future__ import annotations

import logging
import queue
import socket
import ssl
import time
from contextlib import suppress
from logging.handlers import QueueHandler

import pytest

from spartito.cluster.store.protocol import PURPOSE, Reply, Set
from spartito.wire import acceptor
from spartito.wire.frames import Wire
from spartito.wire.handshake import MAGIC, OtherProgramError, prove
from spartito.wire.secret import Key
from spartito.wire.tls import contexts
from tests.cluster.stores import KEY, LIMIT, SECRET, TLS, client, is_closed, served
from tests.wiretap import between


@pytest.mark.parametrize("key", [KEY, TLS])
def test_what_passes_can_be_read_where_tasks_do_not_encrypt_alone(key: Key) -> None:
    value = b"an address of the job" * 1000
    with served(key) as server, between(server.address[1]) as (way, heard):
        each = client(("127.0.0.1", way), key)
        each.set("a key of it", value)
        assert each.get("a key of it") == value
        each.close()
    assert len(heard) > 2 * len(value)
    for word in (b"an address", b"a key of it"):
        assert (word in heard) == (not key.encrypts)


@pytest.mark.parametrize(
    ("key", "other", "error", "noted"),
    [
        (TLS, KEY, "encrypts what it sends, and this task does not", "it does not encrypt, or"),
        (KEY, TLS, "does not encrypt what it sends", "it encrypts, and this task does not"),
    ],
)
def test_who_encrypts_and_who_does_not_find_out(
    key: Key, other: Key, error: str, noted: str
) -> None:
    said = queue.SimpleQueue[logging.LogRecord]()  # by a thread of the store, sooner or later
    hears = QueueHandler(said)
    logger = logging.getLogger("spartito")
    logger.addHandler(hears)
    try:
        with served(key) as server:
            with pytest.raises(OtherProgramError, match=error):
                client(server, other).keys()
            assert client(server, key).keys() == {}
            assert noted in said.get(timeout=LIMIT).getMessage()
    finally:
        logger.removeHandler(hears)


def test_who_begins_to_encrypt_and_stops_is_disconnected_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the middle of the first message; and after it, without a certificate."""
    monkeypatch.setattr(acceptor, "GREETING_SECONDS", 0.2)
    goes = ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        contexts(SECRET).caller.wrap_bio(ssl.MemoryBIO(), goes).do_handshake()
    first = goes.read()
    for words in (first[:20], first):
        with served(TLS) as server, socket.create_connection(server.address, LIMIT) as caller:
            caller.sendall(words)
            assert is_closed(caller)
            assert client(server, TLS).keys() == {}


def test_who_has_no_certificate_of_the_job_gets_no_reply() -> None:
    unknown = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    unknown.check_hostname, unknown.verify_mode = False, ssl.CERT_NONE
    with served(TLS) as server, socket.create_connection(server.address, LIMIT) as raw:
        with suppress(ssl.SSLError, ConnectionError), unknown.wrap_socket(raw) as end:
            end.sendall(MAGIC + bytes(60))
            assert not end.recv(1)
        assert client(server, TLS).keys() == {}


def test_what_is_changed_on_its_way_ends_the_connection(caplog: pytest.LogCaptureFixture) -> None:
    """Also where who comes is known already: TLS notices before a frame is looked at."""
    with served(TLS) as server:
        connected = socket.create_connection(server.address, LIMIT)
        end = time.monotonic() + LIMIT
        one = Wire(prove(connected, "the store", TLS, PURPOSE, end), Reply, timeout=LIMIT)
        one.send(Set("a", b"1"))
        assert one.receive() == Reply()
        connected.sendall(b"\x17\x03\x03\x00\x20" + bytes(32))
        assert is_closed(connected)
        one.close()
        assert client(server, TLS).keys() == {"a": b"1"}
        assert "what came was changed on its way" in caplog.text
