"""What stands for a task of a Ray cluster, and a launcher's end of its socket; no Ray is needed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from spartito.launch.on_ray import relay
from tests.launch.supervised import LIMIT


@contextmanager
def relayed(folder: Path, *before: str) -> Iterator[tuple[subprocess.Popen[bytes], socket.socket]]:
    """A relay that has just connected, and our end of its socket."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(folder / "s"))
        server.listen()
        words = [sys.executable, "-S", *before, relay.__file__, str(folder / "s"), "5"]
        with subprocess.Popen(words, stderr=subprocess.PIPE) as started:
            server.settimeout(LIMIT)
            connection, _ = server.accept()
            connection.settimeout(LIMIT)
            with connection:
                yield started, connection


def test_a_signal_that_comes_at_the_start_is_passed_on(tmp_path: Path) -> None:
    with relayed(tmp_path) as (started, connection), connection.makefile("rb") as lines:
        started.send_signal(signal.SIGINT)
        assert [lines.readline(), lines.readline()] == [b"5\n", b"%d\n" % signal.SIGINT]
        connection.sendall(relay.HEAD.pack(relay.END, 3))
        assert started.wait(LIMIT) == 3


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_just_after_the_end_changes_no_exit_code(
    tmp_path: Path, number: signal.Signals
) -> None:
    with relayed(tmp_path) as (started, connection), connection.makefile("rb") as lines:
        started.send_signal(signal.SIGCONT)
        assert [lines.readline(), lines.readline()] == [b"5\n", b"%d\n" % signal.SIGCONT]
        started.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, started.pid, os.WSTOPPED | os.WNOWAIT)
        connection.sendall(relay.HEAD.pack(relay.END, 3))
        connection.shutdown(socket.SHUT_RDWR)
        lines.close()
        connection.close()
        started.send_signal(number)
        started.send_signal(signal.SIGCONT)
        assert started.stderr is not None
        assert started.stderr.read() == b""
        assert started.wait(LIMIT) == 3


LATE = """
import runpy, signal, sys
class Late:
    raised, number = staticmethod(signal.raise_signal), int(sys.argv[1])
    def __del__(self):
        self.raised(self.number)
sys.late = Late()  # goes when Python has put the default handlers back
del sys.argv[:2]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_nor_does_one_that_comes_as_it_leaves(tmp_path: Path, number: signal.Signals) -> None:
    late = ("-c", LATE, str(int(number)))
    with relayed(tmp_path, *late) as (started, connection):
        connection.sendall(relay.HEAD.pack(relay.END, 3))
        assert started.wait(LIMIT) == 3
