"""Both ends of a new connection authenticate: they prove that they know the job's secret.

    caller:   magic, version, release, a nonce
    listener: magic, version, release, a nonce
    caller:   its proof
    listener: its proof, or zeros

A proof is an HMAC-SHA256 over all that was said before, what the connection is for, and which end
speaks: it is good for this connection alone. Who does not know the secret learns which Spartito
listens, and nothing else. All that follows is authenticated by keys of this connection, which come
from the secret and both nonces; where the job encrypts, all of this lies inside of TLS instead.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import ssl
import struct
import time

from spartito.errors import SpartitoError, UserError
from spartito.names import ENV_TLS
from spartito.notes import shown
from spartito.wire.secret import Key
from spartito.wire.streams import Connection, Sealed, Socket, is_unix
from spartito.wire.tls import ALERT, Encrypted, speaks_another
from spartito.wire.tls import HELLO as TLS_HELLO

MAGIC = b"SPTO"
VERSION = 4
"""Of all that is said on a connection: another one wherever its meaning changes."""
HELLO = struct.Struct("<4sB27s")
"""Magic, version, release: they stay where they are: one release refuses another by name."""
NONCE = 32
PROOF = hashlib.sha256().digest_size

ADVICE = f"Give all tasks of a job the same {ENV_TLS}, or none."


class UnknownPeerError(SpartitoError):
    """A caller does not know the job's secret, or is no task of Spartito."""


class OtherSecretError(UnknownPeerError):
    """A caller is a task of Spartito and does not know the job's secret."""


class OtherProgramError(UserError):
    """What listens there is no task of Spartito."""


class OtherReleaseError(UserError):
    """The task that listens there runs another Spartito, with which this one cannot speak."""


class SecretError(UserError):
    """The task that listens there does not know our secret."""


def prove(connection: Socket, name: str, key: Key, purpose: str, end: float) -> Connection:
    """As the caller: the handshake with ``name``, until ``end`` of `time.monotonic`.

    Returns what is used instead of the socket from then on, a blocking one. Raises `OSError` if
    the other end closes it or is silent, `OtherProgramError` if it is no task of Spartito,
    `OtherReleaseError` if it is one of another release, and `SecretError` if it does not know the
    secret.
    """
    known = _encrypted_to(connection, name, key, end)
    own = _hello()
    _send(known, own, end)
    begin = read(known, len(MAGIC), end)
    if begin == ALERT[: len(MAGIC)]:
        raise OtherProgramError(f"{name} encrypts what it sends, and this task does not", ADVICE)
    if begin != MAGIC:
        raise OtherProgramError(
            f"{name} is no task of Spartito: another program replies there",
            "Correct the address, or end that program.",
        )
    theirs = begin + read(known, HELLO.size - len(MAGIC), end)
    if difference := _difference(theirs):
        raise OtherReleaseError(f"{name} {difference}", "Install the same on all machines.")
    said = own + theirs + read(known, NONCE, end)
    _send(known, _proof(key, "caller", purpose, said), end)
    found = read(known, PROOF, end)
    if not hmac.compare_digest(found, _proof(key, "listener", purpose, said)):
        raise _other_secret(name)
    return _sealed(known, key, purpose, said, "caller", "listener")


def challenge(connection: Socket, key: Key, purpose: str, end: float) -> Connection:
    """As the listener: the handshake with a caller, until ``end`` of `time.monotonic`.

    Returns what is used instead of the socket from then on, a blocking one. Raises `OSError` if
    the caller closes it or is silent, and `UnknownPeerError` for one that must be refused.
    """
    known = _encrypted_by(connection, key, end)
    begin, own = read(known, len(MAGIC), end), _hello()
    if begin.startswith(TLS_HELLO):
        known.recv(1 << 14)  # the rest of its hello, or closing would take back the next line
        _send(known, MAGIC * 2, end)  # from which it sees that we do not
        raise UnknownPeerError(f"it encrypts, and this task does not ({ENV_TLS})")
    if begin != MAGIC:
        raise UnknownPeerError("it is no task of Spartito")
    theirs = begin + read(known, HELLO.size - len(MAGIC), end)
    if difference := _difference(theirs):
        known.recv(1 << 14)  # as above
        _send(known, own, end)
        raise UnknownPeerError(f"it {difference}")
    said = theirs + read(known, NONCE, end) + own
    _send(known, own, end)
    found = read(known, PROOF, end)
    if not hmac.compare_digest(found, _proof(key, "caller", purpose, said)):
        _send(known, bytes(PROOF), end)
        raise OtherSecretError("it does not know the job's secret")
    _send(known, _proof(key, "listener", purpose, said), end)
    return _sealed(known, key, purpose, said, "listener", "caller")


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


def _hello() -> bytes:
    from spartito import __version__

    return HELLO.pack(MAGIC, VERSION, __version__.encode()) + secrets.token_bytes(NONCE)


def _difference(hello: bytes) -> str:
    """What keeps a task with this hello and us from speaking; "" is nothing."""
    from spartito import __version__

    _, version, release = HELLO.unpack(hello)
    if version == VERSION:
        return ""
    text = shown(release.rstrip(b"\0").decode("ascii", "replace"))
    return (
        f"runs Spartito {text} (protocol {version}), and this task {__version__} "
        f"(protocol {VERSION})"
    )


def _proof(key: Key, end: str, purpose: str, said: bytes) -> bytes:
    return hmac.digest(key.secret, f"{purpose}\n{end}\n".encode() + said, "sha256")


def _encrypts(connection: Socket, key: Key) -> bool:
    return key.encrypts and not is_unix(connection)


def _encrypted_to(connection: Socket, name: str, key: Key, end: float) -> Connection:
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


def _encrypted_by(connection: Socket, key: Key, end: float) -> Connection:
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
        f"{name} does not know the secret of this task: it is of another job, or was given "
        "another SPARTITO_SECRET",
        "Give all tasks the same SPARTITO_SECRET or SPARTITO_SECRET_FILE, or none; two jobs "
        "need different ports.",
    )


def _sealed(
    connection: Connection, key: Key, purpose: str, said: bytes, own: str, theirs: str
) -> Connection:
    """What is used instead of ``connection``, both ends of which proved that they know ``key``."""
    connection.settimeout(None)
    if not isinstance(connection, Socket) or is_unix(connection):
        return connection
    return Sealed(
        connection,
        _proof(key, f"{own} sends", purpose, said),
        _proof(key, f"{theirs} sends", purpose, said),
    )


def _send(connection: Connection, data: bytes, end: float) -> None:
    connection.settimeout(max(0.001, end - time.monotonic()))
    connection.sendall(data)
