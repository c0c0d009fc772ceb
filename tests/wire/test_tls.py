"""TLS 1.3 with certificates of the job alone; who encrypts and who does not find out which."""

from __future__ import annotations

import os
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from queue import Queue

import pytest

from spartito.cluster.endpoints import job_key
from spartito.cluster.resolver import resolve
from spartito.errors import UserError
from spartito.wire.acceptor import Acceptor
from spartito.wire.dialing import reach
from spartito.wire.secret import NO_SECRET, Key
from spartito.wire.streams import Connection
from spartito.wire.tls import contexts
from tests.wiretap import between

HOST, PURPOSE, LIMIT = "127.0.0.1", "test", 30.0
KEY = Key(b"what the tasks of this job know", encrypts=True)
PLAIN, OTHER = replace(KEY, encrypts=False), Key(b"what those of another know", encrypts=True)


@contextmanager
def echo(key: Key) -> Iterator[tuple[int, Queue[str]]]:
    """An acceptor that sends back what it receives: its port, and why it refused whom."""

    def enter(caller: Connection) -> None:
        with caller:
            while said := caller.recv(1 << 16):
                caller.sendall(said)

    refused: Queue[str] = Queue()
    listener = socket.create_server((HOST, 0))
    port = listener.getsockname()[1]
    door = Acceptor(
        listener,
        enter,
        key=key,
        purpose=PURPOSE,
        name="ps 0",
        refused=lambda _, why: refused.put(str(why)),
    )
    try:
        yield port, refused
    finally:
        door.close()


@pytest.mark.parametrize("key", [KEY, PLAIN])
def test_what_passes_can_be_read_by_nobody_in_between(key: Key) -> None:
    said = b"a weight of the model" * 100
    with echo(key) as (port, _), between(port) as (way, heard):
        with reach(HOST, way, "ps 0", LIMIT, key=key, purpose=PURPOSE) as caller:
            caller.sendall(said)
            assert caller.recv(len(said), socket.MSG_WAITALL) == said
            caller.shutdown(socket.SHUT_WR)
        wire = bytes(heard)
    assert (b"a weight" in wire) == (not key.encrypts)


@pytest.mark.parametrize(
    ("caller", "listener", "error", "noted"),
    [
        (OTHER, KEY, "does not know the secret of this task", "does not know the job's secret"),
        (PLAIN, KEY, "encrypts what it sends, and this task does not", "it does not encrypt, or"),
        (NO_SECRET, KEY, "encrypts what it sends, and this task", "it does not encrypt, or"),
        (KEY, PLAIN, "does not encrypt what it sends", "it encrypts, and this task does not"),
    ],
)
def test_who_is_of_another_job_or_does_not_encrypt_is_refused(
    caller: Key, listener: Key, error: str, noted: str
) -> None:
    with echo(listener) as (port, refused):
        with pytest.raises(UserError, match=error):
            reach(HOST, port, "ps 0", LIMIT, key=caller, purpose=PURPOSE)
        assert noted in refused.get(timeout=LIMIT)


def _gets_a_reply(context: ssl.SSLContext, raw: socket.socket) -> bool:
    try:
        with context.wrap_socket(raw) as end:
            end.sendall(b"SPTO" + bytes(32))
            return bool(end.recv(1))
    except (ssl.SSLError, ConnectionError):
        return False


def test_who_has_no_certificate_of_the_job_gets_no_connection() -> None:
    """Neither one without a certificate, nor one that would take an older TLS."""
    unknown = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    unknown.check_hostname, unknown.verify_mode = False, ssl.CERT_NONE
    older = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    older.check_hostname, older.verify_mode = False, ssl.CERT_NONE
    older.maximum_version = ssl.TLSVersion.TLSv1_2
    with echo(KEY) as (port, refused):
        for context in (unknown, older):
            with socket.create_connection((HOST, port), LIMIT) as raw:
                assert not _gets_a_reply(context, raw)
        with reach(HOST, port, "ps 0", LIMIT, key=KEY, purpose=PURPOSE) as ours:
            ours.sendall(b"x")
            assert ours.recv(1) == b"x"
        for _ in range(2):
            assert refused.get(timeout=LIMIT) == "it does not know the job's secret"


def test_tasks_make_certificates_of_one_authority_with_keys_of_their_own() -> None:
    """Each in a process of its own; the keys leave no file behind."""
    program = (
        "import os, ssl\n"
        "from spartito.wire.tls import contexts\n"
        "found = contexts(b'what the tasks of this job know')\n"
        "print(found.caller.get_ca_certs(True)[0].hex())\n"
        "print(len(os.listdir(os.environ['TMPDIR'])))\n"
    )
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        out = subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"TMPDIR": folder},
            text=True,
            capture_output=True,
            check=True,
        ).stdout.split()
    assert out[1] == "0"
    from cryptography import x509

    theirs = x509.load_der_x509_certificate(bytes.fromhex(out[0]))
    ours = x509.load_der_x509_certificate(contexts(KEY.secret).caller.get_ca_certs(True)[0])
    assert theirs.public_key() == ours.public_key()
    assert theirs.serial_number != ours.serial_number
    with echo(KEY) as (port, _), ThreadPoolExecutor(1) as pool:
        code = (
            "import sys\n"
            "from spartito.wire.secret import Key\n"
            "from spartito.wire.dialing import reach\n"
            f"key = Key({KEY.secret!r}, True)\n"
            f"end = reach('{HOST}', {port}, 'ps 0', 30.0, key=key, purpose='{PURPOSE}')\n"
            "end.sendall(b'hello')\n"
            "print(end.recv(5))\n"
        )
        run = pool.submit(subprocess.check_output, [sys.executable, "-c", code], text=True)
        assert run.result(LIMIT) == "b'hello'\n"


GIVEN = "0123456789abcdef0123456789abcdef"


@pytest.mark.parametrize(
    ("host", "env", "encrypts"),
    [
        ("10.0.0.1", {"SPARTITO_SECRET": GIVEN}, True),
        ("127.0.0.1", {"SPARTITO_SECRET": GIVEN}, False),
        ("127.0.0.1", {"SPARTITO_SECRET": GIVEN, "SPARTITO_TLS": "on"}, True),
        ("10.0.0.1", {"SPARTITO_SECRET": GIVEN, "SPARTITO_TLS": "off"}, False),
        ("10.0.0.1", {}, False),
    ],
)
def test_jobs_encrypt_where_others_could_read(
    host: str, env: dict[str, str], encrypts: bool
) -> None:
    variables = {
        "MASTER_ADDR": host, "MASTER_PORT": "2950", "RANK": "1", "WORLD_SIZE": "2",
        "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
    } | env  # fmt: skip
    assert job_key(resolve(variables), variables).encrypts is encrypts


@pytest.mark.parametrize("asked", ["on", "yes"])
def test_a_job_that_cannot_encrypt_as_it_is_told_to_says_so(asked: str) -> None:
    with pytest.raises(UserError, match=f"SPARTITO_TLS='?{asked}"):
        job_key(resolve({}), {"SPARTITO_TLS": asked})
