"""The doctor of a compose file: what it makes of the file, and what it finds in real containers."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from spartito.doctor.launch.containers import doctor_document, doctor_job
from spartito.launch.containers.compose import compose_file
from spartito.launch.containers.file import read_job
from tests.launch.containers import LIMIT, SPARTITO, Job, docker
from tests.launch.jobs import plan_containers

Make = Callable[..., Job]
OPTIONS: list[dict[str, Any]] = [
    {"workers": 2},
    {"workers": 2, "cpus": "0.25,1", "memory": "512m"},
    {"workers": 1, "ps": 2, "evaluator": True},
    {"workers": 2, "host_network": True, "share_ipc": True, "strategy": "central_storage"},
    {"workers": 2, "gpus": True},
]
KEPT = (
    "image",
    "environment",
    "networks",
    "network_mode",
    "volumes",
    "cpus",
    "mem_limit",
    "shm_size",
    "ipc",
    "hostname",
    "user",
    "init",
    "read_only",
    "tmpfs",
    "cap_drop",
    "security_opt",
    "working_dir",
    "deploy",
)


def job_of(folder: Path, **options: Any) -> Path:
    path = folder / "compose.yaml"
    path.write_text(compose_file(plan_containers("mnist", **options)))
    return path


@pytest.mark.parametrize("options", OPTIONS)
def test_every_task_is_examined_in_its_own_container(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    given = yaml.safe_load(job_of(tmp_path, **options).read_text())
    made = doctor_document(given, 7.5)
    assert list(made["services"]) == list(given["services"])
    for name, service in made["services"].items():
        assert service["command"] == [
            "python",
            "-m",
            "spartito",
            "doctor",
            "--no-config",
            "--timeout=7.5",
        ]
        assert (service["restart"], service["healthcheck"]) == ("no", {"disable": True})
        assert "depends_on" not in service
        for key in KEPT:
            assert service.get(key) == given["services"][name].get(key), key
    for key in ("networks", "volumes"):
        assert made.get(key) == given.get(key)


def test_the_job_of_the_doctor_has_another_name_and_no_anchors(tmp_path: Path) -> None:
    job = doctor_job(read_job(job_of(tmp_path, workers=2)), 10.0, True)
    assert job.name == "mnist-doctor"
    read = yaml.safe_load(job.text)
    assert read["services"] == job.services
    assert not [key for key in read if key == "name" or key.startswith("x-")]
    assert job.services["worker-1"]["command"][-1] == "--json"


def test_what_would_meet_the_running_job_is_left_out() -> None:
    service = {
        "image": "spartito",
        "container_name": "mine",
        "ports": ["8080:80"],
        "depends_on": {"b": {"condition": "service_healthy"}},
        "networks": ["own", "other"],
    }
    given: dict[str, Any] = {
        "name": "job",
        "services": {"a": service},
        "networks": {"own": {"name": "fast", "driver": "bridge"}, "other": {"external": True}},
        "volumes": {"snapshots": None, "kept": {"external": True, "name": "disk"}},
    }
    made = doctor_document(given, 10.0)
    assert set(made["services"]["a"]) == {
        "image",
        "command",
        "restart",
        "healthcheck",
        "networks",
    }
    assert made["networks"] == {"own": {"driver": "bridge"}, "other": {"external": True}}
    assert made["volumes"] == given["volumes"]
    assert given["services"]["a"]["ports"] == ["8080:80"]


def test_workers_and_a_file_exclude_each_other(tmp_path: Path) -> None:
    words = ["doctor", "--workers", "2", "--compose", str(tmp_path / "compose.yaml")]
    done = subprocess.run([*SPARTITO, *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "--workers and --compose exclude each other" in done.stderr


def examine(job: Job, *words: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [*SPARTITO, "doctor", "--compose", str(job.file), *words],
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    mine = f"label=com.docker.compose.project={job.name}-doctor"
    for kind in ("ps --all", "network ls", "volume ls"):
        assert docker(*kind.split(), "--quiet", "--filter", mine) == ""
    return done


@pytest.mark.docker
def test_what_a_container_may_use_is_seen_from_inside(container_job: Make) -> None:
    job = container_job("--workers", "2", "--cpus", "0.5,1", "--memory", "640m")
    done = examine(job, "--json", "--timeout=60")
    found = json.loads(done.stdout)
    assert (done.returncode, found["exit_code"]) == (0, 0), done.stderr
    first, second = (found["facts"][f"worker {index}"] for index in range(2))
    assert (first["quota"], second["quota"]) == (0.5, 1.0)
    assert first["memory"]["limit"] == second["memory"]["limit"] == 640 << 20
    assert first["shm"]["size"] == 1 << 30
    assert first["host"] == "worker-0"
    assert first["cpus"] != second["cpus"]
    assert first["ipc"] != second["ipc"]
    assert first["machine"] == second["machine"]
    assert all(speed["bandwidth"] < 1e11 for speed in found["speeds"])
    assert abs(found["speeds"][0]["clock"]) < 1.0
    assert not job.run_folder.exists()
    assert not job.run_folder.parent.exists()


@pytest.mark.docker
def test_a_task_whose_container_cannot_run_the_doctor(container_job: Make) -> None:
    job = container_job("--workers", "2")
    document = yaml.safe_load(job.file.read_text())
    document["services"]["worker-1"]["entrypoint"] = ["python", "-c", "raise SystemExit('no')"]
    job.file.write_text(yaml.safe_dump(document))
    done = examine(job, "--timeout=5")
    assert done.returncode == 69
    assert "worker 1 (worker-1:29500) did not come" in done.stdout


@pytest.mark.docker
def test_an_image_that_is_missing_is_told_before_anything_starts(container_job: Make) -> None:
    job = container_job("--workers", "2", "--image=spartito-nowhere")
    done = examine(job)
    assert done.returncode == 2
    assert "there is no image 'spartito-nowhere'" in done.stderr
    assert docker("ps", "-aq", "--filter", f"name={job.name}") == ""


@pytest.fixture
def other_version(image: str) -> Iterator[str]:
    """An image that says that it holds another Spartito."""
    change = "sed -i 's/^Version: .*/Version: 9.9.9/' /opt/package/spartito-*.dist-info/METADATA"
    file = f"FROM {image}\nUSER root\nRUN {change}\nLABEL spartito.version=9.9.9\nUSER 1000:1000\n"
    tag = f"{image}-other"
    words = ["docker", "build", "--tag", tag, "-"]
    subprocess.run(words, input=file, text=True, capture_output=True, timeout=LIMIT, check=True)
    yield tag
    docker("image", "rm", "--force", tag)


LISTENS = """
import json, os, signal, socket
if json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 0:
    listener = socket.create_server(("", 29500))
print("is here", flush=True)
signal.pause()
"""


@pytest.mark.docker
def test_a_running_job_goes_on_and_what_is_wrong_is_told(
    container_job: Make, other_version: str
) -> None:
    job = container_job("--workers", "2", "--host-network", "--share-ipc", script=LISTENS)
    document = yaml.safe_load(job.file.read_text())
    document["services"]["worker-1"]["image"] = other_version
    job.file.write_text(yaml.safe_dump(document))
    following = job.start("up")
    for _ in range(2):
        following.until("is here")
    done = examine(job, "--json", "--timeout=60")
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"note: the image {other_version} holds Spartito 9.9.9" in done.stderr
    found = json.loads(done.stdout)
    assert found["facts"]["worker 0"]["ipc"] == found["facts"]["worker 1"]["ipc"]
    said = json.dumps(found["verdicts"])
    assert "port 29500 of worker 0" in said
    assert "is taken by" in said
    assert "the tasks have different versions of spartito: " in said
    assert "9.9.9 on worker 1" in said
    code, text = job.does("status")
    assert (code, text.count("running")) == (0, 2), text
