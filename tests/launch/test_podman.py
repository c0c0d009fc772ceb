"""Jobs that Podman runs, and which engine is taken."""

from __future__ import annotations

import json
import os
import resource
import secrets
import shutil
import subprocess
from contextlib import chdir
from pathlib import Path

import pytest

from spartito.cli import main
from spartito.errors import UserError
from spartito.launch.containers.engine import Engine
from spartito.launch.containers.watch import STAMP
from tests.launch.containers import SPARTITO
from tests.skips import need, skip

RUNTIME = "SPARTITO_TEST_PODMAN_RUNTIME"
"""Which runtime starts containers here, where Podman's usual one does not: `scripts/trials`."""

IMAGE = "localhost/spartito"
LIMIT = 280.0
DIGITS = ("--epochs=1", "--batch-size=64", "--seed=3")


def podman(*words: str) -> str:
    done = subprocess.run(["podman", *words], capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, f"podman {' '.join(words)}: {done.stderr}"
    return done.stdout


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Podman, with the image that Docker has."""
    need("podman")
    for command in ("podman", "podman-compose", "docker"):
        if shutil.which(command) is None:
            skip("podman", f"there is no {command} command here")
    # Root's containers get more than this process may have, where it may not raise its limits.
    most = [min(resource.getrlimit(one)[1], 10_000) for one in _LIMITS.values()]
    limits = [f"{name}={n}:{n}" for name, n in zip(_LIMITS, most, strict=True)]
    file = tmp_path / "containers.conf"
    text = f"[containers]\ndefault_ulimits = {json.dumps(limits)}\n"
    if runtime := os.environ.get(RUNTIME):
        text += f"[engine]\nruntime = {json.dumps(runtime)}\n"
    file.write_text(text)
    monkeypatch.setenv("CONTAINERS_CONF", str(file))
    monkeypatch.setenv("SPARTITO_ENGINE", "podman")
    ask = ["docker", "image", "inspect", "--format", "{{.Id}}", "spartito"]
    asked = subprocess.run(ask, capture_output=True, text=True, timeout=60)
    if asked.returncode:
        skip("podman", "Docker has no image 'spartito' to give it")
    number = asked.stdout.strip().removeprefix("sha256:")
    if number not in podman("image", "ls", "--quiet", "--no-trunc"):
        with subprocess.Popen(["docker", "save", "spartito"], stdout=subprocess.PIPE) as saved:
            subprocess.run(["podman", "load", "--quiet"], stdin=saved.stdout, timeout=LIMIT)


_LIMITS = {"nofile": resource.RLIMIT_NOFILE, "nproc": resource.RLIMIT_NPROC}


@pytest.mark.docker
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("engine")
def test_podman_runs_digits_on_two_workers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"test-{secrets.token_hex(4)}"
    words = ["mnist", "--workers=2", f"--image={IMAGE}", f"--name={name}", "--", *DIGITS]
    with chdir(tmp_path):
        assert main(["cluster", "compose", *words]) == 0
    file = tmp_path / "compose.yaml"
    file.write_text(capsys.readouterr().out)
    up = [*SPARTITO, "cluster", "up", str(file)]
    done = subprocess.run(up, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not STAMP.search(done.stdout.encode())
    (epoch,) = (tmp_path / "runs" / name / "history.jsonl").read_text().splitlines()
    assert json.loads(epoch)["val_accuracy"] > 0.8
    mine = ["--filter", f"label=com.docker.compose.project={name}"]
    assert podman("ps", "--all", "--quiet", *mine) == ""
    assert podman("network", "ls", "--quiet", "--filter", f"name={name}") == ""


def commands_in(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).write_text("#!/bin/sh\nexit 0\n")
        (folder / name).chmod(0o755)


@pytest.mark.parametrize(
    ("asked", "there", "found"),
    [
        ("", ["docker", "podman", "podman-compose"], "docker compose"),
        ("", ["podman", "podman-compose"], "podman-compose --in-pod=false"),
        ("podman", ["docker", "podman", "podman-compose"], "podman-compose --in-pod=false"),
        ("docker", ["docker", "podman"], "docker compose"),
    ],
)
def test_which_engine_is_taken(
    asked: str, there: list[str], found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands_in(tmp_path, *there)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("SPARTITO_ENGINE", asked)
    words = Engine.find().compose
    assert " ".join([os.path.basename(words[0]), *words[1:]]) == found


@pytest.mark.parametrize(
    ("asked", "there", "told"),
    [
        ("", [], "there is no docker command"),
        ("podman", ["docker"], "there is no podman command"),
        ("docker", ["podman"], "there is no docker command"),
        ("podman", ["podman"], "there is podman, but no podman-compose"),
        ("lxc", ["docker"], "SPARTITO_ENGINE='lxc' is no engine"),
    ],
)
def test_an_engine_that_is_not_here(
    asked: str, there: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands_in(tmp_path, *there)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("SPARTITO_ENGINE", asked)
    with pytest.raises(UserError, match=told):
        Engine.find()
