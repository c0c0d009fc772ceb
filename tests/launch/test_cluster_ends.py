"""How a job in containers ends, and what its engine says."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spartito.declared import Declared
from spartito.errors import SpartitoError, UserError
from spartito.launch.containers.compose import compose_file, machine_files
from spartito.launch.containers.engine import TaskState, call, complaint, state_of
from spartito.launch.containers.file import JobFile, read_job
from spartito.launch.containers.plan import Containers, Network
from spartito.launch.containers.secret import make_secret, write_secret
from spartito.launch.containers.watch import verdict
from spartito.launch.processes.roles import Roles
from tests.launch.jobs import plan_containers
from tests.launch.test_cluster_job import job


def ends(job: JobFile, **ended: tuple[int, int]) -> list[TaskState]:
    """All run but those which ended, as ``worker_0=(code, when)``."""
    found = []
    for name in job.services:
        code, when = ended.get(name.replace("-", "_"), (None, 0))
        status = "running" if code is None else "exited"
        found.append(TaskState(name, name, status, code or 0, finished_at=str(when)))
    return found


SYNCHRONOUS, SERVED = Roles(2, evaluator=True), Roles(2, ps=1, evaluator=True)
DONE = {"worker_0": (0, 1), "worker_1": (0, 1), "evaluator": (0, 1)}


@pytest.mark.parametrize(
    ("roles", "ended", "expected"),
    [
        (SYNCHRONOUS, {}, None),
        (SYNCHRONOUS, {"worker_0": (0, 1), "worker_1": (0, 1)}, None),
        (SYNCHRONOUS, DONE, (0, "worker 0")),
        (SYNCHRONOUS, {"worker_1": (137, 1)}, (69, "worker 1")),
        (SYNCHRONOUS, {"worker_0": (69, 1), "worker_1": (137, 2)}, (69, "worker 1")),
        (SYNCHRONOUS, {"worker_0": (69, 1), "worker_1": (1, 2)}, (1, "worker 1")),
        (SYNCHRONOUS, {"worker_0": (2, 2), "worker_1": (2, 1)}, (2, "worker 1")),
        (SYNCHRONOUS, {"worker_0": (139, 1)}, (139, "worker 0")),
        (SYNCHRONOUS, {"evaluator": (1, 1)}, None),
        (SYNCHRONOUS, {**DONE, "evaluator": (1, 1)}, (0, "worker 0")),
        (SERVED, {"worker_1": (137, 1)}, None),
        (SERVED, {"worker_0": (0, 1)}, None),
        (SERVED, {"worker_0": (0, 1), "evaluator": (0, 1)}, (0, "worker 0")),
        (SERVED, {"worker_0": (137, 1)}, (69, "worker 0")),
        (SERVED, {"ps_0": (137, 1)}, (69, "ps 0")),
        (SERVED, {"ps_0": (0, 1), "worker_1": (0, 1)}, None),
    ],
)
def test_who_decides_how_a_job_ends(
    tmp_path: Path,
    roles: Roles,
    ended: Mapping[str, tuple[int, int]],
    expected: tuple[int, str] | None,
) -> None:
    made = job(tmp_path, roles)
    assert verdict(made, ends(made, **ended)) == expected


def test_a_server_that_was_started_again_too_late_fails_nobody(tmp_path: Path) -> None:
    made = job(tmp_path, SERVED)
    done = {"worker_0": (0, 5), "worker_1": (0, 5), "evaluator": (0, 5)}
    for code, when, starts, expected in (
        (69, 6, 2, (0, "worker 0")),
        (137, 6, 2, (0, "worker 0")),
        (1, 6, 2, (1, "ps 0")),
        (69, 6, 1, (69, "ps 0")),
        (137, 4, 4, (69, "ps 0")),
    ):
        states = ends(made, **done, ps_0=(code, when))
        late = [replace(s, starts=starts) if s.service == "ps-0" else s for s in states]
        assert verdict(made, late) == expected


LATER = {"worker_2": (0, 1), "worker_3": (0, 1), "ps_1": (0, 2)}


@pytest.mark.parametrize(
    ("roles", "machine", "ended", "expected"),
    [
        (Roles(4, ps=2), "b", {}, None),
        (Roles(4, ps=2), "b", {"worker_2": (137, 1)}, None),
        (Roles(4, ps=2), "b", {"worker_2": (0, 1), "worker_3": (0, 1)}, None),
        (Roles(4, ps=2), "b", {"ps_1": (0, 1)}, None),
        (Roles(4, ps=2), "b", LATER, (0, "worker 2")),
        (Roles(4, ps=2), "b", {**LATER, "worker_2": (137, 1)}, (0, "worker 3")),
        (Roles(4, ps=2), "b", {"ps_1": (137, 1)}, (69, "ps 1")),
        (Roles(4, ps=2), "b", {"worker_2": (69, 1), "ps_1": (137, 2)}, (69, "ps 1")),
        (Roles(2, ps=1), "b", {"worker_1": (0, 1)}, (0, "worker 1")),
        (Roles(2, ps=1), "b", {"worker_1": (137, 1)}, (69, "worker 1")),
        (Roles(4, ps=1), "b", {"worker_2": (137, 1)}, None),
        (Roles(4, ps=1), "b", {"worker_2": (2, 2), "worker_3": (1, 1)}, (1, "worker 3")),
        (Roles(4, ps=2), "a", {"worker_1": (137, 1)}, None),
        (Roles(4, ps=2), "a", {"worker_0": (137, 1)}, (69, "worker 0")),
        (Roles(4, ps=2), "a", {"worker_0": (0, 1)}, (0, "worker 0")),
        (Roles(2, ps=1, chief=True), "a", {"worker_0": (137, 1)}, None),
        (Roles(2, ps=1, chief=True), "a", {"chief": (0, 1)}, (0, "chief")),
        (Roles(4), "b", {"worker_2": (137, 1)}, (69, "worker 2")),
        (Roles(4), "b", {"worker_2": (0, 1)}, None),
        (Roles(4), "b", {"worker_2": (0, 1), "worker_3": (0, 1)}, (0, "worker 2")),
    ],
)
def test_who_decides_on_one_machine_of_several(
    tmp_path: Path,
    roles: Roles,
    machine: str,
    ended: Mapping[str, tuple[int, int]],
    expected: tuple[int, str] | None,
) -> None:
    strategy = "parameter_server" if roles.ps else "multi_worker_mirrored"
    network = Network(host=True, machines=("a", "b"))
    plan = Containers(
        "digits", "mnist", ("python",), Declared(strategy), roles, "/out", network=network
    )
    path = tmp_path / "compose.yaml"
    path.write_text(machine_files(plan)[machine])
    made = read_job(path)
    assert {name.replace("-", "_") for name in made.services} >= set(ended)
    assert verdict(made, ends(made, **ended)) == expected


def test_the_secret_is_a_file_for_the_containers_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "compose.yaml"
    path.write_text(compose_file(replace(plan_containers("mnist", workers=2), user="1000:1000")))
    made = make_secret(read_job(path))
    assert made == tmp_path / "mnist.secret"
    assert made.stat().st_mode & 0o777 == 0o600
    if os.getuid() == 0:
        assert (made.stat().st_uid, made.stat().st_gid) == (1000, 1000)
    text = made.read_text()
    assert re.fullmatch("[0-9a-f]{64}\n", text)
    assert make_secret(read_job(path)) is None  # it is there already
    assert made.read_text() == text
    assert text.strip() not in path.read_text()


def test_a_secret_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    path = tmp_path / "compose.yaml"
    path.write_text(compose_file(plan_containers("mnist", workers=2)))
    job = read_job(path)
    path.rename(tmp_path / "elsewhere")
    nowhere = replace(job, path=tmp_path / "elsewhere" / "compose.yaml")
    with pytest.raises(UserError, match=r"the secret .*mnist\.secret cannot be written: Not a dir"):
        make_secret(nowhere)


def test_several_machines_share_the_secret_that_was_written_once(tmp_path: Path) -> None:
    network = Network(host=True, machines=("a", "b"))
    plan = Containers(
        *("digits", "mnist", ("python",), Declared("multi_worker_mirrored"), Roles(2), "/out"),
        network=network,
    )
    path = tmp_path / "a.yaml"
    path.write_text(machine_files(plan)["a"])
    with pytest.raises(UserError, match=r"digits\.secret: all machines of the job need the same"):
        make_secret(read_job(path))
    assert write_secret(tmp_path / "digits.secret")
    assert make_secret(read_job(path)) is None


def test_a_task_alone_needs_no_secret(tmp_path: Path) -> None:
    path = tmp_path / "compose.yaml"
    path.write_text(compose_file(plan_containers("mnist")))
    assert make_secret(read_job(path)) is None
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_does_not_tell_who_is_in_the_job(tmp_path: Path) -> None:
    path = tmp_path / "compose.yaml"
    path.write_text("name: x\nservices: {a: {image: i}, b: {image: i, environment: [A=1]}}")
    made = read_job(path)
    assert (made.leader, made.has_servers) == ("a", False)
    assert verdict(made, ends(made, a=(0, 1))) is None
    assert verdict(made, ends(made, a=(0, 1), b=(3, 1))) == (3, "b")


def test_a_container_that_is_gone_is_a_lost_task(tmp_path: Path) -> None:
    made = job(tmp_path, Roles(2))
    assert verdict(made, ends(made)[:1]) == (69, "worker 1")


@pytest.mark.parametrize(
    ("least", "ended", "again", "expected"),
    [
        (None, {"worker_1": (137, 1)}, 0, None),  # it is started again
        (None, {"worker_1": (137, 1)}, 3, (69, "worker 1")),
        (2, {"worker_1": (137, 1)}, 3, None),
        (3, {"worker_1": (137, 1)}, 3, (69, "worker 1")),
        (2, {"worker_0": (137, 2), "worker_1": (137, 1)}, 3, (69, "worker 1")),
        (None, {"worker_1": (1, 1)}, 0, (1, "worker 1")),
        (None, {"worker_1": (137, 2), "worker_0": (69, 1)}, 0, (69, "worker 0")),
        (None, {"worker_0": (0, 1), "worker_1": (0, 1)}, 0, None),
        (None, {"worker_0": (0, 1), "worker_1": (0, 1), "worker_2": (0, 1)}, 0, (0, "worker 0")),
        (None, {"worker_0": (0, 1), "worker_1": (0, 1), "worker_2": (69, 1)}, 1, (0, "worker 0")),
        (None, {"store": (137, 1)}, 9, None),
    ],
)
def test_who_decides_where_tasks_are_replaced(
    tmp_path: Path,
    least: int | None,
    ended: Mapping[str, tuple[int, int]],
    again: int,
    expected: tuple[int, str] | None,
) -> None:
    path = tmp_path / "compose.yaml"
    options: dict[str, Any] = {} if least is None else {"min_workers": least}
    path.write_text(compose_file(plan_containers("mnist", workers=3, recover=True, **options)))
    made = read_job(path)
    assert made.tasks == ("worker-0", "worker-1", "worker-2")
    assert set(made.services) == {*made.tasks, "store"}
    assert verdict(made, ends(made, **ended), dict.fromkeys(made.tasks, again)) == expected


def test_one_that_the_engine_starts_again_has_not_ended(tmp_path: Path) -> None:
    made = job(tmp_path, SERVED)
    states = ends(made)
    states[2] = TaskState("ps-0", "x", "restarting", 137, starts=2)
    assert verdict(made, states) is None


def test_what_a_container_says_of_itself() -> None:
    inspected: dict[str, Any] = {
        "Id": "abc",
        "RestartCount": 2,
        "Config": {"Labels": {"com.docker.compose.service": "worker-1"}},
        "State": {
            "Status": "exited",
            "ExitCode": 137,
            "OOMKilled": True,
            "FinishedAt": "2026-01-02T03:04:05.12Z",
            "Health": {"Status": "unhealthy"},
        },
    }
    state = state_of(inspected)
    assert (state.name, state.ended, state.code, state.starts) == ("worker 1", True, 137, 3)
    assert (state.health, state.out_of_memory) == ("unhealthy", True)
    later = {**inspected["State"], "FinishedAt": "2026-01-02T03:04:05.123Z"}
    assert state.finished_at < state_of({**inspected, "State": later}).finished_at


@pytest.mark.parametrize(
    ("said", "means"),
    [
        (
            "Got permission denied while trying to connect to the Docker daemon socket at unix://",
            "no right to use the container engine",
        ),
        (
            "Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is it running?",
            "the container engine does not run",
        ),
        (
            "Error response from daemon: driver failed programming external connectivity: "
            "Bind for 0.0.0.0:29500 failed: port is already allocated",
            "a port that the job publishes is taken",
        ),
        (
            'Conflict. The container name "/digits" is already in use by container "1"',
            "a container of this name is there already",
        ),
        ("Error: No such image: spartito", "an image is missing"),
        (
            'could not select device driver "nvidia" with capabilities: [[gpu]]',
            "the engine cannot give GPUs to containers",
        ),
        (
            "Error response from daemon: Minimum memory limit allowed is 6MB",
            "a limit that the engine cannot keep",
        ),
        (
            "podman-compose: error: unrecognized arguments: --in-pod=false",
            "this podman-compose is too old",
        ),
    ],
)
def test_the_engines_complaints_say_what_to_do(said: str, means: str) -> None:
    error = complaint(f"Creating worker-0 ...\n{said}\n")
    assert isinstance(error, UserError)
    what, do = str(error).split("\n")
    assert what == f"{means}: {said}"
    assert do.strip()


def test_a_cause_comes_before_the_composers_last_words() -> None:
    text = "ERROR: for worker-0  no such path\n\nEncountered errors while bringing up the project."
    assert str(complaint(text)).endswith("for worker-0  no such path")


def test_an_unknown_complaint_is_passed_on() -> None:
    error = complaint("Creating ...\nsomething odd\n\n")
    assert not isinstance(error, UserError)
    assert str(error) == "the container engine failed: something odd"


def test_an_engine_that_does_not_end_is_given_up() -> None:
    with pytest.raises(SpartitoError, match=r"did not end within 0\.2 s"):
        call([sys.executable, "-c", "import time; time.sleep(60)"], 0.2)
