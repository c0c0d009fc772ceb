"""TLS 1.3 between the tasks of a job, both of which show a certificate of its authority.

The authority's key is made of the job's secret, by each task for itself: to know the secret is to
be a task of the job, so nothing else has to be handed out, and no key is on a disk. Each task
issues itself a certificate with a key of its own when it connects first. The keys of a connection
come from neither: what was recorded stays unreadable for who learns the secret later.
"""

from __future__ import annotations

import hmac
import ssl
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from typing import TYPE_CHECKING

from spartito.wire.limits import RECORD
from spartito.wire.streams import ForgedError, Recorded, Socket, blank

if TYPE_CHECKING:
    from cryptography.x509 import CertificateBuilder

LABEL = b"spartito certificate authority 1"

FIRST, LAST = datetime(2000, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)
"""When certificates are valid: always, as clocks may be wrong, and they end with their process."""

HELLO, ALERT = b"\x16", b"\x15\x03\x01\x00\x02\x02\x46"
"""What a TLS connection begins with, and what one ends with that cannot be: another version."""


@dataclass(frozen=True, slots=True)
class Contexts:
    """What a task needs to be called, and to call."""

    listener: ssl.SSLContext
    caller: ssl.SSLContext


@lru_cache(maxsize=4)
def contexts(secret: bytes) -> Contexts:
    """Those of the job with this secret: TLS 1.3, and both ends must have a certificate of it.

    Args:
        secret: The job's secret; not empty.
    """
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
    )

    authority = Ed25519PrivateKey.from_private_bytes(hmac.digest(secret, LABEL, "sha256"))
    own = Ed25519PrivateKey.generate()
    issuer = _certificate("spartito job", authority.public_key(), authority.public_key(), True)
    leaf = _certificate("spartito task", own.public_key(), authority.public_key(), False)
    root = issuer.sign(authority, None).public_bytes(Encoding.PEM).decode()
    shown = leaf.sign(authority, None).public_bytes(Encoding.PEM)
    shown += own.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    found = []
    for protocol in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT):
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # addresses change; who has a certificate is of the job
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=root)
        _load(context, shown)
        found.append(context)
    found[0].num_tickets = 0  # nothing is resumed
    return Contexts(*found)


class Encrypted(Recorded):
    """A connection by TLS, over ``below``, once both ends have shown their certificates.

    Args:
        below: The socket, which is new; it is owned once this is made.
        secret: The job's.
        listens: Whether this end was called.
        end: The time of `time.monotonic` until which both must have shown them.

    Raises:
        ssl.SSLError: The other end is none of this job, or speaks another protocol.
        OSError: It is gone, or silent.
    """

    def __init__(self, below: Socket, secret: bytes, *, listens: bool, end: float) -> None:
        super().__init__(below)
        found = contexts(secret)
        self._came, self._goes = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = (found.listener if listens else found.caller).wrap_bio(
            self._came, self._goes, server_side=listens
        )
        self._memory = blank(RECORD)
        self._turn = threading.Lock()  # of sending and receiving: OpenSSL takes one at a time
        done = False
        while not done:
            below.settimeout(max(0.001, end - time.monotonic()))
            try:
                self._tls.do_handshake()
                done = True
            except ssl.SSLWantReadError:
                pass
            finally:  # also why it cannot be
                if said := self._goes.read():
                    below.sendall(said)
            if not done:
                if not self._fill():
                    raise ConnectionResetError("it closed the connection")
                if time.monotonic() > end:
                    raise TimeoutError("it did not prove in time who it is")

    def _pack(self, views: Sequence[memoryview]) -> tuple[memoryview, int]:
        size = 0
        with self._turn:
            for view in views:
                left = view[: RECORD - size]
                while len(left):
                    count = self._tls.write(left)
                    left, size = left[count:], size + count
                if size == RECORD:
                    break
            return memoryview(self._goes.read()), size

    def _unpack(self, view: memoryview) -> int:
        size = 0
        try:
            with self._turn:
                while size < len(view) and (count := self._read(view[size:])):
                    size += count
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            raise ForgedError(f"what came was changed on its way: {error.reason}") from error
        return size

    def _read(self, view: memoryview) -> int:
        count: int = self._tls.read(len(view), view)  # type: ignore[assignment]
        return count

    def _fill(self) -> int:
        count = self._below.recv_into(self._memory)
        with self._turn:
            self._came.write(self._memory[:count])
        return count


def speaks_another(error: ssl.SSLError) -> bool:
    """Whether a caller with whom this came of the handshake speaks another protocol."""
    return error.reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "UNEXPECTED_MESSAGE")


def _certificate(name: str, of: object, by: object, issues: bool) -> CertificateBuilder:
    """One of the key ``of``, to be signed by that of ``by``; ``issues``: it may sign others."""
    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    def called(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    usage = dict.fromkeys(
        ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement",
         "encipher_only", "decipher_only"), False,
    )  # fmt: skip
    builder = (
        x509.CertificateBuilder()
        .subject_name(called(name))
        .issuer_name(called("spartito job"))
        .public_key(of)  # type: ignore[arg-type]
        .serial_number(x509.random_serial_number())
        .not_valid_before(FIRST)
        .not_valid_after(LAST)
        .add_extension(x509.BasicConstraints(issues, 0 if issues else None), critical=True)
        .add_extension(
            x509.KeyUsage(
                digital_signature=not issues, key_cert_sign=issues, crl_sign=issues, **usage
            ),
            critical=True,
        )
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(of), critical=False)  # type: ignore[arg-type]
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(by),  # type: ignore[arg-type]
            critical=False,
        )
    )
    if issues:
        return builder
    ends = [ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]
    return builder.add_extension(x509.ExtendedKeyUsage(ends), critical=False)


def _load(context: ssl.SSLContext, shown: bytes) -> None:
    """Have ``context`` show this certificate with its key, which it takes from a file alone."""
    with tempfile.TemporaryFile() as file:  # without a name, for this user
        file.write(shown)
        file.flush()
        file.seek(0)
        context.load_cert_chain(f"/dev/fd/{file.fileno()}")
