"""A suite that `tests/test_workers.py` runs in workers; it is not collected by itself."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.replicas import Replicas

FOLDER = "SPARTITO_TEST_FOLDER"


@pytest.fixture
def ends() -> Iterator[Path]:
    """A folder that has a file ``ended`` once a test of it was torn down."""
    folder = Path(os.environ[FOLDER])
    yield folder
    (folder / "ended").touch()


def test_passes(tmp_path: Path) -> None:
    print("said by nobody")
    assert list(tmp_path.iterdir()) == []


def test_fails() -> None:
    print("said by one")
    raise AssertionError("as it is told to")


def test_skips() -> None:
    pytest.skip("data: none")


def test_ends_its_worker() -> None:
    os._exit(3)


@pytest.mark.parametrize("number", range(20))
def test_after_it(number: int) -> None:
    pass


def test_of_replicas(replicas: Replicas) -> None:
    assert len(set(replicas(os.getpid, 2))) == 2
    server, again = (replicas(os.getppid, 1)[0] for _ in range(2))
    assert "forkserver" not in Path(f"/proc/{server}/cmdline").read_text()  # not a new program
    assert server == again


def test_waits(ends: Path) -> None:
    (ends / "waits").touch()
    time.sleep(200)
