from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from spartito.cli import main
from spartito.declared import Declared
from spartito.errors import UserError
from spartito.launch.containers.compose import compose_file
from spartito.launch.containers.file import Folder, JobFile, read_job
from spartito.launch.containers.job import check_folders, check_ports, make_folders
from spartito.launch.containers.plan import Containers, Network
from spartito.launch.processes.roles import Roles


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    path = tmp_path / "compose.yaml"
    path.write_text(text_of(Roles(2)))
    return path


def text_of(roles: Roles) -> str:
    strategy = "parameter_server" if roles.ps else "multi_worker_mirrored"
    return compose_file(
        Containers(
            "digits", "mnist", ("python",), Declared(strategy), roles, "./out", data="./photos"
        )
    )


def job(tmp_path: Path, roles: Roles) -> JobFile:
    path = tmp_path / "compose.yaml"
    path.write_text(text_of(roles))
    return read_job(path)


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
    plan = Containers(
        "x", "x", ("y",), Declared("multi_worker_mirrored"), Roles(2), "./o", network=network
    )
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
