"""A machine that is lost without a word: its connections end long before the time limit."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from spartito.launch.lines.network import Machine, NoNamespacesError, network
from tests.commands import Commands, commands_in
from tests.skips import need, skip

LIMIT = 600.0
"""What a task has to reply; the test's own limit is less."""

SERVER = """
import socket
from spartito.wire.streams import keep_alive
from spartito.ps.protocol.messages import Request
from spartito.wire.frames import Wire
from spartito.wire.limits import LONG_SILENCE

listener = socket.create_server(("0.0.0.0", 29531))
print("listens", flush=True)
callers = [listener.accept()[0] for _ in range(2)]
for caller in callers:
    keep_alive(caller, LONG_SILENCE)
wires = [Wire(caller, Request) for caller in callers]
print(*(type(wire.receive()).__name__ for wire in wires), flush=True)
for wire in wires:
    try:
        wire.receive()  # for ever
    except OSError as error:
        print(type(error).__name__, flush=True)
"""
CLIENT = """
import signal
import socket
import sys
from spartito.wire.streams import keep_alive
from spartito.ps.protocol.messages import GetState, Reply
from spartito.wire.frames import Wire
from spartito.wire.limits import LONG_SILENCE

signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
servers = [socket.create_connection(("alpha", 29531)) for _ in range(2)]
for server in servers:
    keep_alive(server, LONG_SILENCE)
waits, sends = (Wire(server, Reply, timeout=float(sys.argv[1])) for server in servers)
for wire in (waits, sends):
    wire.send(GetState())
print("asked", flush=True)
signal.sigwait({signal.SIGUSR1})
sends.send(GetState())  # this one is never acknowledged
for wire in (waits, sends):
    try:
        wire.receive()
    except OSError as error:
        print(type(error).__name__, flush=True)
"""


@pytest.fixture
def machines() -> Iterator[list[Machine]]:
    need("netns")
    try:
        with network("alpha", "beta") as made:
            yield made
    except NoNamespacesError as error:
        skip("netns", error)


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    with commands_in(tmp_path) as started:
        started.write("server.py", SERVER)
        started.write("client.py", CLIENT)
        yield started


@pytest.mark.slow
def test_both_ends_notice_a_machine_that_is_lost(
    commands: Commands, machines: list[Machine]
) -> None:
    alpha, beta = machines
    server = commands.start(*alpha.enters, sys.executable, "server.py")
    server.wait_for("listens")
    client = commands.start(*beta.enters, sys.executable, "client.py", f"{LIMIT:g}")
    client.wait_for("asked")
    server.wait_for("GetState GetState")
    alpha.cut()
    client.send(signal.SIGUSR1)
    assert client.end().out.split() == ["asked", "Gone", "Gone"]
    assert server.end().out.split()[-2:] == ["Gone", "Gone"]
