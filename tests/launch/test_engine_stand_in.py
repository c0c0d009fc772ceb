"""Commands that drive an engine, on a program that stands in for ``docker``."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from spartito.declared import Declared
from spartito.errors import SpartitoError, UserError
from spartito.launch.containers import engine as engines
from spartito.launch.containers.compose import compose_file
from spartito.launch.containers.engine import Engine, build_image, call
from spartito.launch.containers.file import read_job
from spartito.launch.containers.plan import Containers
from spartito.launch.processes.roles import Roles

SPARTITO = (sys.executable, "-m", "spartito")
LIMIT = 30.0
"""Seconds until a process that should have ended is taken for one that goes on."""

COMMANDS = (
    r"version --format {{.Server.Version}}",
    r"compose version",
    r"compose --project-name NAME --file - up --detach --no-build( --force-recreate)?",
    r"compose --project-name NAME --file - down --volumes --remove-orphans --timeout \d+",
    r"image ls --quiet \S+",
    r"image inspect --format {{json .Config.Labels}} \S+",
    r"ps --all --quiet --no-trunc --filter label=com.docker.compose.project=NAME",
    r"inspect worker-0",
    r"stop -t \d+ worker-0",
    r"wait worker-0",
    r"logs( --timestamps)?( --follow)?( --since \S+)? worker-0",
    r"build --file \S+ --tag x --label spartito.version=1( --build-arg BASE=\S+)? \S+",
    r"pull --quiet \S+",
)
"""All that the stand-in knows, each with exactly the options that an engine has for it."""

DOCKER = f"""#!{sys.executable} -ISs
import json, os, pathlib, re, signal, subprocess, sys

engine_folder = pathlib.Path(__file__).parent.parent
words = sys.argv[1:]
known = [command.replace("NAME", "digits(-doctor)?") for command in {COMMANDS!r}]
if not any(re.fullmatch(command, " ".join(words)) for command in known):
    sys.exit("unknown command: docker " + " ".join(words))

def note(text):
    with open(engine_folder / "events", "w") as events:
        print(text, file=events)

def wait(name):
    if (engine_folder / name).exists():
        (engine_folder / name).open().read()

if words[0] == "compose" and words[1] != "version":
    if "PLUGIN" not in os.environ:
        plugin = [sys.executable, "-ISs", __file__, *words]
        sys.exit(subprocess.run(plugin, env=os.environ | {{"PLUGIN": "1"}}).returncode)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # as the composer does
    verb = "up" if "up" in words else "down"
    note(verb)
    wait(f"{{verb}}-gate")
    note(f"{{verb}} done")
elif words[:2] == ["image", "ls"]:
    print((engine_folder / "listed").read_text())
elif words[:2] == ["image", "inspect"]:
    print("{{}}")
elif words[0] == "ps":
    print(" ".join(["worker-0"] if (engine_folder / "status").exists() else []))
elif words[0] == "inspect":
    wait("inspect-gate")
    code = int((engine_folder / "code").read_text()) if (engine_folder / "code").exists() else 0
    state = {{"Status": (engine_folder / "status").read_text(), "ExitCode": code}}
    state["Health"] = {{"Status": "unhealthy"}}
    labels = {{"com.docker.compose.service": "worker-0"}}
    print(json.dumps([{{"Id": "worker-0", "Config": {{"Labels": labels}}, "State": state}}]))
elif words[0] == "logs":
    print("1 one", flush=True)
    wait("logs-gate")
    print("2 two\\n3 three", flush=True)
elif words[0] in ("build", "pull"):
    sys.exit(int((engine_folder / words[0]).read_text()))
"""


class EngineFolder:
    """A folder with a job's file, a ``docker``, and FIFOs at which that waits for the test."""

    def __init__(self, folder: Path, with_docker: Callable[[str], None]) -> None:
        self.folder = folder
        self.file = folder / "compose.yaml"
        plan = Containers("digits", "mnist", ("python",), Declared("one_device"), Roles(1), "./out")
        self.file.write_text(compose_file(plan))
        (folder / "bin").mkdir()
        docker = folder / "bin" / "docker"
        docker.write_text(DOCKER)
        docker.chmod(0o755)
        with_docker(f"{folder / 'bin'}:{os.environ['PATH']}")
        self.tell("listed", "abc")
        os.mkfifo(folder / "events")
        self._events = os.fdopen(os.open(folder / "events", os.O_RDWR), "r")
        self._held: list[int] = []
        self._started: list[subprocess.Popen[str]] = []

    def tell(self, name: str, text: str) -> None:
        """Change what the ``docker`` prints."""
        new = self.folder / f"{name}.new"
        new.write_text(text)
        new.rename(self.folder / name)

    def bar(self, name: str) -> None:
        """From now on who comes to this gate waits."""
        os.mkfifo(self.folder / f"{name}-gate")

    def meet(self, name: str) -> int:
        """Wait until somebody waits at the gate; returns what opens it when closed."""
        self._held.append(os.open(self.folder / f"{name}-gate", os.O_WRONLY))
        return self._held[-1]

    def open(self, gate: int) -> None:
        self._held.remove(gate)
        os.close(gate)

    def start(self, *words: str) -> subprocess.Popen[str]:
        popen = subprocess.Popen(
            [*SPARTITO, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            process_group=0,
        )
        self._started.append(popen)
        return popen

    def event(self) -> str:
        return self._events.readline().strip()

    def close(self) -> None:
        for popen in self._started:
            popen.kill()
            popen.communicate()
        for held in self._held:
            os.close(held)
        for gate in self.folder.glob("*-gate"):  # who waits there yet, after a test that failed
            key = os.open(gate, os.O_RDWR)
            gate.unlink()
            os.close(key)
        (self.folder / "events").unlink()
        self._events.close()


@pytest.fixture
def engine_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineFolder]:
    made = EngineFolder(tmp_path, lambda path: monkeypatch.setenv("PATH", path))
    yield made
    made.close()


def goes_away(gate: int) -> bool:
    """Whether he who waits at the gate ends, and was not let go."""
    poll = select.poll()
    poll.register(gate, 0)
    return bool(poll.poll(LIMIT * 1000))


UP, DOCTOR = ("cluster", "up"), ("doctor", "--compose")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("command", [UP, DOCTOR])
def test_an_interrupt_amid_the_removal_does_not_disturb_it(
    engine_folder: EngineFolder, command: tuple[str, ...], number: signal.Signals
) -> None:
    engine_folder.bar("down")
    engine_folder.bar("up")
    popen = engine_folder.start(*command, str(engine_folder.file))
    up = engine_folder.meet("up")
    engine_folder.tell("status", "exited")
    engine_folder.open(up)
    assert [engine_folder.event(), engine_folder.event(), engine_folder.event()] == [
        "up",
        "up done",
        "down",
    ]
    down = engine_folder.meet("down")
    os.killpg(popen.pid, number)  # as a terminal does
    engine_folder.open(down)
    assert engine_folder.event() == "down done"
    assert popen.wait(LIMIT) == 0


def test_a_second_interrupt_does_not_disturb_the_removal(engine_folder: EngineFolder) -> None:
    engine_folder.bar("up")
    engine_folder.bar("down")
    popen = engine_folder.start("cluster", "up", str(engine_folder.file))
    up = engine_folder.meet("up")
    engine_folder.tell("status", "running")
    engine_folder.open(up)
    assert popen.stdout is not None
    assert popen.stdout.readline() == "[worker 0] one\n"
    os.killpg(popen.pid, signal.SIGINT)
    down = engine_folder.meet("down")
    os.killpg(popen.pid, signal.SIGINT)
    engine_folder.open(down)
    assert [engine_folder.event() for _ in range(4)] == ["up", "up done", "down", "down done"]
    assert popen.wait(LIMIT) == 130


@pytest.mark.parametrize(
    ("code", "ended"), [("0", "all is well"), ("3", "worker 0 failed with exit code 3")]
)
def test_the_status_of_a_job_that_has_ended_is_how_it_ended(
    engine_folder: EngineFolder, code: str, ended: str
) -> None:
    engine_folder.tell("code", code)
    for status, health in (("running", "unhealthy"), ("exited", "")):
        engine_folder.tell("status", status)
        out, _ = (
            popen := engine_folder.start("cluster", "status", str(engine_folder.file))
        ).communicate()
        task = out.splitlines()[1].split()
        assert task[:2] + task[2:3] * bool(health) == ["worker-0", status, *health.split()]
    assert "unhealthy" not in out
    assert out.splitlines()[-1] == f"digits has ended: {ended}"
    assert popen.returncode == int(code)


@pytest.mark.parametrize("number", [None, signal.SIGINT])
@pytest.mark.slow
def test_who_waits_gets_the_exit_code_and_removes_nothing(
    engine_folder: EngineFolder, number: signal.Signals | None
) -> None:
    engine_folder.tell("status", "running")
    engine_folder.bar("inspect")
    popen = engine_folder.start("cluster", "wait", str(engine_folder.file))
    inspecting = engine_folder.meet("inspect")
    if number is not None:
        popen.send_signal(number)
    engine_folder.tell("code", "137")
    engine_folder.tell("status", "exited")
    (engine_folder.folder / "inspect-gate").unlink()
    engine_folder.open(inspecting)
    _, err = popen.communicate()
    assert popen.returncode == (69 if number is None else 130)
    if number is None:
        assert err.splitlines() == [
            "spartito: worker 0 was killed by signal 9",
            f"spartito: the run folder is {engine_folder.folder / 'out'}",
        ]
    engine_folder.tell("status", "running")
    engine_folder.start("cluster", "down", str(engine_folder.file))
    assert engine_folder.event() == "down"  # the first word that the composer has heard


@pytest.mark.parametrize("command", [UP, DOCTOR])
def test_who_is_interrupted_at_the_start_leaves_no_composer(
    engine_folder: EngineFolder, command: tuple[str, ...]
) -> None:
    engine_folder.bar("up")
    engine_folder.bar("down")
    popen = engine_folder.start(*command, str(engine_folder.file))
    up = engine_folder.meet("up")
    popen.send_signal(signal.SIGTERM)
    assert goes_away(up)
    engine_folder.open(engine_folder.meet("down"))
    assert [engine_folder.event() for _ in range(3)] == ["up", "down", "down done"]
    assert popen.wait(LIMIT) == 143


def test_what_a_late_command_has_started_ends_with_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "gate")
    holder = os.open(tmp_path / "gate", os.O_RDWR)
    ours, theirs = os.pipe()
    child = f"echo; exec cat {tmp_path / 'gate'}"
    try:
        with pytest.raises(SpartitoError, match="did not end within 5 s"):
            call(["sh", "-c", f"({child}) > /proc/{os.getpid()}/fd/{theirs} & wait"], 5)
        os.close(theirs)
        assert os.read(ours, 9) == b"\n"
        assert select.select([ours], [], [], LIMIT)[0]
        assert os.read(ours, 9) == b""
    finally:
        os.close(holder)
        os.close(ours)


CANNOT = "Error: crun: cgroups in hybrid mode not supported: OCI runtime error"
HANGS = ["sh", "-c", f"echo '{CANNOT}' >&2; exec tail -f /dev/null"]


def test_a_composer_that_waits_for_what_the_engine_cannot_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It ends long before the time limit, with what the engine has said."""
    monkeypatch.setattr(engines, "TICK", 0.05)
    monkeypatch.setattr(engines, "PATIENCE", 0.2)
    with pytest.raises(engines.LateError, match=f"did not end within .* s: {CANNOT}"):
        call(HANGS, 10 * LIMIT)


def test_a_start_that_takes_long_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "TICK", 0.05)
    monkeypatch.setattr(engines, "SAY_SECONDS", 0.2)
    said: list[str] = []
    with pytest.raises(engines.LateError, match=CANNOT):
        call(HANGS, 1.0, say=said.append)
    assert len(said) == 1
    assert said[0].endswith(f": {CANNOT}")


def test_a_job_that_cannot_be_removed_ends_with_what_went_wrong_first(
    engine_folder: EngineFolder,
) -> None:
    docker = engine_folder.folder / "bin" / "docker"
    lines = [
        "#!/bin/sh",
        'case "$*" in',
        "compose*up*) echo 'Error: no container starts' >&2; exit 1 ;;",
        "compose*down*) echo 'Error: nothing is removed' >&2; exit 1 ;;",
        "ps*quiet*no-trunc*) ;;",
        "ps*) echo one ;;",
        '"image inspect"*) echo "{}" ;;',
        "*) echo 1 ;;",
        "esac",
    ]
    docker.write_text("\n".join(lines) + "\n")
    popen = engine_folder.start("cluster", "up", str(engine_folder.file))
    _, err = popen.communicate(timeout=LIMIT)
    assert popen.returncode == 1, err
    assert err.rstrip().endswith("the container engine failed: Error: no container starts"), err
    assert "nothing is removed; then: spartito cluster down" in err


@pytest.mark.parametrize(
    "words", ["compose --project-name digits --file - up", "ps --all", "images", "version"]
)
def test_the_stand_in_refuses_what_it_does_not_know(
    engine_folder: EngineFolder, words: str
) -> None:
    with pytest.raises(SpartitoError, match=f"unknown command: docker {words}$"):
        call(["docker", *words.split()], LIMIT)


def test_a_composer_that_does_not_reply_is_none() -> None:
    assert engines._works(["true"])
    assert not engines._works(["false"])
    assert not engines._works(["tail", "-f", "/dev/null"], 0.1)


@pytest.mark.parametrize(("listed", "pull"), [("abc", 1), ("", 0)])
def test_a_build_that_fails_on_a_base_that_is_there(
    engine_folder: EngineFolder, listed: str, pull: int
) -> None:
    build(engine_folder, listed, pull)
    assert build_image("x", engine_folder.folder, "1", {}) == 7


def test_a_build_that_fails_without_its_base(engine_folder: EngineFolder) -> None:
    build(engine_folder, "", 1)
    with pytest.raises(UserError, match="the base image nice:1 is not on this machine"):
        build_image("x", engine_folder.folder, "1", {"BASE": "nice:1"})


def build(engine_folder: EngineFolder, listed: str, pull: int) -> None:
    (engine_folder.folder / "docker").mkdir()
    (engine_folder.folder / "docker" / "Dockerfile").touch()
    for name, text in {"build": "7", "listed": listed, "pull": str(pull)}.items():
        engine_folder.tell(name, text)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_who_follows_logs_leaves_nothing(
    engine_folder: EngineFolder, number: signal.Signals
) -> None:
    engine_folder.bar("logs")
    engine_folder.tell("status", "running")
    popen = engine_folder.start("cluster", "logs", "--follow", str(engine_folder.file))
    assert popen.stdout is not None
    assert popen.stdout.readline() == "[worker 0] one\n"
    logs = engine_folder.meet("logs")
    popen.send_signal(number)
    assert goes_away(logs)
    assert popen.wait(LIMIT) == 128 + number


@pytest.mark.parametrize("words", [("up",), ("logs", "--follow")])
def test_when_nobody_reads_the_output_there_is_no_noise(
    engine_folder: EngineFolder, words: tuple[str, ...]
) -> None:
    engine_folder.bar("logs")
    engine_folder.bar("up")
    if words[0] == "logs":
        engine_folder.tell("status", "running")
    popen = engine_folder.start("cluster", *words, str(engine_folder.file))
    if words[0] == "up":
        up = engine_folder.meet("up")
        engine_folder.tell("status", "running")
        engine_folder.open(up)
    assert popen.stdout is not None
    assert popen.stdout.readline() == "[worker 0] one\n"
    popen.stdout.close()
    logs = engine_folder.meet("logs")
    (engine_folder.folder / "logs-gate").unlink()
    engine_folder.open(logs)
    engine_folder.tell("status", "exited")
    assert popen.stderr is not None
    said = popen.stderr.read().splitlines()
    assert popen.wait(LIMIT) == 0
    told = [
        "spartito: digits: 1 containers",
        f"spartito: the run folder is {engine_folder.folder / 'out'}",
    ]
    assert said == (told if words[0] == "up" else [])


def test_an_engine_that_does_not_print_its_logs(
    engine_folder: EngineFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    from spartito.doctor.launch import containers as doctor

    engine_folder.bar("logs")
    engine_folder.tell("status", "exited")
    monkeypatch.setattr(doctor, "ASK_SECONDS", 0.2)
    engine = Engine.find()
    state = engine.states(read_job(engine_folder.file))[0]
    with pytest.raises(SpartitoError, match=r"logs worker-0 did not end within 0\.2 s"):
        doctor._show(engine, state)
