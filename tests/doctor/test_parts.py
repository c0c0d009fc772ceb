"""The parts of a doctor: what it reads of the machine and the network, and its transport."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

import pytest

from spartito.doctor.facts.devices import PLUG_INS, Devices, devices, gpu_names, may_know, of_others
from spartito.doctor.facts.machine import memory
from spartito.doctor.facts.network import holder_of, resolve_names, routes
from spartito.doctor.findings import Memory, Outcome, Target
from spartito.doctor.parallel import at_once
from spartito.doctor.probe.coordinator import Coordinator, Member
from spartito.doctor.probe.probes import measure, probe
from spartito.doctor.transport.connection import Connection, PeerError, connect
from spartito.doctor.transport.messages import MOST_BYTES, Data, Measured, Ping, Pong, Request
from spartito.doctor.transport.server import DoctorServer, open_server
from spartito.system import IS_LINUX
from spartito.wire.addresses import DRAWN, Endpoint
from spartito.wire.interfaces import interface_of, source_address
from spartito.wire.secret import NO_SECRET, Key
from tests import simulated
from tests.callers import read_to_end
from tests.doctor.test_rules import W0, W1, facts
from tests.launch.supervised import wait_until
from tests.skips import on_linux

LOOPBACK = "127.0.0.1"
MIB = 1 << 20
VERSIONS = ["2.13.0+rocm7.1", "2.13.0+xpu", "2.13.0+cpu", "2.13.0+cu130", "2.13.0", "not installed"]


def soon(seconds: float = 30.0) -> float:
    return time.monotonic() + seconds


@pytest.fixture
def two() -> Iterator[tuple[Connection, socket.socket]]:
    """A connection, and the raw other end of it."""
    here, there = socket.socketpair()
    there.settimeout(30.0)
    with here, there:
        yield Connection(here), there


@pytest.fixture
def server() -> Iterator[DoctorServer]:
    opened, _ = open_server(Endpoint("worker 1", LOOPBACK, (DRAWN,)), soon())
    yield opened
    opened.close()


def meminfo(folder: Path) -> Path:
    path = folder / "meminfo"
    path.write_text("MemTotal: 8192 kB\nMemFree: 1 kB\nMemAvailable: 4096 kB\nHugePages_Total: 0\n")
    return path


@on_linux
def test_memory_without_a_cgroup(tmp_path: Path) -> None:
    assert memory(meminfo(tmp_path), tmp_path, tmp_path / "none") == Memory(8 * MIB, 4 * MIB)


@on_linux
@pytest.mark.parametrize(
    ("line", "folder", "names", "cache"),
    [
        ("0::/job", "job", ("memory.max", "memory.current"), "inactive_file"),
        ("0::/job", ".", ("memory.max", "memory.current"), "inactive_file"),
        (
            "4:memory:/job",
            "memory/job",
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
            "total_inactive_file",
        ),
    ],
)
def test_the_limit_of_a_cgroup_of_either_version(
    tmp_path: Path, line: str, folder: str, names: tuple[str, str], cache: str
) -> None:
    own = tmp_path / "cgroup"
    own.write_text(f"1:cpu:/x\n{line}\n")
    group = tmp_path / folder
    group.mkdir(parents=True, exist_ok=True)
    for name, value in zip(names, (3 * MIB, 2 * MIB), strict=True):
        (group / name).write_text(f"{value}\n")
    (group / "memory.stat").write_text(f"anon 1\n{cache} {MIB}\n")
    assert memory(meminfo(tmp_path), tmp_path, own) == Memory(8 * MIB, 2 * MIB, 3 * MIB)


@pytest.mark.parametrize("text", ["max", str((1 << 63) - 4096)])
def test_a_cgroup_without_a_limit(tmp_path: Path, text: str) -> None:
    own = tmp_path / "cgroup"
    own.write_text("0::/\n")
    (tmp_path / "memory.max").write_text(text)
    (tmp_path / "memory.current").write_text("5")
    assert memory(meminfo(tmp_path), tmp_path, own).limit is None


def test_gpus_are_listed_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    query = tmp_path / "nvidia-smi"
    query.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA X (UUID: GPU-1)'\necho '  MIG 1g: Y'\n")
    query.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert gpu_names({}, 30.0) == ["NVIDIA X"]
    assert gpu_names({"CUDA_VISIBLE_DEVICES": ""}, 30.0) == []


def test_torch_is_asked_where_it_may_know_other_devices(tmp_path: Path) -> None:
    assert [version for version in VERSIONS if may_know(version, True, False)] == VERSIONS[:2]
    assert may_know("2.13.0", False, False)
    theirs = EntryPoint("sim", "tests.simulated:register", PLUG_INS)
    assert of_others([theirs]) == [theirs]
    ours = [point for point in entry_points(group=PLUG_INS) if point.name == "spartito"]
    assert ours
    assert of_others(ours) == []
    simulated.built()
    plug_in = tmp_path / "sim-1.dist-info"
    plug_in.mkdir()
    (plug_in / "METADATA").write_text("Name: sim\nVersion: 1\n")
    (plug_in / "entry_points.txt").write_text(f"[{PLUG_INS}]\nsim = tests.simulated:register\n")
    paths = [str(tmp_path), *sys.path]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": ""}
    asks = f"from {devices.__module__} import *; print(devices(os.environ, '2+cpu', 60))"
    ended = subprocess.run(
        [sys.executable, "-c", f"import os; {asks}"], env=env, capture_output=True, text=True
    )
    assert ended.stdout == f"{Devices(('Simulated, 1 GiB',) * 2)}\n", ended


def test_names_that_resolve_and_names_that_do_not() -> None:
    good, bad = sorted(
        resolve_names([LOOPBACK, "no host", LOOPBACK], soon()), key=lambda name: name.error
    )
    assert (good.host, good.addresses) == (LOOPBACK, [LOOPBACK])
    assert bad.addresses == []
    assert bad.error


def test_the_way_to_the_loopback_is_the_loopback() -> None:
    (name,) = resolve_names([LOOPBACK], soon())
    (route,) = routes([name])
    assert route.source == source_address(LOOPBACK) == LOOPBACK
    assert route.interface == interface_of(LOOPBACK)
    assert route.interface.startswith("lo")


@on_linux
def test_who_has_a_port() -> None:
    with socket.create_server((LOOPBACK, 0)) as other:
        port = other.getsockname()[1]
        assert f"(process {os.getpid()})" in holder_of(port)
    assert holder_of(port) == ""


def test_a_server_takes_the_next_port_when_one_is_taken() -> None:
    with socket.create_server((LOOPBACK, 0)) as other:
        port = other.getsockname()[1]
        opened, told = open_server(Endpoint("worker 0", LOOPBACK, (port,)), soon())
        opened.close()
    assert opened.port != port
    assert (told.number, told.free) == (port, False)
    assert not IS_LINUX or f"(process {os.getpid()})" in told.holder


def test_an_address_of_no_interface_is_listened_for_on_all() -> None:
    opened, told = open_server(Endpoint("worker 0", "192.0.2.1", (DRAWN,)), soon())
    assert told.foreign
    assert probe("me", Target("worker 0", LOOPBACK, opened.port), soon()).outcome is Outcome.OK
    opened.close()


def test_a_probe_tells_what_it_found(server: DoctorServer) -> None:
    def outcome(task: str, host: str, port: int, seconds: float = 30.0) -> str:
        return probe("me", Target(task, host, port), soon(seconds)).outcome

    assert outcome("worker 1", LOOPBACK, server.port) == Outcome.OK
    assert outcome("worker 2", LOOPBACK, server.port) == "other task"
    assert outcome("worker 1", "no host", server.port) == "unresolved"
    with socket.create_server((LOOPBACK, 0)) as other:
        port = other.getsockname()[1]
        assert outcome("worker 1", LOOPBACK, port, 2.0) == "silent"
    assert outcome("worker 1", LOOPBACK, port) == "refused"


def test_a_way_is_measured(server: DoctorServer) -> None:
    found = measure("worker 0", Target("worker 1", LOOPBACK, server.port), 30.0)
    speed = found.speed
    assert speed is not None
    assert found.stuck == 0
    assert (speed.source, speed.target) == ("worker 0", "worker 1")
    assert speed.latency > 0
    assert speed.bandwidth > 0
    assert abs(speed.clock) < 1.0


def test_a_way_that_did_not_respond_is_measured_again(
    server: DoctorServer, two: tuple[Connection, socket.socket]
) -> None:
    """Two connections are closed at once: to measure, and to see whether anybody is there."""
    here, there = facts(W0), facts(W1)
    own = Target(W0, LOOPBACK, server.port)
    coordinator = Coordinator(here, server, own, 60.0, time.monotonic())
    with socket.create_server((LOOPBACK, 0)) as listener, ThreadPoolExecutor() as pool:

        def served() -> DoctorServer:
            for _ in range(2):
                listener.accept()[0].close()
            return DoctorServer(W1, listener)

        busy = pool.submit(served)
        port = listener.getsockname()[1]
        coordinator.members[W1] = Member(there, two[0], LOOPBACK, port)
        coordinator._measure([(W0, W1)])
        with closing(busy.result(30.0)):
            assert set(coordinator.speeds) == {(W0, W1)}


def test_a_way_to_nobody_has_no_figures(server: DoctorServer) -> None:
    server.close()
    assert measure("worker 0", Target("worker 1", LOOPBACK, server.port), 5.0) == Measured(None)


def test_more_bytes_than_a_doctor_sends_are_refused(server: DoctorServer) -> None:
    with connect(Target("worker 1", LOOPBACK, server.port), soon(), NO_SECRET) as connection:
        with suppress(PeerError):  # it may close before it has heard all
            connection.send(Data(), soon(), bytes(MOST_BYTES + 1))
        with pytest.raises(PeerError):
            connection.receive(Pong, soon())


def test_who_does_not_know_the_secret_is_told_nothing() -> None:
    endpoint, key = Endpoint("worker 1", LOOPBACK, (DRAWN,)), Key(b"known to the tasks alone")
    server, _ = open_server(endpoint, soon(), key=key)
    target = Target("worker 1", LOOPBACK, server.port)
    try:
        assert probe("me", target, soon(), key).outcome is Outcome.OK
        assert probe("me", target, soon()).outcome is Outcome.OTHER_SECRET
        with socket.create_connection((LOOPBACK, server.port), 30.0) as connection:
            connection.sendall(b"a line of text\n")
            assert read_to_end(connection) == b""
        # It notes them in threads of its own.
        wait_until(lambda: bool(server.unknown_peers and server.other_secrets))
        assert server.unknown_peers == list(server.other_secrets) == [LOOPBACK]
    finally:
        server.close()


def test_work_that_does_not_end_is_given_up() -> None:
    go, done = threading.Event(), threading.Event()

    def work(item: int) -> int:
        if item:
            go.wait(60.0)
            done.set()
        return item

    assert at_once(work, [0, 1], soon(2.0)) == [0, None]
    go.set()
    assert done.wait(60.0)


@pytest.mark.parametrize("said", [b"hello\n" * 100, b"{}\n" * 100, bytes(300)])
def test_what_is_no_message_is_garbage(two: tuple[Connection, socket.socket], said: bytes) -> None:
    connection, other = two
    other.sendall(said)
    with pytest.raises(PeerError) as caught:
        connection.receive(Request, soon())
    assert caught.value.outcome is Outcome.OTHER_PROGRAM


def test_a_message_that_is_not_expected_is_garbage(server: DoctorServer) -> None:
    with connect(Target("worker 1", LOOPBACK, server.port), soon(), NO_SECRET) as connection:
        connection.send(Ping(), soon())
        with pytest.raises(PeerError, match="Pong was not expected"):
            connection.receive(Request, soon())


def test_every_wait_ends(two: tuple[Connection, socket.socket]) -> None:
    connection, _ = two
    with pytest.raises(PeerError):
        connection.receive(Request, soon(0.05))
    with pytest.raises(PeerError):
        connection.send(Ping(), soon(-1.0))
    with pytest.raises(PeerError):
        connection.send(Data(), soon(0.05), bytes(64 * MIB))
