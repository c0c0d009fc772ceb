"""Decoders that many threads ask for at once."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import os, socket, sys, threading
import msgspec
from spartito.collectives.membership.versions import Versions
from spartito.ps.protocol.messages import Hello, Request
from spartito.wire.frames import Wire

CALLERS = 8
hello = Hello("worker 0", 0, False, "job", "digest", Versions("1", "2"), "rules", "")

def serve(sock, together):
    together.wait()
    assert Wire(sock, Request).receive() == hello

def server():
    together, threads = threading.Barrier(CALLERS), []
    for _ in range(CALLERS):
        ours, theirs = socket.socketpair()
        Wire(ours, Versions).send(hello)
        threads.append(threading.Thread(target=serve, args=(theirs, together)))
        threads[-1].ours = ours
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

sys.setswitchinterval(1e-6)
for _ in range(60):  # each knows nothing of the messages yet
    if not (child := os.fork()):
        server()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


def test_callers_that_come_at_once_find_a_server_that_has_just_started() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
