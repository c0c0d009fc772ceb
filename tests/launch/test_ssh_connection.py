"""Both ends of a connection to another machine, with a pipe instead of ssh."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import spartito
from spartito.launch.hosts import agent, client
from spartito.launch.hosts.ssh import OPTIONS
from tests.commands import Commands, Program, commands_in
from tests.launch.supervised import (
    GRANDCHILD,
    LEAVES,
    LEAVES_DAEMON,
    SLEEPS,
    is_alive,
    stands_still,
    wait_until,
)

SAVES = (
    """
import os, signal, sys, time
def end(number, frame):
    os.write(1, b"saved\\n")  # print is not for signal handlers
    sys.exit(7)
signal.signal(signal.SIGTERM, end)
"""
    + SLEEPS
)


SOURCE = str(Path(spartito.__file__).parents[1])
TOLD = "it's so,\nin 2 lines: \u00e4"


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    with commands_in(tmp_path) as found:
        yield found


@pytest.fixture
def start(commands: Commands) -> Callable[[str], Program]:
    """Starts a script behind both ends."""

    def starter(script: str) -> Program:
        python = [sys.executable, "-S", commands.write("task.py", script)]
        remote = agent.command(list(map(str, python)), sys.executable)
        told = agent.first_line({"TOLD": TOLD, "SPARTITO_NOTICE": "0.5"})
        return commands.start(*client.command("b", remote), env={client.FIRST_LINE: told})

    return starter


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("import os; print(os.environ['TOLD'])", 0),
        ("raise SystemExit(3)", 3),
        ("raise SystemExit(69)", 69),
        ("raise SystemExit(200)", 200),
        ("raise SystemExit(128 + 19)", 147),
        ("raise SystemExit(255)", 1),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", -signal.SIGSEGV),
    ],
)
def test_it_ends_here_as_it_ended_there(
    start: Callable[[str], Program], script: str, code: int
) -> None:
    ended = start(script).end()
    assert ended.code == code, ended.text
    assert ended.out == (f"{TOLD}\n" if code == 0 else "")
    assert ("exit code 255 becomes 1" in ended.err) == ("255" in script)


def test_a_killed_keeper_is_a_lost_connection(start: Callable[[str], Program]) -> None:
    ended = start("import os, signal; os.kill(os.getppid(), signal.SIGKILL); " + SLEEPS).end()
    assert ended.code == -signal.SIGHUP
    assert "the connection to b is lost" in ended.err


@pytest.mark.parametrize("words", [["sh", "-c", "exit 255"], ["sh", "-c", "kill -9 $$"]])
def test_a_lost_connection_ends_by_sighup(commands: Commands, words: list[str]) -> None:
    ended = commands.start(*client.command("b", words)).end()
    assert ended.code == -signal.SIGHUP
    assert ended.err == "spartito: the connection to b is lost\n"


def test_a_signal_reaches_the_task_which_may_save(start: Callable[[str], Program]) -> None:
    program = start(SAVES)
    program.wait_for("pid")
    program.send(signal.SIGTERM)
    ended = program.end()
    assert (ended.code, ended.out.splitlines()[-1]) == (7, "saved")


def test_ctrl_c_reaches_the_task(start: Callable[[str], Program]) -> None:
    program = start(SLEEPS)
    program.wait_for("pid")
    program.send(signal.SIGINT)
    ended = program.end()
    assert ended.code == -signal.SIGINT
    assert ended.err.rstrip().endswith("KeyboardInterrupt")


def test_a_frozen_task_hears_it(start: Callable[[str], Program]) -> None:
    program = start(SAVES)
    os.kill(int(program.wait_for(r"pid (\d+)")[1]), signal.SIGSTOP)
    program.send(signal.SIGTERM)
    assert program.end().code == 7


def test_a_pause_reaches_the_task_and_ends(start: Callable[[str], Program]) -> None:
    program = start(GRANDCHILD)
    pids = [int(program.wait_for(r"pid (\d+)")[1]) for _ in range(2)]
    for number, still in ((signal.SIGTSTP, True), (signal.SIGCONT, False)):
        program.send(number)
        wait_until(lambda still=still: [stands_still(pid) for pid in pids] == [still] * 2)  # type: ignore[misc]
    program.send(signal.SIGTERM)
    assert program.end().code == -signal.SIGTERM


def test_what_keeps_a_task_says_where_it_stands(start: Callable[[str], Program]) -> None:
    program = start(
        f"import sys\nsys.path.insert(0, {SOURCE!r})\n"
        "import os, signal\nfrom spartito.heartbeat import *\nbegin()\nbeat(41, STEP)\n"
        "os.kill(os.getpid(), signal.SIGSTOP)\nos.kill(os.getpid(), signal.SIGKILL)"
    )
    line = r"^spartito: the task is stopped by a signal \(at step 41, in 'step'\): .* (\d+) lets"
    os.kill(int(program.wait_for(line)[1]), signal.SIGCONT)
    ended = program.end()
    assert ended.code == -signal.SIGKILL
    assert "spartito: the task was killed (at step 41, in 'step')\n" in ended.err


@pytest.mark.parametrize("script", [LEAVES, LEAVES_DAEMON])
def test_what_the_task_left_behind_ends_with_it(
    start: Callable[[str], Program], script: str
) -> None:
    program = start(script + "raise SystemExit(5)")
    program.wait_for("pid")
    assert program.end().code == 5  # `end` sees that nothing is left


@pytest.mark.parametrize("script", [SLEEPS, SAVES, GRANDCHILD])
def test_all_ends_when_the_client_side_is_gone(
    start: Callable[[str], Program], script: str
) -> None:
    program = start(script)
    program.wait_for("pid")
    program.send(signal.SIGKILL)
    assert program.end().code == -signal.SIGKILL


def test_silence_ends_the_task() -> None:
    python = [sys.executable, "-S", "-c", SLEEPS]
    remote = subprocess.Popen(
        agent.command(python, sys.executable, silence=5.0),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with remote:
        assert remote.stdin is not None
        assert remote.stdout is not None
        print(agent.first_line({}), end="", file=remote.stdin, flush=True)
        while not select.select([remote.stdout], [], [], 1.0)[0]:
            print(0, file=remote.stdin, flush=True)  # the task is just starting
        pid = int(remote.stdout.readline().split()[1])
        assert remote.wait(60) == 128 + signal.SIGKILL
    assert not is_alive(pid)


def test_the_client_side_keeps_speaking(commands: Commands) -> None:
    reads = "import os; [os.read(0, n) for n in (3, 2, 2, 2)]; print('three', flush=True)"
    quick = (
        "import sys\nfrom spartito.launch.hosts import client\n"
        "client.HEARTBEAT = 0.1\nsys.exit(client.main(sys.argv[1:]))"
    )
    words = ("-c", quick, "b", "0", sys.executable, "-S", "-c", reads)
    ended = commands.python(*words, env={client.FIRST_LINE: "{}"})
    assert (ended.code, ended.out) == (0, "three\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGCONT])
def test_a_signal_just_after_the_end_changes_no_exit_code(
    commands: Commands, number: signal.Signals
) -> None:
    late = (
        "import os, signal, sys\nfrom spartito.launch.hosts import client\nclose = os.close\n"
        f"def closing(fd):\n    close(fd)\n    signal.raise_signal({int(number)})\n"
        "os.close = closing\nsys.exit(client.main(sys.argv[1:]))"
    )
    words = ("-c", late, "b", "0", "sh", "-c", "exit 3")
    ended = commands.python(*words, env={client.FIRST_LINE: "{}"})
    assert (ended.code, ended.err) == (3, "")


def test_a_task_is_gone_before_ssh_gives_its_connection_up() -> None:
    """So one that is started again finds its port free."""
    told = dict(option.split("=") for option in OPTIONS)
    gives_up = int(told["ServerAliveInterval"]) * (int(told["ServerAliveCountMax"]) + 1)
    assert 3 * agent.HEARTBEAT < agent.SILENCE < gives_up


HEARS = """
import time
try:
    print("ready", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    print("heard", flush=True)
"""
AS_RAY = """
import os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
signal.signal(signal.SIGINT, signal.SIG_IGN)
os.execv(sys.argv[1], sys.argv[1:])
"""


def test_a_task_hears_an_interrupt_that_its_agent_does_not(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(HEARS)
    words = agent.command([sys.executable, str(tmp_path / "task.py")], sys.executable)
    with subprocess.Popen(
        [sys.executable, "-c", AS_RAY, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        bufsize=0,
    ) as deaf:  # fmt: skip
        assert deaf.stdin is not None
        assert deaf.stdout is not None
        deaf.stdin.write(agent.first_line({}).encode())
        assert deaf.stdout.readline() == b"ready\n"
        deaf.stdin.write(b"%d\n" % signal.SIGINT)
        assert deaf.stdout.readline() == b"heard\n"
        assert deaf.wait(30) == 0
