"""A suite that `tests/test_suite.py` runs from a strange state; it is not collected by itself."""

from __future__ import annotations

import locale
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.commands import Commands, commands_in
from tests.replicas import Replicas
from tests.skips import need, skip

VARIABLES = ("HOME", "TMPDIR", "LANG", "LC_ALL", "OMP_NUM_THREADS", "SLURM_JOB_ID", "RANK")
SHOW = f"""
import os, signal
mask = os.umask(0)
print(signal.getsignal(signal.SIGINT) is signal.default_int_handler, mask)
print([os.environ.get(name) for name in {VARIABLES[1:]}])
"""


def state() -> list[Any]:
    """What tests and their children start from."""
    mask = os.umask(0)
    os.umask(mask)
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGHUP)]
    is_default = [handlers[0] is signal.default_int_handler, handlers[1] == signal.SIG_DFL]
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    variables = [os.environ.get(name) for name in VARIABLES]
    return [is_default, mask, sorted(blocked), locale.getencoding().lower(), variables]


def test_the_state_is_known(replicas: Replicas, commands: Commands) -> None:
    here = state()
    home = here[-1][0]
    # torch sets the number of threads of the replicas' environment.
    assert here == [
        [True, True],
        0o022,
        [],
        "utf-8",
        [home, None, None, "C.UTF-8", None, None, None],
    ]
    assert list(Path(home).iterdir()) == []
    assert tempfile.gettempdir() == "/tmp"
    there = replicas(state, 1)[0]
    there[-1][-1] = None  # its rank
    assert there == here
    out = commands.python("-c", SHOW).out
    assert out == f"True {0o022}\n[None, None, 'C.UTF-8', '1', None, None]\n"


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    with commands_in(tmp_path) as found:
        yield found


def comes() -> None:
    pass


def stands_here() -> None:
    time.sleep(300)


@pytest.fixture
def pool(replicas: Replicas) -> Replicas:
    """Two processes that have started."""
    replicas(comes, 2)
    return replicas


@pytest.mark.timeout(5, func_only=True)
def test_a_time_limit_shows_where_replicas_stand(pool: Replicas) -> None:
    pool(stands_here, 2)


@pytest.mark.timeout(10, func_only=True)
def test_a_time_limit_shows_where_programs_stand(commands: Commands) -> None:
    script = "import time\ndef program_stands_here(): time.sleep(300)\nprogram_stands_here()"
    commands.start(sys.executable, "-c", script).popen.wait()


def test_what_is_required_is_missing() -> None:
    skip("netns", "nothing here")


def test_what_is_not_required_is_missing() -> None:
    skip("data", "nothing here")


def test_what_is_refused_here() -> None:
    need("slurm")


def test_no_kind() -> None:
    pytest.skip("a reason without a kind")
