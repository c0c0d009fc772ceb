"""An evaluator beside a training: in one process after it, and as tasks of a real cluster."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import spartito as sp
from spartito.checkpoint.manager import CheckpointManager, read_checkpoint
from spartito.cluster.spec import Task
from spartito.errors import TaskLostError, UserError
from spartito.report.evaluations import EVALUATIONS, keep_until, with_evaluations
from spartito.report.page import REPORT, read_run
from spartito.storage.atomic import is_whole
from spartito.system import process_began
from spartito.training.evaluation.evaluate import Evaluation
from spartito.training.evaluation.evaluator import Evaluator
from spartito.training.files.heartbeat import FILE, look
from tests.commands import eventually
from tests.strategies.ps_jobs import Asked
from tests.strategies.ps_processes import job
from tests.training.jobs import data, trainer

CLUSTER = replace(
    sp.ClusterSpec.alone(), addresses={"worker": ("",), "evaluator": ("",)}, source="a test"
)
ASIDE = replace(CLUSTER, task=Task("evaluator", 0), rank=-1, local_rank=-1, local_size=0)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)).double()


def made(cluster: sp.ClusterSpec, run_dir: Path, **options: Any) -> sp.Trainer:
    strategy = sp.MirroredStrategy(cluster=cluster)
    return trainer(strategy, model=net(), metrics=["accuracy"], run_dir=run_dir, **options)


def train(run_dir: Path, epochs: int = 3, resume: bool = False, **options: Any) -> sp.Trainer:
    chief = made(CLUSTER, run_dir)
    if resume:
        chief.load(run_dir / "checkpoints")
    options = {"callbacks": [sp.callbacks.ModelCheckpoint()], **options}
    chief.fit(data(), epochs=epochs, batch_size=5, validation_data=data(7), verbose=0, **options)
    return chief


def look_on(run_dir: Path, **options: Any) -> sp.Trainer:
    evaluator = made(ASIDE, run_dir)
    options = {"callbacks": [sp.callbacks.ModelCheckpoint()], **options}
    evaluator.fit(data(), epochs=3, validation_data=data(7), **options)
    return evaluator


def lines(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / EVALUATIONS).read_text().splitlines()]


def figures_of(path: Path) -> dict[str, float]:
    """What a trainer says of a checkpoint."""
    other = trainer(model=net(), metrics=["accuracy"])
    other.load(path)
    return {f"val_{name}": value for name, value in other.evaluate(data(7)).items()}


def test_an_evaluator_is_one_replica_alone_and_nobodys_chief() -> None:
    other = ASIDE
    for kind in (sp.MirroredStrategy, sp.MultiWorkerMirroredStrategy, sp.OneDeviceStrategy):
        strategy = kind(cluster=other)
        assert strategy.is_evaluator
        assert not strategy.is_chief
        assert strategy.num_replicas_in_sync == 1
        assert str(strategy.task) == "evaluator 0"
        assert strategy.job is other
    assert not sp.OneDeviceStrategy(cluster=CLUSTER).is_evaluator
    with pytest.raises(UserError, match="at most one evaluator"):
        replace(CLUSTER, addresses={"worker": ("",), "evaluator": ("a:1", "b:1")})


def test_the_chief_leaves_the_validation_to_it(tmp_path: Path) -> None:
    chief = train(tmp_path)
    assert list(chief.history.history) == ["loss", "accuracy"]
    kept = tmp_path / "checkpoints"
    assert len(CheckpointManager(kept).all()) == 3
    assert not (kept / "best.json").exists()
    seen = look(kept)
    assert seen is not None
    assert (seen.signal.state, seen.signal.first, seen.signal.step) == ("finished", 1, 12)


def test_it_evaluates_the_newest_and_ends(tmp_path: Path, capsys: Any) -> None:
    train(tmp_path)
    (tmp_path / REPORT).unlink()  # the chief's, which has no validation yet
    tensorboards = sp.callbacks.TensorBoard()
    found = look_on(tmp_path, callbacks=[sp.callbacks.ModelCheckpoint(), tensorboards])
    newest = CheckpointManager(tmp_path / "checkpoints").latest()
    assert newest is not None
    expected = figures_of(newest)
    (line,) = lines(tmp_path)
    assert (line["epoch"], line["step"]) == (3, 12)
    assert {name: line[name] for name in expected} == pytest.approx(expected, abs=1e-12)
    assert found.history.epoch == [2]
    assert "validation loss" in (tmp_path / REPORT).read_text()
    assert {n: v[0] for n, v in found.history.history.items()} == pytest.approx(expected, abs=1e-12)
    assert CheckpointManager(tmp_path / "checkpoints").best == newest
    assert "epoch 3  step 12  val_loss" in capsys.readouterr().out
    assert list((tmp_path / "logs" / "validation").glob("events.*"))
    run = read_run(tmp_path)
    assert run.series("val_loss") == [None, None, line["val_loss"]]
    assert found.evaluate(data(7))["loss"] == pytest.approx(expected["val_loss"], abs=1e-12)
    assert not found.save(tmp_path / "mine").exists()


def test_a_fit_without_a_checkpoint_callback_saves_some_for_it(tmp_path: Path) -> None:
    train(tmp_path, epochs=7, callbacks=[])
    assert len(CheckpointManager(tmp_path / "checkpoints").all()) == 5
    assert look_on(tmp_path, callbacks=[]).epoch == 7


def test_every_fit_has_its_own_checkpoints(tmp_path: Path) -> None:
    chief = train(tmp_path)
    again: dict[str, Any] = {"epochs": 2, "batch_size": 5, "validation_data": data(7), "verbose": 0}
    chief.fit(data(), callbacks=[sp.callbacks.ModelCheckpoint()], **again)
    evaluator = made(ASIDE, tmp_path)
    seen = [
        evaluator.fit(data(), callbacks=[sp.callbacks.ModelCheckpoint()], **again) for _ in range(2)
    ]
    assert [history.epoch for history in seen] == [[], [1]]  # the first was over long ago
    assert [line["step"] for line in lines(tmp_path)] == [20]


def evaluator_since(run_dir: Path, since: float) -> Evaluator:
    """An evaluator whose process began at ``since``."""
    task = made(ASIDE, run_dir)
    checkpoint = sp.callbacks.ModelCheckpoint()
    checkpoint.set_trainer(task)
    evaluation = Evaluation(
        task.strategy, task.model, task.loss, task.metrics, sp.data.arrays(*data(7)).batch(7), None
    )
    return Evaluator(task, checkpoint, evaluation, 1, since=since)


def test_what_an_earlier_job_left_is_not_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tmp_path)
    seen = look(tmp_path / "checkpoints")
    assert seen is not None
    monkeypatch.setenv("SPARTITO_TIMEOUT", "0.6")
    with pytest.raises(TaskLostError, match="worker 0 began no training with checkpoints"):
        evaluator_since(tmp_path, seen.time + 1).run()
    assert not (tmp_path / EVALUATIONS).exists()


def test_a_resumed_training_is_seen_from_where_it_goes_on(tmp_path: Path) -> None:
    train(tmp_path, epochs=2)
    look_on(tmp_path)
    waiting = evaluator_since(tmp_path, float("inf"))  # it saw the end of the first training
    train(tmp_path, epochs=4, resume=True)
    assert waiting.run().epoch == [3]
    assert [line["epoch"] for line in lines(tmp_path)] == [2, 4]
    train(tmp_path, epochs=1)  # anew: nothing of before counts
    assert not (tmp_path / EVALUATIONS).exists()
    assert (tmp_path / f"{EVALUATIONS}.1").exists()


def test_a_training_that_failed(tmp_path: Path) -> None:
    class Broken(sp.Callback):
        def on_epoch_begin(self, epoch: int) -> None:
            if epoch == 1:
                raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        train(tmp_path, callbacks=[sp.callbacks.ModelCheckpoint(), Broken()])
    with pytest.raises(TaskLostError, match="failed on worker 0, in epoch 2"):
        look_on(tmp_path)
    assert [line["epoch"] for line in lines(tmp_path)] == [1]


def test_a_damaged_checkpoint_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARTITO_TIMEOUT", "1")  # half of it may what is missing take
    train(tmp_path)
    (tmp_path / "checkpoints" / "step-00000012" / "model.safetensors").write_bytes(b"")
    assert look_on(tmp_path).history.epoch == []


@pytest.mark.parametrize("name", ["model.safetensors", "manifest.json"])
def test_a_checkpoint_whose_files_come_one_by_one_is_waited_for(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tmp_path)
    missing, there = tmp_path / name, tmp_path / "checkpoints" / "step-00000012" / name
    there.rename(missing)
    looks = []

    def look_at(path: Path) -> bool:
        looks.append(is_whole(path))
        if not looks[-1] and missing.exists():
            missing.rename(there)
        return looks[-1]

    monkeypatch.setattr("spartito.training.evaluation.evaluator.is_whole", look_at)
    assert look_on(tmp_path).history.epoch[-1] == 2
    assert False in looks


@pytest.mark.parametrize("task", [CLUSTER, ASIDE])
@pytest.mark.parametrize(
    ("callback", "text"),
    [
        (sp.callbacks.EarlyStopping("val_accuracy"), "EarlyStopping watches 'val_accuracy'"),
        (sp.callbacks.ModelCheckpoint(save_best_only=True), "save_best_only=True"),
    ],
)
def test_what_cannot_wait_for_it(
    task: sp.ClusterSpec, callback: sp.Callback, text: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=text):
        made(task, tmp_path).fit(data(), validation_data=data(7), callbacks=[callback])


@pytest.mark.parametrize("task", [CLUSTER, ASIDE])
def test_no_folder_for_checkpoints(task: sp.ClusterSpec) -> None:
    strategy = sp.MirroredStrategy(cluster=task)
    with pytest.raises(UserError, match="an evaluator, but fit"):
        trainer(strategy).fit(data(), validation_data=data(7))


def test_figures_meet_their_epoch_by_the_step() -> None:
    epochs = [{"epoch": 1, "step": 4, "loss": 1.0}, {"epoch": 1, "step": 8, "val_loss": 2.0}, {}]
    found = [{"epoch": 1, "step": step, "val_loss": step / 8, "seconds": 1.0} for step in (4, 6, 8)]
    assert with_evaluations(epochs, found) == [
        {"epoch": 1, "step": 4, "loss": 1.0, "val_loss": 0.5},
        epochs[1],
        {},
    ]


def test_lines_beyond_a_step_are_forgotten(tmp_path: Path) -> None:
    file = tmp_path / EVALUATIONS
    keep_until(file, 4, 1)
    assert not file.exists()
    first, second, again = (
        json.dumps({"epoch": epoch, "step": step}) + "\n"
        for epoch, step in ((1, 4), (2, 8), (1, 12))
    )
    file.write_text(first + second + '{"st')
    keep_until(file, 4, 1)
    assert file.read_text() == first
    file.write_text(first + second)
    keep_until(file, 3, 1)  # servers had more than the epoch when it was saved
    assert file.read_text() == first
    file.write_text(first + second + again)
    keep_until(file, 8, 2)  # epochs that were counted from 1 again
    assert file.read_text() == first + second


def test_a_process_began_before_its_files(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert process_began() < (tmp_path / "file").stat().st_mtime


# Real processes


def asked(folder: Path, **more: Any) -> Asked:
    """A training by workers that meet, with checkpoints in the run folder of `job`."""
    kept = str(folder / "run" / "checkpoints")
    return Asked(
        "multi_worker_mirrored",
        norm=True,
        callbacks="save",
        checkpoints=kept,
        validation=True,
        **more,
    )


def has_looked(run_dir: Path) -> bool:
    return (run_dir / EVALUATIONS).exists() and bool(lines(run_dir))


@pytest.mark.parametrize("workers", [1, 2])
def test_beside_workers(workers: int, tmp_path: Path) -> None:
    with job(tmp_path, asked(tmp_path, epochs=4), worker=workers, evaluator=1) as found:
        found.finish()
    chief, evaluator = found.result("worker 0"), found.result("evaluator 0")
    assert list(chief["histories"][0]) == ["loss", "accuracy"]
    assert found.said("worker 0", "validation is left to the evaluator")
    run = tmp_path / "run"
    last = lines(run)[-1]
    assert (last["epoch"], last["step"]) == (4, 4 * 12)
    for task in (chief, evaluator):
        expected = {f"val_{name}": value for name, value in task["evaluated"].items()}
        assert {name: last[name] for name in expected} == pytest.approx(expected, abs=1e-6)
    assert evaluator["histories"][0]["val_loss"] == [line["val_loss"] for line in lines(run)]
    best = json.loads((run / "checkpoints" / "best.json").read_text())
    assert best["value"] == min(line["val_loss"] for line in lines(run))
    assert "validation" in (run / "report.html").read_text()


def test_its_death_changes_nothing(tmp_path: Path) -> None:
    plan = asked(tmp_path, epochs=4, holds={"worker 0": 13})  # in the second epoch
    with job(tmp_path, plan, worker=1, evaluator=1) as found:
        found.held("worker 0")
        assert eventually(lambda: has_looked(tmp_path / "run"))
        found.kill("evaluator 0")
        found.go("worker 0")
        found.finish()
        assert len(found.result("worker 0")["histories"][0]["loss"]) == 4


def test_it_ends_when_the_chief_is_gone(tmp_path: Path) -> None:
    plan = asked(tmp_path, holds={"worker 0": 13})
    with job(tmp_path, plan, worker=1, evaluator=1) as found:
        found.held("worker 0")
        assert eventually(lambda: has_looked(tmp_path / "run"))
        found.kill("worker 0")
        found.shorten("evaluator 0")
        assert found.ends("evaluator 0") == [69], found.text
        assert found.said("evaluator 0", "nothing was heard of worker 0")
    assert read_checkpoint_of(tmp_path / "run")


class WaitsForSigns(sp.Callback):
    """Stays in one step, as a chief that waits for a server, until two signs of life came."""

    def __init__(self, signal: Path) -> None:
        self.signal, self.seen = signal, 0

    def on_train_batch_end(self, batch: int, logs: Any) -> None:
        for _ in range(2 if batch == 1 else 0):
            self.seen += eventually(partial(self.differs, self.signal.stat().st_mtime_ns))

    def differs(self, mark: int) -> bool:
        return self.signal.stat().st_mtime_ns != mark


def test_a_chief_that_waits_gives_signs_of_life(tmp_path: Path) -> None:
    waits = WaitsForSigns(tmp_path / "checkpoints" / FILE)
    train(tmp_path, epochs=1, callbacks=[sp.callbacks.ModelCheckpoint(), waits])
    assert waits.seen == 2


def read_checkpoint_of(run_dir: Path) -> dict[str, Any]:
    """The best checkpoint, which the chief kept for the evaluator."""
    best = CheckpointManager(run_dir / "checkpoints").best
    assert best is not None
    return read_checkpoint(best)


def test_a_signal_of_other_making(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("[]")
    with pytest.raises(UserError, match="cannot be understood"):
        look(tmp_path)
    os.remove(tmp_path / FILE)
    assert look(tmp_path) is None
