"""Both ends of a new connection authenticate: they prove that they know the job's secret.

    caller:   magic, a nonce
    listener: magic, a nonce
    caller:   its proof
    listener: its proof, or zeros

A proof is an HMAC-SHA256 over both nonces, what the connection is for, and which end speaks: it
is good for this connection alone. Who does not know the secret learns that a task of Spartito
listens, and nothing else. It proves who came; what follows is not encrypted.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import time

from spartito.collectives.sockets import RETRY_SECONDS, dial
from spartito.errors import SpartitoError, TaskLostError, UserError

MAGIC = b"SPTO"
NONCE = 32
PROOF = hashlib.sha256().digest_size
LABEL = "spartito 1"
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


def reach(
    host: str, port: int, name: str, limit: float, *, key: bytes, purpose: str
) -> socket.socket:
    """A connection to task ``name``, once it listens at ``host:port`` and both know the secret.

    Raises `TaskLostError` if that takes more than ``limit`` seconds, and `UserError` if another
    program listens there or the secrets differ.
    """
    end = time.monotonic() + limit
    where = f"{host}:{port}"
    called = name if where in name else f"{name} at {where}"
    while True:
        connection = dial(host, port, name, limit, end)
        try:
            prove(connection, called, key, purpose, end)
        except OSError as error:  # it died, or had too many callers: it may be there again
            connection.close()
            if time.monotonic() + RETRY_SECONDS >= end:
                raise TaskLostError(
                    f"{called} did not reply within {limit:g} s",
                    "It may be stopped: look at its last lines. "
                    "SPARTITO_TIMEOUT sets the limit in seconds.",
                ) from error
        except BaseException:
            connection.close()
            raise
        else:
            return connection
        time.sleep(RETRY_SECONDS)


def prove(connection: socket.socket, name: str, key: bytes, purpose: str, end: float) -> None:
    """As the caller: the handshake with ``name``, until ``end`` of `time.monotonic`.

    The socket is a blocking one afterwards. Raises `OSError` if the other end closes it or is
    silent, `OtherProgramError` if it is no task of Spartito, and `SecretError` if it does not know
    the secret.
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
    connection.settimeout(None)


def challenge(connection: socket.socket, key: bytes, purpose: str, end: float) -> None:
    """As the listener: the handshake with a caller, until ``end`` of `time.monotonic`.

    The socket is a blocking one afterwards. Raises `OSError` if the caller closes it or is
    silent, and `UnknownPeerError` for one that must be refused.
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
    connection.settimeout(None)


def _proof(key: bytes, end: str, purpose: str, nonces: bytes) -> bytes:
    message = f"{LABEL}\n{purpose}\n{end}\n".encode() + nonces
    return hmac.digest(key, message, "sha256")


def _send(connection: socket.socket, data: bytes, end: float) -> None:
    connection.settimeout(max(0.001, end - time.monotonic()))
    connection.sendall(data)


def read(connection: socket.socket, size: int, end: float) -> bytes:
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
