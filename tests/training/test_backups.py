"""Backups of a training that is killed, or whose disk is full, and when they are due."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import spartito as sp
from spartito.errors import PreemptedError, UserError
from spartito.failpoints import ENV
from spartito.training import preemption
from spartito.training.interval import BySeconds, interval_of
from tests.training.jobs import data, trainer

LIMIT = 4096  # bytes of a file

SCRIPT = """
import sys
import spartito as sp
from tests.training.jobs import data, trainer
made = trainer(metrics=["accuracy"])
backup = sp.callbacks.BackupAndRestore(sys.argv[1], every=1, share=None)
history = made.fit(data(), epochs=40, batch_size=3, callbacks=[backup], verbose=0)
print(history.history, made.step, made.model[0].weight.sum().item())
"""


def run(folder: Path, failpoint: str = "") -> subprocess.CompletedProcess[str]:
    env = {**os.environ, ENV: failpoint} if failpoint else dict(os.environ)
    argv = [sys.executable, "-c", SCRIPT, str(folder)]
    return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=100)


@pytest.mark.slow
def test_killed_inside_of_a_save(tmp_path: Path) -> None:
    killed = run(tmp_path / "a", "storage.directory.before_manifest:kill:3")
    assert killed.returncode == -signal.SIGKILL
    resumed, whole = run(tmp_path / "a"), run(tmp_path / "b")
    assert "going on after step" in resumed.stderr
    assert resumed.stdout == whole.stdout
    assert resumed.stdout.startswith("{'loss'")
    assert not [*(tmp_path / "a").iterdir()]


class Tell(sp.Callback):
    """Does something after a step."""

    def __init__(self, step: int, what: Any) -> None:
        self.step, self.what = step, what

    def on_train_batch_end(self, batch: int, logs: Any) -> None:
        if self.trainer.step == self.step:
            self.what()


def fit(
    folder: Path, *others: sp.Callback, model: nn.Module | None = None, **options: Any
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
    assert caplog.text.count("File too large") == 1
    assert [path.name for path in (tmp_path / "checkpoints").glob("step-*")] == ["step-00000008"]
    assert saving.manager.best == tmp_path / "checkpoints" / "step-00000008"
    with no_file_larger_than(LIMIT), pytest.raises(UserError, match="File too large"):
        trainer(model=large).save(tmp_path / "asked")


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


def test_a_complete_fit_can_be_kept(tmp_path: Path) -> None:
    whole = fit(tmp_path, delete_checkpoint=False)
    again = fit(tmp_path, Tell(1, pytest.fail), delete_checkpoint=False)
    assert (again.history, again.step) == (whole.history, whole.step)


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
