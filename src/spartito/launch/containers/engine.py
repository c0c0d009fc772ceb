"""Drives the container engine: the commands behind ``spartito cluster``, and what they may say."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spartito.errors import SpartitoError, UserError
from spartito.launch.containers.compose import STOP_SECONDS
from spartito.launch.containers.file import JobFile
from spartito.launch.processes.interrupts import interrupts_held

ASK_SECONDS = 30.0
"""How long a query of the engine may take."""

START_SECONDS = 300.0
"""How long it may take to make or remove all containers of a job."""

SAY_SECONDS = 10.0
"""After which a start that goes on is said."""

PATIENCE = 60.0
"""After an error of its own, a composer that neither ends nor says more gets so long: it may wait
for containers that never start."""

TICK = 1.0
"""Seconds between two looks at what a command has said."""

PROJECT = "com.docker.compose.project"
SERVICE = "com.docker.compose.service"
BASE = "python:3.11-slim"
"""What the Dockerfile begins with if nothing is said."""

VERSION_LABEL = "spartito.version"

COMPLAINTS = (
    (
        "permission denied",
        "no right to use the container engine",
        "Join the group that may (sudo usermod -aG docker $USER, then log in again), or use sudo.",
    ),
    (
        ("cannot connect to the docker daemon", "connection refused", "error during connect"),
        "the container engine does not run",
        "Start it: sudo systemctl start docker, or dockerd as root; or set DOCKER_HOST right.",
    ),
    (
        ("port is already allocated", "address already in use"),
        "a port that the job publishes is taken",
        "End the program that has it, or change the port in the file.",
    ),
    (
        "is already in use by container",
        "a container of this name is there already",
        "End that job: spartito cluster down FILE; remove it: docker rm NAME; or choose another "
        "--name.",
    ),
    (
        ("could not select device driver", "nvidia-container"),
        "the engine cannot give GPUs to containers",
        "Install the NVIDIA Container Toolkit, or leave --gpus out.",
    ),
    (
        ("no such image", "pull access denied", "manifest unknown", "unable to find image"),
        "an image is missing",
        "Build it: spartito cluster image",
    ),
    (
        ("missing files:", "unrecognized arguments: --in-pod"),
        "this podman-compose is too old",
        "Take a later one: pip install --upgrade podman-compose",
    ),
    (
        ("minimum memory limit", "range of cpus is from"),
        "a limit that the engine cannot keep",
        "Change cpus or mem_limit in the file.",
    ),
)
"""What the engine prints, what it means, and what to do."""


@dataclass(frozen=True, slots=True)
class TaskState:
    """How a container goes: ``status`` is the engine's word, as running, restarting, exited.

    ``health`` is empty where nobody looks. ``finished_at`` sorts the ends of several.
    """

    service: str
    id: str
    status: str
    code: int
    health: str = ""
    starts: int = 1
    out_of_memory: bool = False
    finished_at: str = ""

    @property
    def name(self) -> str:
        """As logs and errors say it: ``worker 1``."""
        return self.service.replace("-", " ")

    @property
    def ended(self) -> bool:
        """Whether it is over and the engine will not start it again."""
        return self.status in ("exited", "dead")


ENV_ENGINE = "SPARTITO_ENGINE"
"""Which engine drives containers, ``docker`` or ``podman``; else docker, where that is here."""

ENGINES = ("docker", "podman")

FAILS = re.compile(r'error\b|time="[^"]*" level=(error|fatal)', re.IGNORECASE)
"""How a line of an engine begins that says what failed."""


class LateError(SpartitoError):
    """A command of the engine did not end within its time limit."""


@dataclass(frozen=True, slots=True)
class Engine:
    """The engine of this machine; ``compose`` are the words that start its composer.

    ``docker`` is its command, which Podman's understands too.
    """

    docker: str
    compose: tuple[str, ...]

    @classmethod
    def find(cls) -> Engine:
        """The engine, once it has replied; `UserError` where there is none or no right to it."""
        docker = _command(os.environ.get(ENV_ENGINE, ""))
        call([docker, "version", "--format", "{{.Server.Version}}"], ASK_SECONDS)
        if _is_podman(docker):
            composer = shutil.which("podman-compose")
            if composer is None:
                raise UserError(
                    "there is podman, but no podman-compose",
                    "Install it, by 'pip install podman-compose' for example.",
                )
            # Without a pod, so that each container can have the user's own number.
            return cls(docker, (composer, "--in-pod=false"))
        if _works([docker, "compose", "version"]):
            return cls(docker, (docker, "compose"))
        old = shutil.which("docker-compose")
        if old is None:
            raise UserError(
                "this docker has no compose",
                "Install docker-compose-plugin or docker-compose, as your system calls it.",
            )
        return cls(docker, (old,))

    @property
    def is_podman(self) -> bool:
        """Whether it is Podman."""
        return _is_podman(self.docker)

    def ask(self, *words: str, limit: float = ASK_SECONDS) -> str:
        """What ``docker`` with ``words`` prints."""
        return call([self.docker, *words], limit)

    def run_compose(
        self,
        job: JobFile,
        *words: str,
        limit: float = START_SECONDS,
        say: Callable[[str], None] | None = None,
    ) -> str:
        """Run the composer with ``words`` on the job; ``say`` is told if that takes long."""
        # The composer of old does not know the key "name": it gets the name, and no such key. It
        # reads from its input, so that paths begin where it is.
        folder = job.path.parent.resolve()
        where = ["--project-name", job.name]
        text = "\n".join(line for line in job.text.splitlines() if not line.startswith("name:"))
        env = None
        if self.is_podman and os.getuid() != 0:
            # Files that the user made for the tasks are the tasks' own: their numbers are equal.
            env = {**os.environ, "PODMAN_USERNS": "keep-id"}
        command = [*self.compose, *where, "--file", "-", *words]
        return call(command, limit, text, folder, env, say)

    def version_in(self, image: str) -> str:
        """The version of Spartito that ``image`` says it holds; empty where it says nothing.

        Raises `UserError` where the image is not on this machine.
        """
        if not self.ask("image", "ls", "--quiet", image).strip():
            raise UserError(
                f"there is no image {image!r} on this machine",
                f"Build it: spartito cluster image --tag {image}",
            )
        found = self.ask("image", "inspect", "--format", "{{json .Config.Labels}}", image)
        return str((json.loads(found) or {}).get(VERSION_LABEL, ""))

    def states(self, job: JobFile) -> list[TaskState]:
        """How each container of the job goes, in the order of the file."""
        mine = f"label={PROJECT}={job.name}"
        while True:
            listed = self.ask("ps", "--all", "--quiet", "--no-trunc", "--filter", mine).split()
            if not listed:
                return []
            try:
                found = [state_of(one) for one in json.loads(self.ask("inspect", *listed))]
                break
            except SpartitoError as error:
                if "no such object" not in str(error).lower():
                    raise
                # One was removed since we asked: who is left?
        order = list(job.services)
        known = [state for state in found if state.service in order]
        return sorted(known, key=lambda state: order.index(state.service))

    def start_again(self, state: TaskState) -> None:
        """Start a container that has ended, or that stands still, which is ended first."""
        if not state.ended:
            self.ask("kill", state.id)
        self.ask("start", state.id)

    def down(self, job: JobFile, seconds: int = STOP_SECONDS) -> None:
        """Remove the job's containers, its network and its snapshots; the run folder stays.

        Tasks that still run are asked to stop, and killed after ``seconds``.
        """
        words = ("down", "--volumes", "--remove-orphans", "--timeout", str(seconds))
        try:
            self._stop_tasks(job, seconds)
            self.run_compose(job, *words)
        except (UserError, LateError):
            raise
        except SpartitoError:
            # The composer fails where somebody else removes the job at the same time.
            if self._has(job):
                self.run_compose(job, *words)

    def _stop_tasks(self, job: JobFile, seconds: int) -> None:
        """Ask all tasks at once to stop; who depends on nobody would hear of it last.

        What cannot be done, as where somebody else removes them, is left to the composer.
        """
        running = [
            state.id
            for state in self.states(job)
            if state.service in job.tasks and state.status in ("running", "restarting")
        ]
        if running:
            with suppress(SpartitoError):
                self.ask("stop", "-t", str(seconds), *running, limit=seconds + ASK_SECONDS)

    def _has(self, job: JobFile) -> bool:
        """Whether anything of the job is there."""
        mine = ("--quiet", "--filter", f"label={PROJECT}={job.name}")
        kinds = (("ps", "--all"), ("network", "ls"), ("volume", "ls"))
        return any(self.ask(*kind, *mine).strip() for kind in kinds)


def state_of(inspected: Mapping[str, Any]) -> TaskState:
    """A container's state out of what ``docker inspect`` says."""
    state = inspected["State"]
    return TaskState(
        service=inspected["Config"]["Labels"].get(SERVICE, ""),
        id=inspected["Id"],
        status=state["Status"],
        code=int(state["ExitCode"]),
        health=(state.get("Health") or {}).get("Status", ""),
        starts=1 + int(inspected.get("RestartCount", 0)),
        out_of_memory=bool(state.get("OOMKilled")),
        finished_at=state.get("FinishedAt", "").rstrip("Z"),  # so that shorter sorts first
    )


def build_image(
    tag: str,
    context: Path,
    version: str,
    arguments: Mapping[str, str],
    network: str | None = None,
) -> int:
    """Build the image out of the project in ``context``; returns the builder's exit code.

    ``arguments`` are those of the Dockerfile, ``network`` is what the build may use.
    """
    file = context / "docker" / "Dockerfile"
    if not file.is_file():
        raise UserError(
            f"{context} has no docker/Dockerfile",
            "Run this in the folder of Spartito's sources, or name it: spartito cluster image DIR",
        )
    engine = Engine.find()
    words = [engine.docker, "build", "--file", str(file), "--tag", tag]
    words += ["--label", f"{VERSION_LABEL}={version}"]
    for name, value in arguments.items():
        words += ["--build-arg", f"{name}={value}"]
    if network is not None:
        words += ["--network", network]
    code = subprocess.run([*words, str(context)]).returncode
    base = arguments.get("BASE", BASE)
    if code and not _can_have(engine, base):
        raise UserError(
            f"the base image {base} is not on this machine, and could not be fetched",
            "Name one that is here: --base IMAGE. On Debian, scripts/engine makes one as root.",
        )
    return code


def _can_have(engine: Engine, image: str) -> bool:
    """Whether ``image`` is here or can be fetched."""
    # A builder of today keeps what it has fetched to itself: the engine does not list it.
    listed = engine.ask("image", "ls", "--quiet", image).strip()
    return bool(listed) or _works([engine.docker, "pull", "--quiet", image], START_SECONDS)


def _command(asked: str) -> str:
    """The command of the engine that ``asked`` names, else of one that is here."""
    if asked and asked not in ENGINES:
        raise UserError(f"{ENV_ENGINE}={asked!r} is no engine", f"Known: {', '.join(ENGINES)}.")
    found = next(filter(None, map(shutil.which, [asked] if asked else ENGINES)), None)
    if found is None:
        raise UserError(
            f"there is no {asked or 'docker'} command on this machine",
            f"Install {'Podman' if asked == 'podman' else 'Docker Engine'}; or run without "
            "containers: spartito run --workers 2 ...",
        )
    return found


def _is_podman(command: str) -> bool:
    return Path(command).name == "podman"


def call(
    words: Sequence[str],
    limit: float,
    given: str | None = None,
    folder: Path | None = None,
    env: Mapping[str, str] | None = None,
    say: Callable[[str], None] | None = None,
) -> str:
    """What a command prints in ``folder``; its failure as the error that its reader needs."""
    code, out, err = run(words, limit, given, folder, env=env, say=say)
    if code:
        raise complaint(err or out)
    return out


def run(
    words: Sequence[str],
    limit: float,
    given: str | None = None,
    folder: Path | None = None,
    shown: bool = False,
    env: Mapping[str, str] | None = None,
    say: Callable[[str], None] | None = None,
) -> tuple[int, str, str]:
    """A command's exit code and what it prints, empty where that is ``shown``.

    ``say`` is told of one that takes long; one that said an error and goes on without a word ends
    before the time ``limit``. Ctrl-C does not reach it: who cleans up is not disturbed. Who leaves
    early, by an interrupt or the time limit, ends it with all that it has started, as the composer
    is by ``docker``.
    """
    pipe = None if shown else subprocess.PIPE
    popen: subprocess.Popen[str] | None = None
    try:
        with interrupts_held():  # nothing runs that we do not know of
            popen = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL if given is None else subprocess.PIPE,
                stdout=pipe,
                stderr=pipe,
                text=True,
                cwd=folder,
                env=env,
                start_new_session=True,
            )
        out, err = _communicate(popen, given, limit, say)
    except BaseException as error:
        if popen is not None:
            with suppress(ProcessLookupError):
                os.killpg(popen.pid, signal.SIGKILL)
        if isinstance(error, subprocess.TimeoutExpired):
            raise _late(words, error) from None
        if isinstance(error, OSError):
            raise UserError(f"{words[0]} cannot be started: {error.strerror}") from error
        raise
    finally:
        if popen is not None:
            with popen:  # closes its pipes, and waits
                pass
    return popen.returncode, out or "", err or ""


def _communicate(
    popen: subprocess.Popen[str], given: str | None, limit: float, say: Callable[[str], None] | None
) -> tuple[str, str]:
    """What a command prints until it ends; `subprocess.TimeoutExpired` has what it did so far."""
    began = heard = time.monotonic()
    text = ""
    while True:
        left = began + limit - time.monotonic()
        try:
            return popen.communicate(given, max(0.0, min(TICK, left)))
        except subprocess.TimeoutExpired as late:
            given, before, text = None, text, _said_by(late)
        now = time.monotonic()
        heard = heard if text == before else now
        if now >= began + limit or (errors_in(text) and now >= heard + PATIENCE):
            raise subprocess.TimeoutExpired(popen.args, round(now - began, 1), text)
        if say is not None and now >= began + SAY_SECONDS:
            last = text.strip().rpartition("\n")[2]
            said = f": {last}" if last else ", and says nothing"
            say(f"the engine still starts the containers, after {now - began:.0f} s{said}")
            say = None


def _said_by(late: subprocess.TimeoutExpired) -> str:
    """What was printed until now, which is bytes here whatever was asked for."""
    parts = (late.stdout, late.stderr)
    return "".join(p.decode(errors="replace") if isinstance(p, bytes) else p or "" for p in parts)


def _late(words: Sequence[str], late: subprocess.TimeoutExpired) -> SpartitoError:
    """The error for a command that did not end: the engine's own, where it said one."""
    text = late.output or ""
    if errors_in(text):
        found = complaint(text)
        if isinstance(found, UserError):
            return found
        said = f": {errors_in(text)[-1]}"
    else:
        said = ""
    return LateError(
        f"{' '.join(words[:3])} did not end within {late.timeout:g} s{said}",
        f"Does the engine still run, and start a container? Try: {words[0]} ps",
    )


def errors_in(text: str) -> list[str]:
    """The lines with which an engine or its composer says that something failed."""
    return [line.strip() for line in text.splitlines() if FAILS.match(line.strip())]


def complaint(text: str) -> SpartitoError:
    """The error that the engine's words ``text`` mean."""
    low = text.lower()
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    # The composer of old ends with a line that only says that there were errors.
    causes = [line for line in lines if line.startswith("ERROR: ")] or lines
    said = causes[-1].removeprefix("ERROR: ") if causes else "it said nothing"
    for signs, what, do in COMPLAINTS:
        for sign in (signs,) if isinstance(signs, str) else signs:
            if sign in low:
                # The engine warns of its own settings before it says what went wrong.
                said = [line for line in lines if sign in line.lower()][-1]
                return UserError(f"{what}: {said}", do)
    return SpartitoError(f"the container engine failed: {said}")


def _works(words: Sequence[str], limit: float = ASK_SECONDS) -> bool:
    try:
        call(words, limit)
    except SpartitoError:
        return False
    return True
