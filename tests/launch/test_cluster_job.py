from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spartito.cli import main
from spartito.errors import SpartitoError, UserError
from spartito.launch.containers.compose import compose_file, machine_files
from spartito.launch.containers.engine import TaskState, call, complaint, state_of
from spartito.launch.containers.file import Folder, JobFile, read_job
from spartito.launch.containers.job import check_folders, check_ports, make_folders
from spartito.launch.containers.plan import Containers, Network
from spartito.launch.containers.secret import make_secret, write_secret
from spartito.launch.containers.watch import verdict
from spartito.launch.roles import Roles
from tests.launch.jobs import plan_containers


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    path = tmp_path / "compose.yaml"
    path.write_text(text_of(Roles(2)))
    return path


def text_of(roles: Roles) -> str:
    strategy = "parameter_server" if roles.ps else "multi_worker_mirrored"
    return compose_file(
        Containers("digits", "mnist", ("python",), strategy, roles, "./out", data="./photos")
    )


def job(tmp_path: Path, roles: Roles) -> JobFile:
    path = tmp_path / "compose.yaml"
    path.write_text(text_of(roles))
    return read_job(path)


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
    plan = Containers("digits", "mnist", ("python",), strategy, roles, "/out", network=network)
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


def test_several_machines_share_the_secret_that_was_written_once(tmp_path: Path) -> None:
    network = Network(host=True, machines=("a", "b"))
    plan = Containers(
        "digits", "mnist", ("python",), "multi_worker_mirrored", Roles(2), "/out", network=network
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


def test_the_job_of_a_file(job_file: Path) -> None:
    made = read_job(job_file)
    assert (made.name, made.images, list(made.services)) == (
        "digits",
        ["spartito"],
        ["worker-0", "worker-1"],
    )
    here = job_file.parent
    assert made.folders == [
        Folder(here / "out", True, "1000:1000"),
        Folder(here / "photos", False, "1000:1000"),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "is not YAML"),
        ("a: 1", "has no services"),
        ("- a", "has no services"),
        ("name: x\nservices: {a: {}}", "the service 'a' has no image"),
        ("services: {a: {image: x}}", "has no name"),
        ("name: Big\nservices: {a: {image: x}}", "has the name 'Big'"),
    ],
)
def test_a_file_that_is_no_job(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "compose.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        read_job(path)


@pytest.mark.parametrize(
    ("user", "mode", "written", "expected"),
    [
        ("{own}:7", 0o700, True, True),
        ("{own}:7", 0o500, True, False),
        ("{own}:7", 0o500, False, True),
        ("76543:{group}", 0o750, False, True),
        ("76543:{group}", 0o750, True, False),
        ("76543:76543", 0o770, False, False),
        ("76543", 0o777, True, True),
        ("0:0", 0o700, True, True),
        ("somebody", 0o700, True, True),
    ],
)
def test_who_can_use_a_folder(
    tmp_path: Path, user: str, mode: int, written: bool, expected: bool
) -> None:
    folder = tmp_path / "photos"
    folder.mkdir()
    own, group = 76541, 76542
    if os.getuid() == 0:
        os.chown(folder, own, group)
    else:
        own, group = os.getuid(), os.getgid()
    folder.chmod(mode)
    found = Folder(folder, written, user.format(own=own, group=group))
    assert found.is_open() == expected
    folder.chmod(0o700)


def test_a_folder_that_the_container_may_not_read_is_named(job_file: Path) -> None:
    photos = job_file.parent / "photos"
    photos.mkdir(mode=0o700)
    job_file.write_text(job_file.read_text().replace("1000:1000", "76543:76543"))
    with pytest.raises(UserError, match="user 76543:76543 of the containers cannot read"):
        check_folders(read_job(job_file))
    photos.chmod(0o755)
    check_folders(read_job(job_file))


def test_a_run_folder_that_we_cannot_give_away_is_not_left(
    job_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 1)  # who is not root owns what he makes
    job_file.write_text(job_file.read_text().replace("1000:1000", "76543:76543"))
    before = set(job_file.parent.rglob("*"))
    with pytest.raises(UserError, match="user 76543:76543 of the containers cannot write into"):
        make_folders(read_job(job_file))
    assert set(job_file.parent.rglob("*")) == before


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    network = Network(host=True)
    plan = Containers("x", "x", ("y",), "multi_worker_mirrored", Roles(2), "./o", network=network)
    with socket.socket() as holder:
        holder.bind(("", 0))
        holder.listen()
        port = holder.getsockname()[1]
        path = tmp_path / "compose.yaml"
        path.write_text(compose_file(plan).replace("127.0.0.1:29500", f"127.0.0.1:{port}"))
        with pytest.raises(UserError, match=rf"worker-0 cannot listen on port {port}"):
            check_ports(read_job(path))
    check_ports(read_job(path))
    path.write_text(text_of(Roles(2)))  # on a bridge each container has all ports
    check_ports(read_job(path))


@pytest.mark.parametrize("word", ["image", "compose", "up", "status", "wait", "logs", "down"])
def test_every_command_has_help_with_an_example(
    word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cluster", word, "--help"]) == 0
    assert f"Example: spartito cluster {word}" in " ".join(capsys.readouterr().out.split())


def spartito(*words: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "spartito", "cluster", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **env},
    )


def test_without_an_engine_it_says_so(job_file: Path, tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir(mode=0o755)
    for command in ("up", "status", "logs", "down"):
        done = spartito(command, job_file, PATH=str(tmp_path))
        assert done.returncode == 2
        assert "there is no docker command on this machine" in done.stderr
        assert "Traceback" not in done.stderr


def test_a_data_folder_that_is_gone_is_named_before_anything_starts(job_file: Path) -> None:
    done = spartito("up", job_file)
    assert done.returncode == 2
    assert f"mounts {job_file.parent / 'photos'}, which is no folder" in done.stderr
    assert not (job_file.parent / "out").exists()


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    done = spartito("up", tmp_path / "compose.yaml")
    assert done.returncode == 2
    assert "cannot be read" in done.stderr


def test_several_machines_need_a_folder_for_their_files(tmp_path: Path) -> None:
    done = spartito("compose", "mnist", "--workers", "2", "--hosts", "a,b")
    assert (done.returncode, "--hosts and --into go together" in done.stderr) == (2, True)
    into = tmp_path / "files"
    done = spartito("compose", "mnist", "--workers", "2", "--hosts", "a,b", "--into", into)
    assert done.returncode == 0
    assert sorted(path.name for path in (tmp_path / "files").iterdir()) == [
        "a.yaml",
        "b.yaml",
        "mnist.secret",
    ]


def test_a_source_folder_is_needed_for_the_image(tmp_path: Path) -> None:
    done = spartito("image", tmp_path)
    assert done.returncode == 2
    assert "has no docker/Dockerfile" in done.stderr
