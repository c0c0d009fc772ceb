"""Doctors as real processes on the loopback: all there, one missing, one frozen, a twin."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from spartito.doctor.findings import Outcome, Target
from spartito.doctor.probe.probes import probe
from spartito.wire.addresses import split_address
from tests.callers import read_to_end
from tests.commands import (
    SPARTITO,
    Commands,
    Ended,
    Program,
    addresses,
    commands_in,
    eventually,
    tf_config,
)

PATIENT = 60.0
"""A limit that a loaded machine keeps; where all come it plays no part."""

SHORT = 10.0
"""A limit that is waited for: the task does not come."""


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    with commands_in(tmp_path) as started:
        yield started


def start(
    commands: Commands, own: Sequence[str], index: int, limit: float = PATIENT, *words: str
) -> Program:
    """The doctor of one worker of a cluster with these addresses."""
    env = tf_config({"worker": own}, "worker", index)
    return commands.start(*SPARTITO, "doctor", f"--timeout={limit}", *words, env=env)


def await_doctor(address: str, index: int) -> None:
    """Until the doctor of a worker responds at its address."""
    target = Target(f"worker {index}", *split_address(address))
    assert eventually(lambda: probe("test", target, time.monotonic() + 1.0).ok, 60.0)


def report(ended: Ended) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(ended.out.splitlines()[-1])
    assert found["exit_code"] == ended.code
    return found


def kinds(found: Mapping[str, Any]) -> set[str]:
    return {verdict["kind"] for verdict in found["verdicts"]}


def what(found: Mapping[str, Any], kind: str) -> str:
    """The words of the verdicts of this kind."""
    return "\n".join(v["message"] for v in found["verdicts"] if v["kind"] == kind)


@contextmanager
def other_program(address: str, says: bytes) -> Iterator[None]:
    """A program that has the port and replies to any connection with ``says``."""
    with socket.create_server(split_address(address)) as server, ExitStack() as stack:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                stack.enter_context(connection)
                with suppress(OSError):  # who called may be gone
                    connection.sendall(says)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join(10.0)


def test_workers_here_are_examined_as_run_would_start_them(commands: Commands) -> None:
    ended = commands.spartito("doctor", "--workers", "3", "--timeout", f"{PATIENT}")
    assert "3 of 3 tasks are here" in ended.out
    assert "This is worker 0 by spartito run: rank 0 of 3" in ended.out
    for index in range(3):
        assert f"from worker {index}" in ended.out
    assert ended.err == ""


def test_the_json_holds_the_whole(commands: Commands) -> None:
    ended = commands.spartito("doctor", "--workers", "3", "--json", "--timeout", f"{PATIENT}")
    assert len(ended.out.splitlines()) == 1
    found = report(ended)
    tasks = [f"worker {index}" for index in range(3)]
    ways = {(a, b) for a in tasks for b in tasks if a != b}
    assert found["expected"] == list(found["facts"]) == tasks
    assert found["missing"] == found["unresponsive"] == found["refused"] == []
    assert {(k["source"], k["target"]) for k in found["probes"]} == ways
    assert {k["outcome"] for k in found["probes"]} == {Outcome.OK}
    assert {(s["source"], s["target"]) for s in found["speeds"]} == ways
    for speed in found["speeds"]:
        assert speed["latency"] > 0
        assert speed["bandwidth"] > 0
        assert abs(speed["clock"]) < 1.0
    for task, facts in found["facts"].items():
        assert facts["task"] == task
        assert facts["versions"]["torch"] != "not installed"
        assert facts["cores"] >= 1
        assert 0 < facts["memory"]["available"] <= facts["memory"]["total"]
        assert {name["host"] for name in facts["names"]} == {"127.0.0.1"}
        assert facts["routes"][0]["source"] == "127.0.0.1"
    assert found["facts"]["worker 0"]["port"]["free"]
    assert found["facts"]["worker 1"]["port"] is None


def test_every_task_of_a_cluster_runs_it_and_the_first_shows_the_whole(commands: Commands) -> None:
    own = addresses(3)
    env = tf_config({"worker": own[:2], "ps": own[2:]}, "ps", 0)
    server = commands.start(*SPARTITO, "doctor", f"--timeout={PATIENT}", env=env)
    programs = [
        commands.start(
            *SPARTITO,
            "doctor",
            f"--timeout={PATIENT}",
            env=tf_config({"worker": own[:2], "ps": own[2:]}, "worker", index),
        )
        for index in range(2)
    ]
    first, second, third = (program.end() for program in (*programs, server))
    assert "Tasks, by TF_CONFIG" in first.out
    assert "strategy parameter_server" in first.out
    for name, other in (("worker 1", second), ("ps 0", third)):
        (line,) = other.out.splitlines()
        assert line.startswith(f"{name}: 3 of 3 tasks are here")
        assert other.code == first.code


def test_a_process_that_nobody_told_of_a_cluster_looks_at_itself(commands: Commands) -> None:
    ended = commands.spartito("doctor", "--json")
    found = report(ended)
    assert found["expected"] == ["worker 0"]
    assert "Nothing describes a cluster" in found["facts"]["worker 0"]["plan"]


def test_one_that_never_comes_is_named_on_both_sides(commands: Commands) -> None:
    own = addresses(3)
    other = start(commands, own, 1)
    await_doctor(own[1], 1)
    first = start(commands, own, 0, SHORT, "--json").end()
    found = report(first)
    assert first.code == 69
    assert found["missing"] == ["worker 2"]
    assert f"worker 0 and worker 1 find at {own[2]}: refused" in what(found, "missing")
    assert {(s["source"], s["target"]) for s in found["speeds"]} == {
        ("worker 0", "worker 1"),
        ("worker 1", "worker 0"),
    }
    told = other.end()
    assert told.code == 69
    assert "worker 1: 2 of 3 tasks are here" in told.out


@pytest.mark.slow
def test_without_the_first_the_others_say_so_and_who_else_is_there(commands: Commands) -> None:
    own = addresses(3)
    server = start(commands, own, 2)
    await_doctor(own[2], 2)
    found = report(start(commands, own, 1, SHORT, "--json").end())
    assert found["exit_code"] == 69
    assert f"worker 0 ({own[0]}) did not come" in what(found, "missing")
    assert f"worker 2 is at {own[2]} and responds to worker 1" in what(found, "other")
    server.kill()


def test_a_frozen_task_ends_nobody_else(commands: Commands) -> None:
    own = addresses(3)
    frozen, other = start(commands, own, 1), start(commands, own, 2)
    await_doctor(own[1], 1)
    await_doctor(own[2], 2)
    frozen.send(signal.SIGSTOP)
    found = report(start(commands, own, 0, SHORT, "--json").end())
    assert found["exit_code"] == 69
    assert found["missing"] == ["worker 1"]
    assert f"worker 0 and worker 2 find at {own[1]}: it accepts the connection" in what(
        found, "missing"
    )
    assert other.end().code == 69
    frozen.kill()


def test_one_that_falls_silent_after_it_came(commands: Commands) -> None:
    own = addresses(2)
    first = start(commands, own, 0, PATIENT, "--json")
    await_doctor(own[0], 0)
    joined = commands.write("join.py", JOIN_AND_SAY_NOTHING)
    env = tf_config({"worker": own}, "worker", 1)
    program = commands.start(sys.executable, joined, own[0], env=env)
    found = report(first.end())
    assert found["exit_code"] == 69
    assert found["unresponsive"] == ["worker 1"]
    assert "worker 1 came, then stopped responding" in what(found, "unresponsive")
    program.kill()


JOIN_AND_SAY_NOTHING = """
import os, sys, time
from spartito.cluster import resolve
from spartito.wire.secret import NO_SECRET
from spartito.cluster.spec import split_address
from spartito.doctor.facts.machine import collect
from spartito.doctor.findings import Target
from spartito.doctor.transport.messages import Join
from spartito.doctor.transport.connection import connect
end = time.monotonic() + 300
connection = connect(Target("worker 0", *split_address(sys.argv[1])), end, NO_SECRET)
connection.send(Join(collect(resolve(), os.environ, 1.0), 1), end)
time.sleep(300)
"""


@pytest.mark.parametrize("says", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b""])
def test_a_port_that_another_program_has(commands: Commands, says: bytes) -> None:
    own = addresses(2)
    sockets = ("--strategy-options", '{"communication": "sockets"}')
    with other_program(own[1], says):
        other = start(commands, own, 1, PATIENT, *sockets)
        first = start(commands, own, 0, PATIENT, "--json", *sockets)
        found = report(first.end())
        assert other.end().code == first.end().code == 0
    port = split_address(own[1])[1]
    assert f"port {port} of worker 1" in what(found, "port")
    assert "training listens on one that the system draws" in what(found, "port")
    assert len(found["speeds"]) == 2


def test_the_tasks_meet_though_the_leaders_port_is_taken(commands: Commands) -> None:
    own = addresses(2)
    with other_program(own[0], b"220 mail.example ESMTP\r\n"):
        other = start(commands, own, 1)
        found = report(start(commands, own, 0, PATIENT, "--json").end())
        assert other.end().code == 1
    assert found["missing"] == []
    assert f"port {split_address(own[0])[1]} of worker 0" in what(found, "port")


def test_a_connection_that_sends_garbage_is_closed_and_reported(commands: Commands) -> None:
    own = addresses(2)
    first = start(commands, own, 0, PATIENT, "--json")
    await_doctor(own[0], 0)
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\xff\n", b"[" * 5000 + b"\n"):
        with socket.create_connection(split_address(own[0]), 30.0) as connection:
            connection.sendall(garbage)
            is_tls = garbage.startswith(b"\x16")  # such a caller is told that we speak without it
            assert read_to_end(connection) == (b"SPTOSPTO" if is_tls else b"")
    other = start(commands, own, 1)
    found = report(first.end())
    assert found["unknown_peers"] == ["127.0.0.1"] * 3
    assert len(found["speeds"]) == 2
    assert other.end().code == found["exit_code"]


def test_a_second_process_of_the_same_task_is_not_let_in(commands: Commands) -> None:
    own = addresses(3)
    env = tf_config({"worker": own}, "worker", 1)
    twins = [commands.start(*SPARTITO, "doctor", "--timeout=60", "--json", env=env) for _ in "ab"]
    await_doctor(own[1], 1)
    first = start(commands, own, 0, PATIENT, "--json")
    assert eventually(lambda: any(twin.popen.poll() is not None for twin in twins), 60.0)
    third = start(commands, own, 2)
    found = report(first.end())
    assert "two processes are worker 1" in what(found, "refused")
    assert sorted(twin.end().code for twin in twins) == [1, 1]
    assert found["exit_code"] == third.end().code == 1


def test_clusters_that_differ_are_told(commands: Commands) -> None:
    own = addresses(3)
    other = start(commands, [own[0], own[2]], 1, PATIENT, "--json")
    await_doctor(own[2], 1)
    found = report(start(commands, own[:2], 0, SHORT, "--json").end())
    assert found["exit_code"] == 69
    refused = what(found, "refused")
    assert f"another cluster than worker 0: worker 1 at {own[2]}, not at {own[1]}" in refused
    alone = report(other.end())
    assert alone["exit_code"] == 1
    assert what(alone, "refused") == refused


def test_another_secret_is_told_on_both_sides_before_the_time_is_over(commands: Commands) -> None:
    own = addresses(2)
    programs = [
        commands.start(
            *SPARTITO,
            *("doctor", "--json", f"--timeout={PATIENT}"),
            env={**tf_config({"worker": own}, "worker", index), "SPARTITO_SECRET": secret * 20},
        )
        for index, secret in enumerate("ab")
    ]
    for program, other in zip(programs, ("worker 1", "worker 0"), strict=True):
        found = report(program.end())
        assert found["exit_code"] == 1
        assert found["seconds"] < PATIENT / 2
        assert f"another secret than {found['coordinator']}: it is {other}" in what(found, "secret")


@pytest.mark.parametrize("words", [["--workers", "0"], ["--timeout", "0"], ["--timeout", "nan"]])
def test_mistakes_are_told(commands: Commands, words: Sequence[str]) -> None:
    ended = commands.spartito("doctor", *words)
    assert ended.code == 2
    assert "Traceback" not in ended.text


def test_a_cluster_that_cannot_be_is_the_users_mistake(commands: Commands) -> None:
    ended = commands.spartito("doctor", env={"TF_CONFIG": "{"})
    assert ended.code == 2
    assert "TF_CONFIG" in ended.err


def test_it_does_without_torch() -> None:
    code = (
        "import sys; from spartito.doctor.examination import examine\n"
        "examine(); print([m for m in ('torch', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"
