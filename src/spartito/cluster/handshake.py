"""Both ends of a new connection authenticate: they prove that they know the job's secret.

    caller:   magic, a nonce
    listener: magic, a nonce
    caller:   its proof
    listener: its proof, or zeros

A proof is an HMAC-SHA256 over both nonces, what the connection is for, and which end speaks: it
is good for this connection alone. Who does not know the secret learns that a task of Spartito
listens, and nothing else. All that follows is authenticated by keys of this connection, which come
from the secret and both nonces.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import time

from spartito.cluster.connection import Connection, Sealed
from spartito.cluster.secret import Key
from spartito.errors import SpartitoError, UserError

MAGIC = b"SPTO"
NONCE = 32
PROOF = hashlib.sha256().digest_size
LABEL = "spartito 2"
"""Another one wherever this handshake or what follows it changes its meaning."""

GREETING_SECONDS = 5.0
"""Seconds in which a caller has to authenticate, or it is disconnected."""


class UnknownPeerError(SpartitoError):
    """A caller does not know the job's secret, or is no task of Spartito."""


class OtherSecretError(UnknownPeerError):
    """A caller is a task of Spartito and does not know the job's secret."""


class OtherProgramError(UserError):
    """What listens there is no task of Spartito."""


class SecretError(UserError):
    """The task that listens there does not know our secret."""


def prove(connection: socket.socket, name: str, key: Key, purpose: str, end: float) -> Connection:
    """As the caller: the handshake with ``name``, until ``end`` of `time.monotonic`.

    Returns what is used instead of the socket from then on, a blocking one. Raises `OSError` if
    the other end closes it or is silent, `OtherProgramError` if it is no task of Spartito, and
    `SecretError` if it does not know the secret.
    """
    own = secrets.token_bytes(NONCE)
    _send(connection, MAGIC + own, end)
    reply = read(connection, len(MAGIC), end)
    if reply != MAGIC:
        raise OtherProgramError(
            f"{name} is no task of Spartito: another program replies there",
            "Correct the address, or end that program.",
        )
    nonces = own + read(connection, NONCE, end)
    _send(connection, _proof(key, "caller", purpose, nonces), end)
    found = read(connection, PROOF, end)
    if not hmac.compare_digest(found, _proof(key, "listener", purpose, nonces)):
        raise SecretError(
            f"{name} does not know the secret of this task: it is of another job, was given "
            "another SPARTITO_SECRET, or runs another Spartito",
            "Give all tasks the same SPARTITO_SECRET or SPARTITO_SECRET_FILE, or none; two jobs "
            "need different ports.",
        )
    return _sealed(connection, key, purpose, nonces, "caller", "listener")


def challenge(connection: socket.socket, key: Key, purpose: str, end: float) -> Connection:
    """As the listener: the handshake with a caller, until ``end`` of `time.monotonic`.

    Returns what is used instead of the socket from then on, a blocking one. Raises `OSError` if
    the caller closes it or is silent, and `UnknownPeerError` for one that must be refused.
    """
    if read(connection, len(MAGIC), end) != MAGIC:
        raise UnknownPeerError("it is no task of Spartito")
    theirs, own = read(connection, NONCE, end), secrets.token_bytes(NONCE)
    _send(connection, MAGIC + own, end)
    nonces = theirs + own
    found = read(connection, PROOF, end)
    if not hmac.compare_digest(found, _proof(key, "caller", purpose, nonces)):
        _send(connection, bytes(PROOF), end)
        raise OtherSecretError("it does not know the job's secret")
    _send(connection, _proof(key, "listener", purpose, nonces), end)
    return _sealed(connection, key, purpose, nonces, "listener", "caller")


def _proof(key: Key, end: str, purpose: str, nonces: bytes) -> bytes:
    message = f"{LABEL}\n{purpose}\n{end}\n".encode() + nonces
    return hmac.digest(key.secret, message, "sha256")


def _sealed(
    connection: socket.socket, key: Key, purpose: str, nonces: bytes, own: str, theirs: str
) -> Connection:
    """What is used instead of ``connection``, both ends of which proved that they know ``key``."""
    connection.settimeout(None)
    if connection.family == getattr(socket, "AF_UNIX", None):  # nobody can come between
        return connection
    return Sealed(
        connection,
        _proof(key, f"{own} sends", purpose, nonces),
        _proof(key, f"{theirs} sends", purpose, nonces),
    )


def _send(connection: socket.socket, data: bytes, end: float) -> None:
    connection.settimeout(max(0.001, end - time.monotonic()))
    connection.sendall(data)


def read(connection: Connection, size: int, end: float) -> bytes:
    """The next ``size`` bytes; `OSError` if they do not come until ``end``."""
    data = b""
    while len(data) < size:
        connection.settimeout(max(0.001, end - time.monotonic()))
        more = connection.recv(size - len(data))
        if not more:
            raise ConnectionResetError("it closed the connection")
        data += more
        if time.monotonic() > end:
            raise TimeoutError("it did not prove in time who it is")
    return data
