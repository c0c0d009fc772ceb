"""Jobs in real containers, of an image that holds the sources as they are now."""

from __future__ import annotations

import fcntl
import io
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from contextlib import chdir, redirect_stdout
from pathlib import Path
from typing import Any

from spartito.cli import main
from tests.commands import LEAN, eventually
from tests.skips import need, skip

IMAGE, BUILT = "spartito-test", "spartito-test-built"
LEANER = f"FROM {BUILT}\nCOPY *.py /lean/\nENV PYTHONPATH=/lean\n"
"""The image as it is built, but for the compiler that each task would import for nothing."""

BASE = "spartito-base"
"""What ``scripts/engine`` makes where no image can be fetched."""

LIMIT = 240.0
SPARTITO = (sys.executable, "-m", "spartito")
ROOT = Path(__file__).parents[2]


def docker(*words: str) -> str:
    """What the engine prints."""
    done = subprocess.run(["docker", *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, f"docker {' '.join(words)}: {done.stderr}"
    return done.stdout


def need_image() -> str:
    """The image for tests, built when this is called; skips where there is no engine."""
    need("docker")
    if shutil.which("docker") is None:
        skip("docker", "there is no docker command here")
    asked = subprocess.run(["docker", "version"], capture_output=True, text=True, timeout=60)
    if asked.returncode:
        skip("docker", f"no container engine runs: {asked.stderr.strip().splitlines()[-1]}")
    if not docker("image", "ls", "--quiet", "spartito").strip():
        skip("docker", "no image 'spartito' to begin with; build it: spartito cluster image")
    base = ["--base", BASE] if docker("image", "ls", "--quiet", BASE).strip() else []
    with (Path(tempfile.gettempdir()) / f"{IMAGE}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # whoever comes second finds all layers made
        build([*SPARTITO, "cluster", "image", str(ROOT), "--tag", BUILT, "--network=host", *base])
        build(["docker", "build", "--tag", IMAGE, "--file=-", str(LEAN)], LEANER)
    return IMAGE


def build(words: list[str], given: str | None = None) -> None:
    done = subprocess.run(words, input=given, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


class Job:
    """A job in containers, in a folder of its own; ``words`` are those of `cluster compose`.

    Its tasks run the recipe mnist; with ``script``, a script of this text. That may wait at
    the job's gate: read a byte of /scripts/gate.
    """

    def __init__(self, folder: Path, *words: str, script: str | None = None) -> None:
        self.folder = folder
        self.name = f"test-{secrets.token_hex(4)}"
        self.file = folder / "compose.yaml"
        self._gate = -1
        self._started: list[subprocess.Popen[str]] = []
        if script is not None:
            folder.chmod(0o755)  # the containers' user reads it
            (folder / "train.py").write_text(script)
            os.mkfifo(folder / "gate")
            self._gate = os.open(folder / "gate", os.O_RDWR)
        target = "mnist" if script is None else "train.py"
        names = [f"--name={self.name}", f"--image={IMAGE}"]
        with chdir(folder), redirect_stdout(io.StringIO()) as made:
            assert main(["cluster", "compose", target, *names, *words]) == 0
        self.file.write_text(made.getvalue())

    @property
    def run_folder(self) -> Path:
        return self.folder / "runs" / self.name

    @property
    def history(self) -> list[dict[str, Any]]:
        """A row per epoch."""
        return [json.loads(x) for x in (self.run_folder / "history.jsonl").read_text().splitlines()]

    def start(self, *words: str) -> Following:
        popen = subprocess.Popen(
            [*SPARTITO, "cluster", *words, str(self.file)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._started.append(popen)
        return Following(popen)

    def does(self, *words: str) -> tuple[int, str]:
        """The exit code of a command, and what it printed."""
        return self.start(*words).end()

    def open_gate(self, count: int) -> None:
        """Let ``count`` tasks pass, now or when they come."""
        os.write(self._gate, bytes(count))

    def container(self, service: str) -> str:
        mine = ["--filter", f"label=com.docker.compose.project={self.name}"]
        that = ["--filter", f"label=com.docker.compose.service={service}"]
        return docker("ps", "-aq", *mine, *that).strip()

    def crash(self, service: str) -> None:
        """Kill what runs in the container, as a fault of its own would."""
        # The first process is the init; the oldest other one is the task. The container ends
        # with it, and mostly takes this command along: its exit code says nothing.
        words = ["docker", "exec", self.container(service), "python", "-c", KILL]
        subprocess.run(words, capture_output=True, timeout=60)

    def codes(self) -> list[int]:
        """The exit codes with which its containers have ended so far, restarts included."""
        mine = f"label=com.docker.compose.project={self.name}"
        # The engine cuts times off to seconds: what ended in the present one is before the next.
        words = ["--since=1h", "--until=-1s", "--filter", mine, "--filter", "event=die"]
        return [int(code) for code in docker("events", *words, "--format", EXIT_CODE).split()]

    def pause(self, service: str) -> None:
        """Freeze the container."""

        def frozen() -> bool:
            words = ["docker", "pause", self.container(service)]
            done = subprocess.run(words, capture_output=True, text=True, timeout=60)
            # The engine gives up where the kernel needs long to catch a busy process.
            assert done.returncode == 0 or "unable to freeze" in done.stderr, done.stderr
            return done.returncode == 0

        assert eventually(frozen, 60.0)

    def unpause(self, service: str) -> None:
        """Let it go on."""
        docker("unpause", self.container(service))

    def cut(self, service: str) -> None:
        """Take the container off the network."""
        docker("network", "disconnect", f"{self.name}_job", self.container(service))

    def rejoin(self, service: str) -> None:
        """Put it back."""
        network = f"{self.name}_job"
        docker("network", "connect", "--alias", service, network, self.container(service))

    @property
    def remains(self) -> list[str]:
        """What of the job the engine still has."""
        mine = f"label=com.docker.compose.project={self.name}"
        found = [
            docker(*words, "--filter", mine)
            for words in (("ps", "-aq"), ("network", "ls", "-q"), ("volume", "ls", "-q"))
        ]
        return "".join(found).split()

    def close(self) -> None:
        """End all of it, whatever state it is in."""
        if self._gate >= 0:
            os.close(self._gate)  # who waits there goes on, and can end
        if self.remains:
            self.does("down")
        for popen in self._started:
            if popen.poll() is None:
                popen.kill()
            popen.wait()
            assert popen.stdout is not None
            popen.stdout.close()


EXIT_CODE = "{{.Actor.Attributes.exitCode}}"

KILL = """
import os, pathlib
for one in sorted(int(p.name) for p in pathlib.Path("/proc").iterdir() if p.name.isdigit()):
    words = pathlib.Path(f"/proc/{one}/cmdline").read_bytes()
    if one != os.getpid() and words.startswith(b"python"):
        os.kill(one, 9)
        break
"""


class Following:
    """A running command, and all that it has printed so far."""

    def __init__(self, popen: subprocess.Popen[str]) -> None:
        self.popen = popen
        self.seen: list[str] = []

    def until(self, *signs: str) -> None:
        """Read on until each of ``signs`` was in a line; the test's time limit ends the wait.

        They may come in any order, as the lines of several tasks do.
        """
        assert self.popen.stdout is not None
        missing = set(signs)
        try:
            for line in self.popen.stdout:
                self.seen.append(line)
                missing -= {sign for sign in missing if sign in line}
                if not missing:
                    return
            raise AssertionError(f"it ended without {sorted(missing)}")
        finally:
            if missing:
                print("".join(self.seen))

    def end(self) -> tuple[int, str]:
        """Its exit code, and all that it printed; the test's time limit ends the wait."""
        assert self.popen.stdout is not None
        self.seen.extend(self.popen.stdout)
        return self.popen.wait(), "".join(self.seen)
