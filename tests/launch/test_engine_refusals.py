"""Jobs that cannot run: a clear error from the real engine, and nothing of them is left."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from spartito.launch.containers.compose import TMP
from tests.commands import eventually
from tests.launch.containers import IMAGE, LIMIT, ROOT, SPARTITO, Job, docker
from tests.skips import skip

pytestmark = pytest.mark.docker

Make = Callable[..., Job]
ENDLESS = """
import pathlib, signal
pathlib.Path("/runs/kept").touch()
print("is here", flush=True)
signal.pause()
"""
NOBODY = 65534


def up(job: Job, *before: str, **environment: str) -> tuple[int, str]:
    """`cluster up` in another environment, or with words ``before`` it."""
    done = subprocess.run(
        [*before, *SPARTITO, "cluster", "up", str(job.file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT,
        env={**os.environ, **environment},
    )
    assert "Traceback" not in done.stdout
    return done.returncode, done.stdout


@contextmanager
def container_named(name: str) -> Iterator[None]:
    docker("create", "--name", name, IMAGE, "true")
    try:
        yield
    finally:
        docker("rm", name)


def test_an_engine_that_does_not_run(container_job: Make) -> None:
    job = container_job("--workers", "2")
    for address in ("unix:///run/no-engine.sock", "tcp://127.0.0.1:9"):
        code, text = up(job, DOCKER_HOST=address)
        assert code == 2
        assert "the container engine does not run" in text
        assert address in text


def test_no_right_to_the_engine(container_job: Make) -> None:
    if os.getuid() != 0 or shutil.which("setpriv") is None:
        skip("root", "only root can be somebody else, by setpriv")
    job = container_job("--workers", "2")
    for folder in (job.folder, *job.folder.parents):
        if folder.name.startswith(("job-", "test_", "popen-", "pytest-")):  # pytest's and ours
            folder.chmod(0o755)
    somebody = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    looks = subprocess.run([*somebody, "cat", str(job.file)], capture_output=True, timeout=60)
    if looks.returncode or subprocess.run([*somebody, sys.executable, "-c", ""]).returncode:
        skip("case", "nobody cannot read the folder of tests, or start this Python")
    code, text = up(job, *somebody)
    assert code == 2
    assert "no right to use the container engine" in text
    assert "connect to the Docker daemon" in text


def test_docker_without_a_composer(container_job: Make, tmp_path: Path) -> None:
    found = shutil.which("docker")
    assert found is not None
    alone = tmp_path / "bin"
    alone.mkdir()
    (alone / "docker").symlink_to(found)
    if not subprocess.run([found, "compose", "version"], capture_output=True).returncode:
        skip("composer", "this docker has compose built in")
    code, text = up(container_job("--workers", "2"), PATH=str(alone))
    assert code == 2
    assert "this docker has no compose" in text


def test_an_image_that_is_missing(container_job: Make) -> None:
    job = container_job("--workers", "2", "--image", "spartito-nowhere:1")
    code, text = job.does("up")
    assert code == 2
    assert "there is no image 'spartito-nowhere:1'" in text
    assert job.remains == []


def test_a_container_of_another_that_has_the_name(container_job: Make) -> None:
    job = container_job("--workers", "2", script=ENDLESS)
    with container_named(f"{job.name}_worker-1_1"), container_named(f"{job.name}-worker-1-1"):
        code, text = job.does("up")
    assert code == 2
    assert "a container of this name is there already" in text
    assert job.remains == []


def test_a_port_that_is_taken_on_the_machines_network(container_job: Make) -> None:
    job = container_job("--workers", "2", "--host-network")
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        job.file.write_text(job.file.read_text().replace(":29500", f":{port}"))
        code, text = job.does("up")
    assert code == 2
    assert f"worker-0 cannot listen on port {port}" in text
    assert job.remains == []


def test_a_data_folder_that_went_away(container_job: Make, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    job = container_job("--workers", "2", "--data", str(data))
    data.rmdir()
    code, text = job.does("up")
    assert code == 2
    assert f"mounts {data}, which is no folder" in text
    assert job.remains == []


def test_a_limit_that_the_engine_cannot_keep(container_job: Make) -> None:
    code, text = (job := container_job("--workers", "2", "--cpus", "4096")).does("up")
    assert code == 2
    assert "a limit that the engine cannot keep" in text
    assert job.remains == []


LARGE_MODEL = """
import torch
import spartito as sp
net = torch.nn.Linear(4096, 5120, bias=False)
sp.Trainer(net, optimizer=torch.optim.Adam(net.parameters()), loss=torch.nn.MSELoss())
"""


def test_a_model_that_the_memory_limit_does_not_hold(container_job: Make) -> None:
    job = container_job("--workers", "1", "--memory", "400m", script=LARGE_MODEL)
    code, text = job.does("up")
    assert code == 2, text
    assert "the model is too large for the memory: 20,971,520 parameters" in text
    assert "240 MiB more for gradients and Adam" in text
    assert "of 400 MiB are in use" in text
    assert job.remains == []


HUNGRY = """
import json, os, subprocess, sys, time
eat = "x = []\\nwhile True: x.append(bytearray(b'x' * (16 << 20)))"
if json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 1:
    OUT
time.sleep(1000)
"""


@pytest.mark.parametrize(
    ("way", "code"),
    [("exec(eat)", 69), ("sys.exit(7 if subprocess.run([sys.executable, '-c', eat]) else 8)", 7)],
)
def test_a_task_or_its_child_that_runs_out_of_memory_is_named(
    container_job: Make, way: str, code: int
) -> None:
    script = HUNGRY.replace("OUT", way)
    job = container_job("--workers", "2", "--memory", "400m", script=script)
    found, text = job.does("up")
    assert found == code, text
    assert "worker 1 ran out of memory, its limit is 400m" in text
    assert job.remains == []


def test_down_removes_what_a_killed_up_has_left(container_job: Make) -> None:
    job = container_job("--workers", "2", "--ps", "1", script=ENDLESS)
    following = job.start("up")
    for _ in range(3):
        following.until("is here")
    following.popen.kill()
    following.popen.wait()
    assert job.remains
    code, text = job.does("up")
    assert code == 2
    assert f"there is a job {job.name} already: 3 containers, 3 running" in text
    assert job.does("down")[0] == 0
    assert job.remains == []
    assert (job.run_folder / "kept").is_file()


def test_down_removes_what_an_up_has_left_that_was_killed_at_its_start(container_job: Make) -> None:
    job = container_job("--workers", "2", script=ENDLESS)
    following = job.start("up")
    assert eventually(lambda: bool(job.remains), LIMIT)
    following.popen.kill()
    following.popen.wait()
    # The composer may go on for a moment without us, and the engine without the composer.
    composing = ["pgrep", "--full", f"project-name {job.name}"]
    over = lambda: subprocess.run(composing, capture_output=True).returncode == 1  # noqa: E731
    assert eventually(over, LIMIT)
    assert eventually(lambda: job.does("down")[0] == 0 and not job.remains, LIMIT)
    assert job.run_folder.is_dir()


def test_a_base_image_that_cannot_be_fetched(image: str) -> None:
    words = ["cluster", "image", str(ROOT), "--tag", "spartito-none", "--base", "localhost:9/none"]
    done = subprocess.run([*SPARTITO, *words], capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 2
    assert "the base image localhost:9/none is not on this machine" in done.stderr


def based(image: str, change: str) -> subprocess.CompletedProcess[str]:
    """How the build's first stage ends on ``image`` with a ``change``; the folder is not sent."""
    tag = f"spartito-test-base-{secrets.token_hex(4)}"
    file = f"FROM {image}\nUSER root\nRUN {change}\n"
    subprocess.run(
        ["docker", "build", "--quiet", "--tag", tag, "-"],
        input=file,
        text=True,
        capture_output=True,
        timeout=LIMIT,
        check=True,
    )
    try:
        stage = (ROOT / "docker" / "Dockerfile").read_text().partition("\nFROM base AS system")[0]
        assert "FROM ${BASE} AS base" in stage
        words = ["docker", "build", "--quiet", "--force-rm", "--build-arg", f"BASE={tag}", "-"]
        return subprocess.run(words, input=stage, text=True, capture_output=True, timeout=LIMIT)
    finally:
        docker("rmi", "--no-prune", tag)


def test_a_base_that_has_user_1000_already(image: str) -> None:
    done = based(image, "userdel spartito && useradd --uid 1000 --create-home somebody")
    assert done.returncode == 0, done.stderr
    built = done.stdout.strip()
    try:
        told = docker(
            "run", "--rm", "--user", "1000:1000", built, "sh", "-c", "id -un; touch /runs/x"
        )
        assert told == "somebody\n"
    finally:
        docker("rmi", built)


def test_a_base_that_cannot_be_is_told_before_the_long_steps(image: str) -> None:
    done = based(image, "rm -rf $(python3 -c 'import ensurepip; print(ensurepip.__path__[0])')")
    assert done.returncode != 0
    assert "No module named 'ensurepip'" in done.stdout + done.stderr


def test_code_that_torch_compile_writes_can_be_loaded(image: str) -> None:
    program = "cp /bin/true /tmp/true && exec /tmp/true"
    words = ["run", "--rm", "--read-only", "--user", "1000:1000", "--tmpfs", TMP, image]
    docker(*words, "sh", "-c", program)
