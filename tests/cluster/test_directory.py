"""Tasks that meet in a directory; each is a process of its own, as separate batch jobs are."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from spartito.cluster.directory import Card, from_directory
from spartito.errors import TaskLostError, UserError
from spartito.wire.addresses import split_address
from spartito.wire.ports import _is_free, free_port

PROGRAM = """
import json, os
from spartito.cluster import resolve
from spartito.errors import install_excepthook
install_excepthook()
spec = resolve()
assert resolve() == spec
print(json.dumps([str(spec.task), spec.rank, spec.addresses, spec.rendezvous, spec.source]))
"""


def start(folder: Path, task: str, **variables: str) -> subprocess.Popen[str]:
    own = {"SPARTITO_CLUSTER_DIR": str(folder), "SPARTITO_TASK": task, "SPARTITO_TIMEOUT": "60"}
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        env={"PATH": os.environ["PATH"], **own, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def results(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    try:
        ended = [process.communicate(timeout=90) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(p.returncode, out, err) for p, (out, err) in zip(processes, ended, strict=True)]


def test_a_host_name_that_means_an_address_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "192.0.2.7")  # as a record out of date
    one = {"SPARTITO_CLUSTER_DIR": str(tmp_path), "SPARTITO_TASK": "worker 0"}
    spec = from_directory({**one, "SPARTITO_WORKERS": "1"})
    assert spec is not None
    host, port = split_address(spec.addresses["worker"][0])
    assert not _is_free(socket.AF_INET, host, int(port))  # until this process ends
    with socket.create_server((host, int(port))):  # as a task listens
        pass


def test_who_tries_again_needs_no_more_ports(tmp_path: Path) -> None:
    port = free_port()
    ports = {"SPARTITO_PORTS": f"{port}-{port}", "SPARTITO_TASK": "worker 0"}
    two = {"SPARTITO_WORKERS": "2", "SPARTITO_TIMEOUT": "0.1"}
    for _ in range(2):
        with pytest.raises(TaskLostError, match="did not come"):
            from_directory({"SPARTITO_CLUSTER_DIR": str(tmp_path), **ports, **two})
    for name in "ab":  # a job after the other
        one = {"SPARTITO_CLUSTER_DIR": str(tmp_path / name), "SPARTITO_WORKERS": "1"}
        spec = from_directory(ports | one)
        assert spec is not None
        assert split_address(spec.addresses["worker"][0])[1] == port


def test_three_jobs_find_each_other_twice_in_one_directory(tmp_path: Path) -> None:
    counts = {"SPARTITO_WORKERS": "2", "SPARTITO_PS": "1"}
    seen = []
    for _ in range(2):  # the second time over the files that the first has left
        ended = results([start(tmp_path, t, **counts) for t in ("worker 0", "worker 1", "ps 0")])
        assert [code for code, _, _ in ended] == [0, 0, 0], ended
        told = [json.loads(out) for _, out, _ in ended]
        assert [task for task, *_ in told] == ["worker 0", "worker 1", "ps 0"]
        assert [rank for _, rank, *_ in told] == [0, 1, -1]
        addresses = [addresses for _, _, addresses, *_ in told]
        assert addresses[0] == addresses[1] == addresses[2]
        everyone = addresses[0]["worker"] + addresses[0]["ps"]
        assert len(set(everyone)) == 3
        assert all(split_address(address) for address in everyone)
        assert {rendezvous for *_, rendezvous, _ in told} == {addresses[0]["worker"][0]}
        assert {source for *_, source in told} == {str(tmp_path)}
        seen.append({path.name: Card.read(path) for path in tmp_path.iterdir()})
    assert set(seen[0]) == set(seen[1]) == {"ps-0.json", "worker-0.json", "worker-1.json"}
    assert all(seen[0][name] != seen[1][name] for name in seen[0])


def test_an_address_can_be_given(tmp_path: Path) -> None:
    ended = results(
        [
            start(tmp_path, f"worker {n}", SPARTITO_WORKERS="2", SPARTITO_ADDRESS=f"h{n}:5000")
            for n in range(2)
        ]
    )
    assert [code for code, _, _ in ended] == [0, 0], ended
    assert json.loads(ended[0][1])[2] == {"worker": ["h0:5000", "h1:5000"]}


def test_who_does_not_come_is_named_and_files_of_earlier_jobs_do_not_count(tmp_path: Path) -> None:
    Card("a:1", "old", {"worker 0": "older"}).write(tmp_path / "worker-1.json")
    (tmp_path / "worker-2.json").write_text("half a li")
    limit = {"SPARTITO_WORKERS": "3", "SPARTITO_TIMEOUT": "0.5"}
    ((code, _, error),) = results([start(tmp_path, "worker 0", **limit)])
    assert code == 69
    assert f"worker 1 and worker 2 did not come to {tmp_path} within 0.5 s" in error
    assert not (tmp_path / "worker-0.json").exists()


def test_one_task_waits_for_nobody(tmp_path: Path) -> None:
    spec = from_directory(
        {
            "SPARTITO_CLUSTER_DIR": str(tmp_path / "new"),
            "SPARTITO_TASK": "worker 0",
            "SPARTITO_WORKERS": "1",
        }
    )
    assert spec is not None
    assert spec.world_size == 1
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["worker-0.json"]


def test_without_the_variable_it_says_nothing() -> None:
    assert from_directory({"SPARTITO_TASK": "worker 0", "SPARTITO_WORKERS": "2"}) is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"SPARTITO_TASK": ""}, ["SPARTITO_TASK is not"]),
        ({"SPARTITO_TASK": "worker 2"}, ["worker 2", "worker 0, worker 1", "SPARTITO_WORKERS"]),
        ({"SPARTITO_TASK": "ps 0"}, ["ps 0", "SPARTITO_PS"]),
        ({"SPARTITO_WORKERS": ""}, ["SPARTITO_WORKERS does not say for how many"]),
        ({"SPARTITO_WORKERS": "two"}, ["'two'"]),
        ({"SPARTITO_TIMEOUT": "soon"}, ["'soon'"]),
        ({"SPARTITO_ADDRESS": "nowhere"}, ["'nowhere'"]),
        ({"SPARTITO_CLUSTER_DIR": "/dev/null/x"}, ["'/dev/null/x'", "cannot be used"]),
    ],
)
def test_each_mistake_is_named(tmp_path: Path, changes: dict[str, str], words: list[str]) -> None:
    good = {
        "SPARTITO_CLUSTER_DIR": str(tmp_path),
        "SPARTITO_TASK": "worker 0",
        "SPARTITO_WORKERS": "2",
        "SPARTITO_TIMEOUT": "0.1",
    }
    with pytest.raises(TaskLostError, match="worker 1 did not come"):
        from_directory(good)
    with pytest.raises(UserError) as error:
        from_directory(good | changes)
    assert all(word in str(error.value) for word in words), str(error.value)
