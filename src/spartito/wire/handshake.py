"""Both ends of a new connection authenticate: they prove that they know the job's secret.

    caller:   magic, a nonce
    listener: magic, a nonce
    caller:   its proof
    listener: its proof, or zeros

A proof is an HMAC-SHA256 over both nonces, what the connection is for, and which end speaks: it
is good for this connection alone. Who does not know the secret learns that a task of Spartito
listens, and nothing else. All that follows is authenticated by keys of this connection, which come
from the secret and both nonces; where the job encrypts, all of this lies inside of TLS instead.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import ssl
import time

from spartito.errors import SpartitoError, UserError
from spartito.names import ENV_TLS
from spartito.wire.secret import Key
from spartito.wire.streams import Connection, Sealed
from spartito.wire.tls import ALERT, HELLO, Encrypted, speaks_another

MAGIC = b"SPTO"
NONCE = 32
PROOF = hashlib.sha256().digest_size
LABEL = "spartito 2"
"""Another one wherever this handshake or what follows it changes its meaning."""

ADVICE = f"Give all tasks of a job the same {ENV_TLS}, or none."

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
    known = _encrypted_to(connection, name, key, end)
    own = secrets.token_bytes(NONCE)
    _send(known, MAGIC + own, end)
    reply = read(known, len(MAGIC), end)
    if reply == ALERT[: len(MAGIC)]:
        raise OtherProgramError(f"{name} encrypts what it sends, and this task does not", ADVICE)
    if reply != MAGIC:
        raise OtherProgramError(
            f"{name} is no task of Spartito: another program replies there",
            "Correct the address, or end that program.",
        )
    nonces = own + read(known, NONCE, end)
    _send(known, _proof(key, "caller", purpose, nonces), end)
    found = read(known, PROOF, end)
    if not hmac.compare_digest(found, _proof(key, "listener", purpose, nonces)):
        raise _other_secret(name)
    return _sealed(known, key, purpose, nonces, "caller", "listener")


def challenge(connection: socket.socket, key: Key, purpose: str, end: float) -> Connection:
    """As the listener: the handshake with a caller, until ``end`` of `time.monotonic`.

    Returns what is used instead of the socket from then on, a blocking one. Raises `OSError` if
    the caller closes it or is silent, and `UnknownPeerError` for one that must be refused.
    """
    known = _encrypted_by(connection, key, end)
    if (begin := read(known, len(MAGIC), end)) != MAGIC:
        if begin.startswith(HELLO):
            known.recv(1 << 14)  # the rest of its hello, or closing would take back the next line
            _send(known, MAGIC * 2, end)  # from which it sees that we do not
            raise UnknownPeerError(f"it encrypts, and this task does not ({ENV_TLS})")
        raise UnknownPeerError("it is no task of Spartito")
    theirs, own = read(known, NONCE, end), secrets.token_bytes(NONCE)
    _send(known, MAGIC + own, end)
    nonces = theirs + own
    found = read(known, PROOF, end)
    if not hmac.compare_digest(found, _proof(key, "caller", purpose, nonces)):
        _send(known, bytes(PROOF), end)
        raise OtherSecretError("it does not know the job's secret")
    _send(known, _proof(key, "listener", purpose, nonces), end)
    return _sealed(known, key, purpose, nonces, "listener", "caller")


def _proof(key: Key, end: str, purpose: str, nonces: bytes) -> bytes:
    message = f"{LABEL}\n{purpose}\n{end}\n".encode() + nonces
    return hmac.digest(key.secret, message, "sha256")


def _encrypts(connection: socket.socket, key: Key) -> bool:
    return key.encrypts and not _is_of_this_machine(connection)


def _is_of_this_machine(connection: socket.socket) -> bool:
    """Whether nobody can come between its ends."""
    return connection.family == getattr(socket, "AF_UNIX", None)


def _encrypted_to(connection: socket.socket, name: str, key: Key, end: float) -> Connection:
    """``connection`` to ``name``, encrypted if those of ``key`` are."""
    if not _encrypts(connection, key):
        return connection
    try:
        return Encrypted(connection, key.secret, listens=False, end=end)
    except ssl.SSLCertVerificationError as error:
        raise _other_secret(name) from error
    except ssl.SSLError as error:
        raise OtherProgramError(
            f"{name} does not encrypt what it sends, or is no task of Spartito: {error.reason}",
            ADVICE,
        ) from error


def _encrypted_by(connection: socket.socket, key: Key, end: float) -> Connection:
    """``connection`` of a caller, encrypted if those of ``key`` are."""
    if not _encrypts(connection, key):
        return connection
    try:
        return Encrypted(connection, key.secret, listens=True, end=end)
    except ssl.SSLError as error:
        if speaks_another(error):
            _send(connection, ALERT, end)  # OpenSSL says nothing to who is of no version of it
            raise UnknownPeerError("it does not encrypt, or is no task of Spartito") from error
        raise OtherSecretError("it does not know the job's secret") from error


def _other_secret(name: str) -> SecretError:
    return SecretError(
        f"{name} does not know the secret of this task: it is of another job, was given "
        "another SPARTITO_SECRET, or runs another Spartito",
        "Give all tasks the same SPARTITO_SECRET or SPARTITO_SECRET_FILE, or none; two jobs "
        "need different ports.",
    )


def _sealed(
    connection: Connection, key: Key, purpose: str, nonces: bytes, own: str, theirs: str
) -> Connection:
    """What is used instead of ``connection``, both ends of which proved that they know ``key``."""
    connection.settimeout(None)
    if not isinstance(connection, socket.socket) or _is_of_this_machine(connection):
        return connection
    return Sealed(
        connection,
        _proof(key, f"{own} sends", purpose, nonces),
        _proof(key, f"{theirs} sends", purpose, nonces),
    )


def _send(connection: Connection, data: bytes, end: float) -> None:
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
