from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from spartito.errors import SpartitoError
from spartito.launch.containers.compose import compose_file
from spartito.launch.containers.engine import SERVICE, Engine
from spartito.launch.containers.file import JobFile, read_job
from tests.launch.containers import Job, docker
from tests.launch.jobs import plan_containers
from tests.skips import skip

SLEEPS = """
import signal
print("is here", flush=True)
signal.pause()
"""


@pytest.mark.docker
def test_a_job_that_shares_memory_and_is_taken_down_by_somebody_else(
    container_job: Callable[..., Job],
) -> None:
    two = container_job("--workers", "2", "--share-ipc", "--", "--epochs=1000")
    following = two.start("up")
    following.until("epoch 1/")
    look = "cat /proc/[0-9]*/maps; true"
    for name in ("worker-0", "worker-1"):
        assert "/dev/shm/spartito-" in docker("exec", two.container(name), "sh", "-c", look)
    assert two.does("down")[0] == 0
    code, text = following.end()
    # Who looks in time sees that a task was told to end; later, that one is gone, or was killed.
    assert code in (75, 69), text
    assert any(words in text for words in ("was told to end", "is gone", "was killed by")), text
    assert "engine failed" not in text
    assert two.remains == []


@pytest.mark.docker
def test_a_detached_job_is_there_until_it_is_taken_down(container_job: Callable[..., Job]) -> None:
    two = container_job("--workers", "2", script=SLEEPS)
    code, text = two.does("up", "--detach")
    assert code == 0, text
    code, text = two.does("status")
    assert (code, text.count("running")) == (0, 2), text
    two.start("logs", "--follow").until("[worker 0] is here")
    code, text = two.does("up")
    assert code == 2
    assert f"there is a job {two.name} already" in text
    assert two.does("down")[0] == 0
    assert two.remains == []
    assert two.does("status")[0] == 2


@pytest.mark.docker
@pytest.mark.slow
@pytest.mark.night
def test_models_in_parts_learn_the_same_in_containers(container_job: Callable[..., Job]) -> None:
    told = []
    for strategy in ("multi_worker_mirrored", "mesh", "sharded", "pipeline"):
        own = ("--strategy", strategy, "--workers", "2")
        job = container_job(*own, "--", "--epochs=1", "--batch-size=500")
        code, text = job.does("up")
        assert code == 0, text
        told.append(job.history[0]["loss"])
        assert job.does("down")[0] == 0
    assert max(told) - min(told) < 1e-4


WITHOUT_PLUGIN = """#!/bin/sh
[ "$1" = compose ] && exit 1
exec {docker} "$@"
"""


@pytest.mark.docker
@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"groups": 2, "every": 20},
        pytest.param(
            {"groups": [[0], [1], [2, 3]], "sites": [[0, 1], [2]], "every": [20, 100]},
            marks=pytest.mark.night,
        ),
    ],
    ids=["groups", "sites"],
)
def test_groups_meet_in_containers(
    container_job: Callable[..., Job], options: dict[str, object]
) -> None:
    told = f"--strategy-options={json.dumps(options)}"
    job = container_job("--strategy=local_sgd", told, "--workers=4", "--", "--epochs=1")
    code, text = job.does("up")
    assert code == 0, text
    (epoch,) = job.history
    assert epoch["meetings"] == 7  # of 125 updates
    assert epoch.get("meetings_of_sites", 2) == 2
    assert epoch["val_accuracy"] > 0.7


@pytest.mark.docker
@pytest.mark.parametrize("composer", ["docker-compose", "docker compose"])
def test_either_composer_runs_a_job(
    container_job: Callable[..., Job],
    composer: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = shutil.which("docker")
    assert real is not None
    there = shutil.which(composer.split()[0]) is not None
    if not there or subprocess.run([*composer.split(), "version"], capture_output=True).returncode:
        skip("composer", f"no '{composer}' on this machine")
    if composer == "docker-compose":  # even where the plugin is there as well
        wrapper = tmp_path / "docker"
        wrapper.write_text(WITHOUT_PLUGIN.format(docker=real))
        wrapper.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert Engine.find().compose[-1].endswith(composer.rpartition(" ")[2])
    code, text = container_job(script="print('ran to its end')").does("up")
    assert (code, "ran to its end" in text) == (0, True), text


PASSES = "import os; os.read(os.open('/scripts/gate', os.O_RDONLY), 1)"


@pytest.mark.docker
def test_the_end_of_a_detached_job_can_be_waited_for(container_job: Callable[..., Job]) -> None:
    two = container_job("--workers", "2", script=PASSES)
    code, text = two.does("up", "--detach")
    assert (code, f"the run folder is {two.run_folder}" in text) == (0, True), text
    limits = json.loads(docker("inspect", two.container("worker-1")))[0]["HostConfig"]
    assert limits["PidsLimit"] == 4096
    assert limits["LogConfig"]["Config"] == {"max-size": "20m", "max-file": "5"}
    assert limits["Tmpfs"] == {"/tmp": "exec,size=1g"}
    waiting = two.start("wait")
    two.open_gate(2)
    code, text = waiting.end()
    assert (code, text) == (0, f"spartito: the run folder is {two.run_folder}\n")
    code, text = two.does("status")
    assert (code, text.splitlines()[-1]) == (0, f"{two.name} has ended: all is well"), text
    assert "healthy" not in text


COMPOSER = """#!/bin/sh
echo >> {calls}
[ $(wc -l < {calls}) -gt {failing} ] && exit
echo "ERROR: No such container: 1a2b3c" >&2
exit 1
"""


LISTING = """#!/bin/sh
[ "$4" = --no-trunc ] || echo {left}  # that asks what runs, which is nothing
"""


WORKER = {"Config": {"Labels": {SERVICE: "worker-0"}}}

STOPPING = """#!/bin/sh
case $1 in
inspect) echo '{found}' ;;
stop) touch {stopping}; echo "Error: No such container: x" >&2; exit 1 ;;
*) echo x ;;
esac
"""


def composed(folder: Path, failing: int, left: str) -> tuple[Engine, JobFile, Path]:
    """An engine that still has ``left``, with a composer whose first calls fail."""
    (folder / "compose.yaml").write_text(compose_file(plan_containers("mnist", workers=2)))
    calls, programs = folder / "calls", [folder / "docker", folder / "composer"]
    texts = [LISTING.format(left=left), COMPOSER.format(calls=calls, failing=failing)]
    for program, text in zip(programs, texts, strict=True):
        program.write_text(text)
        program.chmod(0o755)
    engine = Engine(str(programs[0]), (str(programs[1]),))
    return engine, read_job(folder / "compose.yaml"), calls


@pytest.mark.parametrize(("failing", "left", "tries"), [(0, "x", 1), (1, "x", 2), (1, "", 1)])
def test_what_another_removes_at_the_same_time(
    tmp_path: Path, failing: int, left: str, tries: int
) -> None:
    engine, job, calls = composed(tmp_path, failing, left)
    engine.down(job)
    assert calls.read_text().count("\n") == tries


def test_what_another_removes_while_it_is_asked_to_stop(tmp_path: Path) -> None:
    engine, job, calls = composed(tmp_path, 1, "x")
    stopping = tmp_path / "stopping"
    found = json.dumps([{"Id": "x", "State": {"Status": "running", "ExitCode": 0}} | WORKER])
    (tmp_path / "docker").write_text(STOPPING.format(found=found, stopping=stopping))
    engine.down(job)
    assert stopping.exists()
    assert calls.read_text().count("\n") == 2


def test_what_cannot_be_removed(tmp_path: Path) -> None:
    engine, job, _ = composed(tmp_path, 2, "x")
    with pytest.raises(SpartitoError, match="No such container"):
        engine.down(job)
