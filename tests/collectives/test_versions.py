"""Tasks with other versions: the same clear error on all of them, before anything is trained."""

from __future__ import annotations

from pathlib import Path

import pytest

from spartito.collectives.membership.versions import Versions, check_versions
from spartito.errors import UserError
from tests.strategies.ps_jobs import Asked
from tests.strategies.ps_processes import Job, job
from tests.versions import with_version

OWN = Versions.own()
OTHER_TORCH = "1.13.1"
WORKERS = "multi_worker_mirrored"


def run(folder: Path, asked: Asked, other: str, told: dict[str, str], **counts: int) -> Job:
    """A job of so many tasks by role that has ended; ``other`` is told something else."""
    with job(folder, asked, start=False, **counts) as found:
        for role, count in counts.items():
            for name in (f"{role} {index}" for index in range(count)):
                found.start(name, env=told if name == other else {})
        found.ends(*found.members)
    return found


@pytest.mark.parametrize(
    ("versions", "told"),
    [
        ({"a": OWN, "b": OWN}, ""),
        ({"a": Versions("1", "2.5.0"), "b": Versions("1", "2.5.1+cpu")}, ""),
        (
            {"a": Versions("1", "2.5.0"), "b": Versions("1.0", "2.5.0")},
            "Spartito: 1 on a, 1.0 on b",
        ),
        (
            {"a": Versions("1", "2.5.1"), "b": Versions("1", "2.6.0"), "c": Versions("1", "2.5.1")},
            "torch: 2.5.1 on a and c, 2.6.0 on b",
        ),
    ],
)
def test_which_versions_fit_together(versions: dict[str, Versions], told: str) -> None:
    if not told:
        check_versions(versions)
        return
    with pytest.raises(UserError) as caught:
        check_versions(versions)
    assert f"the tasks have different versions of {told}\n" in str(caught.value)


@pytest.mark.parametrize(
    ("package", "version", "other"),
    [("spartito", "9.9.9", "worker 0"), ("torch", OTHER_TORCH, "worker 2")],
)
def test_all_replicas_refuse_and_say_who_has_what(
    tmp_path: Path, package: str, version: str, other: str
) -> None:
    told = with_version(tmp_path, package, version)
    found = run(tmp_path, Asked(WORKERS), other, told, worker=3)
    for name in found.members:
        refused(found, name, f"{version} on {other} \\(")


def refused(found: Job, name: str, who: str) -> None:
    assert found.codes[name] == 2, found.text
    assert found.said(name, f"spartito: error: the tasks have different versions of .*{who}")


def test_another_patch_and_build_of_torch_is_the_same_torch(tmp_path: Path) -> None:
    told = with_version(tmp_path, "torch", f"{OWN.torch_series}.99+cu000")
    found = run(tmp_path, Asked(WORKERS, epochs=1), "worker 1", told, worker=2)
    assert found.codes == {"worker 0": 0, "worker 1": 0}, found.text


def test_the_chief_and_a_server_refuse_each_other(tmp_path: Path) -> None:
    told = with_version(tmp_path, "torch", OTHER_TORCH)
    found = run(tmp_path, Asked(), "ps 1", told, worker=1, ps=2)
    assert found.codes["ps 0"] == 0, found.text
    for name in ("worker 0", "ps 1"):
        refused(found, name, f"{OTHER_TORCH} on ps 1")


def test_a_server_that_comes_back_with_another_version_ends_the_job(tmp_path: Path) -> None:
    told = with_version(tmp_path, "spartito", "9.9.9")
    with job(tmp_path, Asked(holds={"worker 0": 5}), worker=1, ps=1) as found:
        found.held("worker 0")
        found.kill("ps 0")
        found.start("ps 0", env=told)
        found.go("worker 0")
        found.ends(*found.members)
    for name in ("worker 0", "ps 0"):
        refused(found, name, "9.9.9 on ps 0")


def test_the_chief_and_a_worker_refuse_each_other(tmp_path: Path) -> None:
    told = with_version(tmp_path, "spartito", "9.9.9")
    found = run(tmp_path, Asked(), "worker 1", told, worker=2, ps=1)
    assert found.codes["ps 0"] == 0, found.text
    for name in ("worker 0", "worker 1"):
        refused(found, name, "9.9.9 on worker 1")
