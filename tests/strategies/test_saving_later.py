"""Asynchronous checkpoints: training goes on, and what is written is as if it had waited."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import spartito as sp
from spartito.checkpoint.manager import CheckpointManager, read_checkpoint
from spartito.storage.atomic import verify
from tests.replicas import Replicas
from tests.strategies import later_jobs
from tests.strategies.test_checkpoints import same

CASES = [("mirrored", 2), ("sharded", 2), ("tests.strategies.paired:CutStrategy", 4)]
every_case = pytest.mark.parametrize(
    ("name", "world_size"), CASES, ids=["mirrored", "sharded", "cut"]
)


@pytest.mark.parametrize("slow", [0, 1])
@pytest.mark.parametrize("name", ["mirrored", "sharded", "central_storage", "mesh", "pipeline"])
def test_what_is_saved_is_of_the_moment(
    replicas: Replicas, tmp_path: Path, name: str, slow: int
) -> None:
    replicas(later_jobs.save_later, 2, name, {}, str(tmp_path), slow)
    for number in range(2):
        later = tmp_path / f"later-{number}"
        assert [*verify(later).files] == [*verify(tmp_path / "now").files]
        same(read_checkpoint(later), read_checkpoint(tmp_path / "now"))


@every_case
@pytest.mark.parametrize("rank", [0, 1])
def test_a_full_disk_is_the_same_error_on_all(
    replicas: Replicas, tmp_path: Path, name: str, world_size: int, rank: int
) -> None:
    if name == "mirrored" and rank:
        return  # it writes nothing
    said = replicas(later_jobs.fail_later, world_size, name, {}, str(tmp_path), [rank])
    for each in said:
        assert len(each) == 2
        for text in each:
            assert "cannot be written: No space left on device" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["after", "before"]
    verify(tmp_path / "after")


@every_case
def test_the_end_of_fit_waits(
    replicas: Replicas, tmp_path: Path, name: str, world_size: int
) -> None:
    found = replicas(later_jobs.fit_saving_later, world_size, name, {}, str(tmp_path))
    assert found == [["step-00000007", "step-00000008"]] * world_size


@pytest.mark.parametrize(
    ("name", "options", "world_size"),
    [
        ("sharded", {}, 2),
        ("sharded", {"communication": "sockets"}, 3),
        ("central_storage", {}, 2),
        ("pipeline", {}, 2),
        ("tests.strategies.paired:CutStrategy", {}, 4),
    ],
    ids=lambda given: str(given).rpartition(":")[2],
)
def test_tasks_without_the_chiefs_directory_send_their_parts(
    replicas: Replicas, tmp_path: Path, name: str, options: dict[str, Any], world_size: int
) -> None:
    said = replicas(later_jobs.save_apart, world_size, name, options, str(tmp_path))
    chiefs = tmp_path / "machine-0"
    assert sorted(path.name for path in chiefs.iterdir()) == ["later", "now"]
    for each in (chiefs / "now", chiefs / "later", tmp_path / "after"):
        assert [*verify(each).files] == [*verify(tmp_path / "now").files]
        same(read_checkpoint(each), read_checkpoint(tmp_path / "now"))
    for rank in range(1, world_size):
        assert not [*(tmp_path / f"machine-{rank}").iterdir()]
    for text in said:
        assert "cannot be written: No space left on device" in text


@pytest.mark.parametrize("victim", [0, 1])
def test_a_task_that_dies_while_it_writes_leaves_the_checkpoint_before(
    tmp_path: Path, victim: int
) -> None:
    found = Replicas().outcomes(later_jobs.die_later, 2, "sharded", {}, str(tmp_path), victim)
    assert "exit code -9" in str(found.pop(victim))
    assert f"worker {victim}" in found[0]
    manager = CheckpointManager(tmp_path)
    assert manager.latest() == tmp_path / "before"
    manager.prepare()  # as the next training does
    assert [path.name for path in tmp_path.iterdir()] == ["before"]
    trainer = later_jobs.trainer_of(sp.strategy("one_device"))
    trainer.load(tmp_path / "before")
    assert trainer.step == 1
    assert len(trainer.optimizer.state) == 4
