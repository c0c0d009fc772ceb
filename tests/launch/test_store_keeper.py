"""The store that a launcher keeps: it lives as long as the launcher does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from spartito.cluster.store.client import Store, StoreGoneError
from spartito.launch.store_keeper import kept_store
from spartito.wire.addresses import split_address
from spartito.wire.handshake import SecretError
from spartito.wire.secret import Key
from tests.wiretap import between

LIMIT = 30.0  # seconds that no passing test comes near
SECRET = "a secret of this test"
LAUNCHER = """
import os, sys
from spartito.launch.store_keeper import kept_store
with kept_store(os.environ) as env:
    print(env["SPARTITO_STORE"], flush=True)
    sys.stdin.read()
"""


def client(address: str, secret: str = SECRET, encrypts: bool = False) -> Store:
    return Store(*split_address(address), Key(secret.encode(), encrypts), LIMIT)


def test_a_launcher_keeps_a_store_for_who_knows_the_secret() -> None:
    with kept_store(os.environ | {"SPARTITO_SECRET": SECRET}) as env:
        each = client(env["SPARTITO_STORE"])
        each.set("a", b"1")
        with pytest.raises(SecretError):
            client(env["SPARTITO_STORE"], "another").keys()
        assert each.get("a") == b"1"
    with pytest.raises(StoreGoneError):
        each.get("a")


def test_a_launchers_store_encrypts_where_its_job_does() -> None:
    value = b"an address of the job" * 100
    with kept_store(os.environ | {"SPARTITO_SECRET": SECRET, "SPARTITO_TLS": "on"}) as env:
        host, port = split_address(env["SPARTITO_STORE"])
        with between(port) as (way, heard):
            each = client(f"{host}:{way}", encrypts=True)
            each.set("a", value)
            assert each.get("a") == value
            each.close()
        assert len(heard) > 2 * len(value)
        assert b"an address" not in heard


def test_it_ends_with_a_launcher_that_is_killed() -> None:
    env = os.environ | {"SPARTITO_SECRET": SECRET}
    with subprocess.Popen(
        [sys.executable, "-c", LAUNCHER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=env,
    ) as launcher:
        assert launcher.stdout is not None
        each = client(launcher.stdout.readline().strip())
        each.set("a", b"1")
        launcher.send_signal(signal.SIGKILL)
        with pytest.raises(StoreGoneError):
            each.get("never", LIMIT)
