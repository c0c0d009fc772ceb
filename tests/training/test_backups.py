"""Backups of a training that is killed, or whose disk is full, and when they are due."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem  # type: ignore[import-untyped]
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import spartito as sp
from spartito import folders
from spartito.errors import PreemptedError, UnwritableError, UserError
from spartito.failpoints import ENV
from spartito.report.run_ends import STOPPED
from spartito.steps.coordination import SynchronousCoordination
from spartito.strategies import Strategy
from spartito.training.backups import fit_count
from spartito.training.backups.folder import LocalBackups
from spartito.training.backups.interval import BySeconds, interval_of
from spartito.training.fitting import preemption
from tests.commands import Ended, commands_in
from tests.training.jobs import data, on_replicas, trainer

LIMIT = 4096  # bytes of a file

SCRIPT = f"""
import sys
sys.path.append({str(Path(__file__).parents[2])!r})
import spartito as sp
from tests.training.jobs import data, trainer
made = trainer(metrics=["accuracy"])
backup = sp.callbacks.BackupAndRestore(sys.argv[1], every=1, share=None)
written = sp.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: made.wait())
history = made.fit(data(), epochs=8, batch_size=3, callbacks=[backup, written], verbose=0)
print(history.history, made.step, made.model[0].weight.sum().item())
"""


def run(folder: Path, failpoint: str = "") -> Ended:
    with commands_in(folder.parent) as commands:
        script = commands.write("train.py", SCRIPT)
        env = {ENV: failpoint} if failpoint else {}
        return commands.start(sys.executable, script, folder, env=env, forks=True).end()


@pytest.mark.slow
def test_killed_inside_of_a_save(tmp_path: Path) -> None:
    killed = run(tmp_path / "a", "storage.directory.before_manifest:kill:3")
    assert killed.code == -signal.SIGKILL
    resumed, whole = run(tmp_path / "a"), run(tmp_path / "b")
    assert "going on after step" in resumed.err
    assert resumed.out == whole.out
    assert resumed.out.startswith("{'loss'")
    assert not [*(tmp_path / "a").iterdir()]


class Tell(sp.Callback):
    """Does something after a step."""

    def __init__(self, step: int, what: Any) -> None:
        self.step, self.what = step, what

    def on_train_batch_end(self, batch: int, logs: Any) -> None:
        if self.trainer.step == self.step:
            self.what()


def fit(
    folder: Path | str, *others: sp.Callback, model: nn.Module | None = None, **options: Any
) -> sp.Trainer:
    made = trainer(model=model)
    backup = sp.callbacks.BackupAndRestore(folder, every=1, **{"share": None, **options})
    made.fit(data(), epochs=2, batch_size=5, callbacks=[backup, *others], verbose=0)
    return made


@contextmanager
def no_file_larger_than(size: int) -> Iterator[None]:
    """Until the block ends, the kernel refuses to write more into a file of this process."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_disk_ends_no_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, asynchronous: bool
) -> None:
    """The first epoch is the best, and cannot be written: so the second is."""
    saving = sp.callbacks.ModelCheckpoint(
        tmp_path / "checkpoints", "loss", "max", asynchronous=asynchronous
    )
    large = nn.Sequential(nn.Linear(3, 200), nn.Tanh(), nn.Linear(200, 2)).double()
    with ExitStack() as full:

        def empty() -> None:
            free.trainer.wait()  # by then what a thread writes has failed
            full.close()

        fill = Tell(2, lambda: full.enter_context(no_file_larger_than(LIMIT)))
        free = Tell(6, empty)
        assert fit(tmp_path / "backup", saving, fill, free, model=large).step == 8
    assert sum(text.startswith(f"{tmp_path / 'checkpoints'}/") for text in caplog.messages) == 1
    assert caplog.text.count("each turn is another try") in (1, 2)  # once for each folder
    assert [path.name for path in (tmp_path / "checkpoints").glob("step-*")] == ["step-00000008"]
    assert saving.local_manager.best == tmp_path / "checkpoints" / "step-00000008"
    with no_file_larger_than(LIMIT), pytest.raises(UserError, match="File too large"):
        trainer(model=large).save(tmp_path / "asked")


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_model_that_is_saved_nowhere_is_an_error(tmp_path: Path, asynchronous: bool) -> None:
    """A disk with space for the checkpoints of the first epoch."""
    saving = sp.callbacks.ModelCheckpoint(tmp_path / "a", asynchronous=asynchronous)
    backup = sp.callbacks.BackupAndRestore(tmp_path / "backup", every="epoch", share=None)
    large = nn.Sequential(nn.Linear(3, 200), nn.Tanh(), nn.Linear(200, 2)).double()
    made = trainer(model=large)
    with ExitStack() as full:

        def fill() -> None:
            made.wait()
            full.enter_context(no_file_larger_than(LIMIT))

        with pytest.raises(UnwritableError, match="File too large") as info:
            made.fit(data(), epochs=3, batch_size=5, callbacks=[saving, backup, Tell(6, fill)],
                     verbose=0)  # fmt: skip
    where = f"the last 2 checkpoints of 12 steps could not be written into {tmp_path / 'a'}, "
    assert f"not saved: {where}where the newest is of step 4: " in str(info.value)
    assert (made.step, len(made.history.epoch)) == (12, 3)
    made.save(tmp_path / "elsewhere")


def test_a_full_disk_takes_the_history_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made, folder = trainer(run_dir=tmp_path), tmp_path / "history.jsonl"
    with ExitStack() as full:
        fill = Tell(2, lambda: full.enter_context(no_file_larger_than(folder.stat().st_size + 9)))
        free = sp.callbacks.LambdaCallback(on_train_end=full.close)
        made.fit(data(), epochs=3, batch_size=5, callbacks=[fill, free], verbose=0)
    epochs = [json.loads(line)["epoch"] for line in folder.read_text().splitlines()]
    assert epochs == [1, 2, 3]
    assert caplog.text.count("Training goes on without it") == 1


def test_a_model_that_is_saved_once_is_enough(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    taken = tmp_path / "a" / "step-00000004"
    trainer().save(taken)
    (taken / "notes").write_text("mine")
    saving = [sp.callbacks.ModelCheckpoint(tmp_path / name) for name in "ab"]
    made = trainer()
    made.fit(data(), epochs=1, batch_size=5, callbacks=saving, verbose=0)
    assert f"{taken} cannot be replaced: notes in it is not of the checkpoint" in caplog.text
    assert f"could not be written into {tmp_path / 'a'}, where none was written" in caplog.text
    assert saving[1].local_manager.latest() is not None
    made.fit(data(), epochs=1, batch_size=5, callbacks=saving[1], verbose=0)


def test_backups_take_no_more_than_their_share(tmp_path: Path) -> None:
    often, rarely = (
        sp.callbacks.BackupAndRestore(tmp_path, every=1, share=share) for share in (None, 1e-9)
    )
    made = trainer()
    for backup in (often, rarely):
        made.fit(data(), epochs=2, batch_size=5, callbacks=[backup], verbose=0)
    assert often.written > 0
    assert rarely.written == 0  # the first of a process has no cost that is known


@pytest.mark.parametrize("how", ["SIGTERM", "SIGUSR1", "file"])
def test_who_is_told_to_end_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    whole = fit(tmp_path / "whole")
    monkeypatch.setattr(preemption, "POLL_SECONDS", 0.01)
    made, file, before = trainer(), tmp_path / "notice", signal.getsignal(signal.SIGTERM)

    def notice() -> None:
        file.touch()
        while not made.notice.came:
            pass

    sent = notice if how == "file" else lambda: os.kill(os.getpid(), getattr(signal, how))
    tell = Tell(3, sent)
    backup = sp.callbacks.BackupAndRestore(tmp_path / "kept", every=99, notice=file)
    with pytest.raises(PreemptedError, match=r"step [34] is saved") as info:
        made.fit(data(), epochs=2, batch_size=5, callbacks=[tell, backup], verbose=0)
    assert (how if how != "file" else str(file)) in str(info.value)
    assert info.value.exit_code == 75
    assert signal.getsignal(signal.SIGTERM) is before
    again = fit(tmp_path / "kept")
    assert again.history == whole.history
    assert torch.equal(again.model[0].weight, whole.model[0].weight)  # type: ignore[index]


def test_a_signal_without_backups_is_named(caplog: pytest.LogCaptureFixture) -> None:
    made = trainer()
    tell = Tell(2, lambda: os.kill(os.getpid(), signal.SIGUSR1))
    made.fit(data(), epochs=1, batch_size=5, callbacks=[tell], verbose=0)
    assert made.step == 4
    assert "SIGUSR1 came, and training goes on" in caplog.text


def test_backups_of_another_training_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PreemptedError):
        fit(tmp_path, Tell(3, lambda: os.kill(os.getpid(), signal.SIGTERM)))
    made = trainer()
    backup = sp.callbacks.BackupAndRestore(tmp_path)
    with pytest.raises(UserError, match="batch_size was 5 there, and is 4 now"):
        made.fit(data(), epochs=2, batch_size=4, callbacks=[backup], verbose=0)


@pytest.mark.parametrize("how", ["flipped", "cut"])
def test_a_damaged_backup_is_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    whole = fit(tmp_path / "whole")
    with pytest.raises(PreemptedError):
        fit(tmp_path / "kept", Tell(6, lambda: os.kill(os.getpid(), signal.SIGTERM)))
    newest = max((tmp_path / "kept" / "fit-1").glob("step-*"))
    file = newest / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content if how == "flipped" else content[:-1])
    again = fit(tmp_path / "kept")
    assert f"{newest.name} is passed over" in caplog.text
    assert again.history == whole.history


@pytest.mark.parametrize(("told", "saved"), [(5, 2), (3, 6)])
def test_the_newer_of_checkpoint_and_backup_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, told: int, saved: int
) -> None:
    with pytest.raises(PreemptedError):
        fit(tmp_path, Tell(told, lambda: os.kill(os.getpid(), signal.SIGTERM)))
    made, again = trainer(), trainer()
    save = Tell(saved, lambda: made.save(tmp_path / "saved"))
    made.fit(data(), epochs=2, batch_size=5, callbacks=[save], verbose=0)
    again.load(tmp_path / "saved")
    backup = sp.callbacks.BackupAndRestore(tmp_path)
    again.fit(data(), epochs=2, batch_size=5, callbacks=[backup], verbose=0)
    assert ("the checkpoint that was loaded" in caplog.text) == (saved > told)
    assert torch.equal(again.model[0].weight, made.model[0].weight)  # type: ignore[index]


def test_backups_in_a_store(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It refuses for a while, and training goes on; a second run goes on from what it has."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    whole, files, url = fit(tmp_path / "whole"), MemoryFileSystem(), f"memory://{tmp_path}"
    put = MemoryFileSystem.put_file

    def refuse(*_: object) -> None:
        bad.trainer.wait()
        monkeypatch.setattr(MemoryFileSystem, "put_file", lambda *_, **__: 1 / 0)

    def accept(*_: object) -> None:
        free.trainer.wait()
        monkeypatch.setattr(MemoryFileSystem, "put_file", put)

    bad, free = Tell(2, refuse), Tell(4, accept)
    end = Tell(5, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(PreemptedError, match=f"goes on from {url}"):
        fit(url, bad, free, end)
    assert caplog.text.count("cannot be written: division by zero") == 1
    found = files.find(f"{tmp_path}/fit-1")
    names = {path.split("/")[-2] for path in found}  # both may be of step 6
    assert (len(names), max(names)[:13]) == (2, "step-00000006")
    again = fit(url)
    assert f"going on after step 6, from {url}/fit-1/step-00000006" in caplog.text
    assert again.history == whole.history
    assert torch.equal(again.model[0].weight, whole.model[0].weight)  # type: ignore[index]
    fit_count.end()
    assert not files.find(str(tmp_path))
    assert not [*tmp_path.glob("spartito-*/*")]


def stopped_in_a_store(url: str) -> list[str]:
    """Backups of a training that was stopped, by the files that the store has."""
    end = Tell(5, lambda: os.kill(os.getpid(), signal.SIGTERM))
    waits = sp.callbacks.LambdaCallback(on_train_batch_end=lambda *_: end.trainer.wait())
    with pytest.raises(PreemptedError):
        fit(url, end, waits)
    return sorted(MemoryFileSystem().find(f"{url.removeprefix('memory:/')}/fit-1"))


def test_a_store_that_cannot_be_read_begins_nothing_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("spartito.storage.stores.PAUSES", (0.0,))
    url = f"memory://{tmp_path}"
    before = stopped_in_a_store(url)
    assert len(before) == 2 * 4
    for method in ("cat_file", "get_file"):
        with monkeypatch.context() as patched:
            patched.setattr(MemoryFileSystem, method, lambda *_, **__: 1 / 0)
            with pytest.raises(UserError, match=r"fit-1 cannot be read: division by zero"):
                fit(url)
        assert sorted(MemoryFileSystem().find(f"{tmp_path}/fit-1")) == before
    failures = iter([OSError("503 Slow Down")])
    read = MemoryFileSystem.cat_file

    def fails_once(self: Any, path: str, *args: Any, **options: Any) -> Any:
        for failure in failures:
            raise failure
        return read(self, path, *args, **options)

    monkeypatch.setattr(MemoryFileSystem, "cat_file", fails_once)
    whole, again = fit(tmp_path / "whole"), fit(url)
    assert next(failures, None) is None
    assert again.history == whole.history


def test_a_store_that_refuses_to_remove_is_no_reason_to_lose_a_backup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(MemoryFileSystem, "rm_file", lambda *_: 1 / 0)
    assert len(stopped_in_a_store(f"memory://{tmp_path}")) >= 4 * 4
    assert "older backups are left" in caplog.text


def test_an_upload_that_never_returns_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("SPARTITO_TIMEOUT", "1")
    never = Event()
    monkeypatch.setattr(MemoryFileSystem, "put_file", lambda *_, **__: never.wait())
    assert fit(f"memory://{tmp_path}").step == 8
    assert f"memory://{tmp_path}/fit-1 cannot be written: nothing has moved for" in caplog.text
    never.set()


TOLD_TWICE = """
import os, signal, sys
import spartito as sp
from threading import Event
from spartito.steps import task_end
from tests.training.jobs import data, trainer

class Waits(sp.Callback):
    def on_train_batch_end(self, batch, logs):
        for _ in range(2):  # at the same time: a launcher and who has started it
            os.kill(os.getpid(), signal.SIGTERM)
        task_end.SAME_SECONDS = 0.0
        print("waiting", flush=True)
        Event().wait()

backup = sp.callbacks.BackupAndRestore(sys.argv[1], every=1)
trainer().fit(data(), epochs=1, batch_size=3, callbacks=[Waits(), backup], verbose=0)
"""


def test_a_second_sigterm_ends_a_process_that_waits(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", TOLD_TWICE, str(tmp_path)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "waiting\n"
            process.terminate()
            assert process.wait(timeout=60) == -signal.SIGTERM
        finally:
            process.kill()


def test_a_worker_of_servers_comes_when_its_backup_has_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(PreemptedError):
        fit(tmp_path, Tell(5, lambda: os.kill(os.getpid(), signal.SIGTERM)))
    monkeypatch.setattr(LocalBackups, "path_of", lambda *_: tmp_path / "gone")
    with pytest.raises(UserError, match=r"gone has no manifest\.json"):
        fit(tmp_path)
    monkeypatch.setattr(SynchronousCoordination, "decides", False)
    late = fit(tmp_path)
    assert (late.step, late.epoch) == (6 + 4, 2)  # the second epoch: who has leases is asked


def kept_in(strategy: Strategy, url: str) -> list[Any]:
    """A fit that is kept, and what the same one finds then."""
    found = []
    for trains in (True, False):
        made = trainer(strategy)
        backup = sp.callbacks.BackupAndRestore(url, delete_checkpoint=False)
        more = Tell(1, lambda trains=trains: trains or pytest.fail("it trains again"))
        made.fit(data(), epochs=2, batch_size=5, callbacks=[backup, more], verbose=0)
        found.append([asdict(made.history), made.step])
        fit_count.end()
    return found


def test_all_tasks_of_a_machine_read_from_a_store(tmp_path: Path) -> None:
    for first, again in on_replicas(kept_in, 2, f"file://{tmp_path}"):
        assert first == again
        assert first[1] == 8


def test_a_complete_fit_can_be_kept(tmp_path: Path) -> None:
    whole = fit(tmp_path, delete_checkpoint=False)
    fit_count.end()
    again = fit(tmp_path, Tell(1, pytest.fail), delete_checkpoint=False)
    assert (again.history, again.step) == (whole.history, whole.step)


@pytest.mark.parametrize("removes", [True, False])
def test_a_training_that_a_callback_has_ended_is_over(tmp_path: Path, removes: bool) -> None:
    """The script is lost after its fit: started again it trains no further epoch."""

    def stopped() -> sp.Trainer:
        fit_count.forget()  # as a new process
        stops = sp.callbacks.EarlyStopping("loss", min_delta=10.0)
        made = trainer(run_dir=tmp_path / "run")
        backup = sp.callbacks.BackupAndRestore(
            tmp_path / "backup", every="epoch", share=None, delete_checkpoint=removes
        )
        later = sp.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: made.wait())
        given: list[sp.Callback] = [later, backup, stops]
        made.fit(data(), epochs=9, batch_size=5, callbacks=given, verbose=0)
        folders.release(fit_count.HOLDER)
        return made

    first = stopped()
    assert first.history.epoch == [0, 1]
    for again in (stopped(), stopped()):
        assert (again.history, again.step) == (first.history, first.step)
        config = json.loads((tmp_path / "run" / "config.json").read_bytes())
        assert config["fit"]["end"] == STOPPED


class _Unfreeze(sp.Callback):
    """From the second epoch on the first layer learns, and the second one's dropout is off."""

    def on_epoch_begin(self, epoch: int) -> None:
        if epoch == 1:
            first, second, *_ = self.trainer.model.children()
            first.requires_grad_(True)
            second.eval()


@pytest.mark.parametrize("changes", [False, True])
def test_what_a_callback_has_frozen_goes_on(tmp_path: Path, changes: bool) -> None:
    """A script that has changed meanwhile says itself what learns."""

    def begun() -> nn.Module:
        torch.manual_seed(0)
        first = nn.Linear(3, 8).requires_grad_(False)
        return nn.Sequential(first, nn.Dropout(), nn.Linear(8, 2)).double()

    def run(folder: str, until: int = 99, model: nn.Module | None = None) -> sp.Trainer:
        made = trainer(model=model or begun())
        backup = sp.callbacks.BackupAndRestore(tmp_path / folder, every=1, share=None)
        wait = sp.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: made.wait())

        def end() -> None:
            raise KeyboardInterrupt

        given: list[sp.Callback] = [_Unfreeze(), wait, Tell(until, end), backup]
        with suppress(KeyboardInterrupt):
            made.fit(data(), epochs=3, batch_size=5, callbacks=given, verbose=0)
        return made

    run("a", until=11)
    changed = begun()
    changed.get_parameter("2.bias").requires_grad_(False)
    resumed = run("a", model=changed if changes else None)
    learns = [each.requires_grad for each in resumed.model.parameters()]
    if changes:
        assert learns == [False, False, True, False]
        return
    whole = run("b")
    assert (learns, resumed.model.get_submodule("1").training) == ([True] * 4, False)
    for one, other in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert resumed.history == whole.history


def test_more_steps_are_trained_than_were_asked_for_before(tmp_path: Path) -> None:
    def until(steps: int, folder: str) -> sp.Trainer:
        fit_count.end()
        made = trainer()
        backup = sp.callbacks.BackupAndRestore(tmp_path / folder, delete_checkpoint=False)
        given: dict[str, Any] = {"epochs": 2, "batch_size": 5, "callbacks": [backup]}
        made.fit(data(), max_steps=steps, verbose=0, **given)
        return made

    found = [until(steps, "in parts") for steps in (1, 6, 9)]
    assert [(each.step, each.epoch) for each in found] == [(1, 0), (6, 1), (8, 2)]
    assert found[-1].history == until(9, "at once").history


def test_an_epoch_that_was_cut_stops_no_training(tmp_path: Path) -> None:
    def until(steps: int | None, folder: str) -> dict[str, Any]:
        fit_count.end()
        made = trainer()
        stops = sp.callbacks.EarlyStopping("loss", patience=9)
        backup = sp.callbacks.BackupAndRestore(tmp_path / folder, delete_checkpoint=False)
        given: dict[str, Any] = {"epochs": 3, "batch_size": 5, "callbacks": [stops, backup]}
        made.fit(data(), max_steps=steps, verbose=0, **given)
        return stops.state_dict()

    cut = until(5, "in parts")
    assert (cut["best_epoch"], cut["wait"]) == (0, 0)  # the second has one of its batches
    assert until(None, "in parts") == until(None, "at once")


@given(st.lists(st.floats(0.001, 10.0), min_size=50, max_size=50), st.floats(0.1, 30.0))
def test_meetings_come_in_time(steps: list[float], seconds: float) -> None:
    now = [0.0]
    interval = BySeconds(seconds, lambda: now[0])
    following, last = interval.begin(0), 0.0
    longest = max(steps)
    for step, taken in enumerate(steps, 1):
        now[0] += taken
        assert following >= step
        if step == following:
            due, following = interval.meet(step)
            assert following > step
            assert due or now[0] - last < seconds
            if due:
                assert now[0] - last >= seconds - longest
                last = now[0]


@pytest.mark.parametrize("every", [0, -1, True, 1.5, "10", "0s", "week"])
def test_intervals_that_are_none(every: Any) -> None:
    with pytest.raises(UserError, match="every="):
        interval_of(every)
