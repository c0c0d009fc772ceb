"""Two jobs, or two trainings of one script, and the folders that they write into."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

import spartito as sp
from spartito.errors import PreemptedError, UserError
from spartito.folders import LOCK
from spartito.training.backups import fit_count
from spartito.training.backups.identity import digest, sample, spread
from tests.commands import commands_in
from tests.training.jobs import data, trainer

HOLDER = """
import spartito as sp
from tests.training.jobs import data, trainer

class Wait(sp.Callback):
    def on_train_batch_end(self, batch, logs):
        if self.trainer.step == 3:
            print("in its third step", flush=True)
            open("go").close()  # until the test opens it, too

saving = sp.callbacks.ModelCheckpoint("checkpoints")
backup = sp.callbacks.BackupAndRestore("backups", every=1, share=None)
rows, events = sp.callbacks.CSVLogger("epochs.csv"), sp.callbacks.TensorBoard("events")
made = trainer(run_dir="run")
given = [Wait(), saving, backup, rows, events]
made.fit(data(), epochs=2, batch_size=5, callbacks=given, verbose=0)
print("ended after", made.step)
"""


@pytest.fixture(autouse=True)
def _script() -> Iterator[None]:
    """Each test is a script."""
    yield
    fit_count.end()


class Tell(sp.Callback):
    """Does something after a step."""

    def __init__(self, step: int, what: Callable[[], object]) -> None:
        self.step, self.what = step, what

    def on_train_batch_end(self, batch: int, logs: Any) -> None:
        if self.trainer.step == self.step:
            self.what()


def leave() -> None:
    """As a machine that is taken away."""
    os.kill(os.getpid(), signal.SIGTERM)


def fit(folder: Path | str, *others: sp.Callback, of: Any = None, **options: Any) -> sp.Trainer:
    """Two epochs of four steps with a backup after each."""
    made = trainer(**options)
    backup = sp.callbacks.BackupAndRestore(folder, every=1, share=None)
    given = data() if of is None else of
    made.fit(given, epochs=2, batch_size=5, callbacks=[*others, backup], verbose=0)
    return made


def weights(made: sp.Trainer) -> list[float]:
    return [p.sum().item() for p in made.model.parameters()]


def test_a_second_job_is_refused_and_the_first_one_goes_on(tmp_path: Path) -> None:
    with commands_in(tmp_path) as commands:
        commands.write("train.py", HOLDER)
        os.mkfifo(tmp_path / "go")
        root = {"PYTHONPATH": str(Path(__file__).parents[2])}
        first = commands.start(sys.executable, "train.py", "--lr", "0.1", env=root)
        first.wait_for("in its third step")
        figures = (tmp_path / "run" / "config.json").read_bytes()
        who = rf"in use by another job: process {first.popen.pid} on .*train.py --lr 0.1"
        with pytest.raises(UserError, match=who):
            fit(tmp_path / "backups")
        with pytest.raises(UserError, match=who):
            trainer(run_dir=tmp_path / "run")
        with pytest.raises(UserError, match=who):  # the same folder by another name
            fit(f"file://{tmp_path}/backups")
        made = trainer()
        for callback in (
            sp.callbacks.ModelCheckpoint(tmp_path / "checkpoints"),
            sp.callbacks.CSVLogger(tmp_path / "epochs.csv"),
            sp.callbacks.CSVLogger(tmp_path / "epochs.csv", append=True),
            sp.callbacks.TensorBoard(tmp_path / "events"),
        ):
            with pytest.raises(UserError, match=who):
                made.fit(data(), epochs=1, callbacks=[callback], verbose=0)
        assert made.step == 0
        made.fit(data(), epochs=1, callbacks=sp.callbacks.CSVLogger(tmp_path / "b.csv"), verbose=0)
        assert (tmp_path / "run" / "config.json").read_bytes() == figures
        (tmp_path / "go").write_text("")
        ended = first.end()
        assert (ended.code, ended.out.splitlines()[-1]) == (0, "ended after 8")
    assert not [*tmp_path.rglob(f"{LOCK}*")]
    assert len((tmp_path / "epochs.csv").read_text().splitlines()) == 3
    assert not [*(tmp_path / "backups").iterdir()]


def test_two_callbacks_with_one_folder_are_refused(tmp_path: Path) -> None:
    one, other = (sp.callbacks.ModelCheckpoint(tmp_path, monitor="loss") for _ in range(2))
    made = trainer()
    with pytest.raises(UserError, match="two of this process write checkpoints into"):
        made.fit(data(), epochs=1, callbacks=[one, other], verbose=0)
    for _ in range(2):  # one after the other, they may
        made.fit(data(), epochs=1, callbacks=[one], verbose=0)
    trainer().fit(data(), epochs=1, callbacks=[other], verbose=0)
    assert not (tmp_path / LOCK).exists()


def test_an_earlier_run_of_a_script_keeps_its_figures(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def run(epochs: int, **options: Any) -> str:
        made, saving = trainer(run_dir=tmp_path, **options), sp.callbacks.ModelCheckpoint(keep=1)
        made.fit(data(), epochs=epochs, batch_size=5, callbacks=saving, verbose=0)
        return (tmp_path / "history.jsonl").read_text()

    first = run(2)
    assert not caplog.text
    second = run(1, **rate(0.001))
    assert "checkpoints has 1 checkpoints of an earlier training, as step-00000008" in caplog.text
    assert "and keep=1 removes the others" in caplog.text
    assert len(run(1).splitlines()) == 1
    assert [(tmp_path / f"history.jsonl.{n}").read_text() for n in (1, 2)] == [first, second]
    assert "fit" in (tmp_path / "config.json.2").read_text()


def test_a_training_that_goes_on_is_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made, saving = trainer(run_dir=tmp_path), sp.callbacks.ModelCheckpoint(keep=1)
    made.fit(data(), epochs=1, batch_size=5, callbacks=saving, verbose=0)
    again, saving = trainer(run_dir=tmp_path), sp.callbacks.ModelCheckpoint(keep=1)
    again.load(tmp_path / "checkpoints")
    again.fit(data(), epochs=3, batch_size=5, callbacks=saving, verbose=0)
    assert len((tmp_path / "history.jsonl").read_text().splitlines()) == 3
    assert not [*tmp_path.glob("*.1")]
    assert "earlier" not in caplog.text


def test_links_to_a_folder_of_backups_are_that_folder(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "backups")
    first, second = halves()
    fit(tmp_path / "backups", of=first)
    fit(tmp_path / "link", of=second)
    assert sorted(path.name for path in (tmp_path / "backups").glob("fit-*")) == ["fit-1", "fit-2"]


def test_the_end_of_a_script_removes_nothing_of_who_took_its_store(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It was frozen, and another job has come since."""
    fit(f"file://{tmp_path}/")
    kept = sorted(tmp_path.glob("fit-1/*/*"))
    assert kept
    (record,) = (tmp_path / "spartito-lock").iterdir()
    raw = json.loads(record.read_bytes().partition(b"\n")[0]) | {"host": "node7"}
    record.rename(record.with_name("holder-0123456789abcdef.json")).write_text(json.dumps(raw))
    fit_count.end()
    assert "backups of a complete training are left" in caplog.text
    assert "on node7" in caplog.text
    assert sorted(tmp_path.glob("fit-1/*/*")) == kept


def test_a_fit_has_one_backup(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="2 BackupAndRestore in one fit"):
        fit(tmp_path / "a", sp.callbacks.BackupAndRestore(tmp_path / "b"))


def halves() -> list[tuple[Tensor, Tensor]]:
    x, y = data(40)
    return [(x[:20], y[:20]), (x[20:], y[20:])]


@pytest.mark.parametrize("keeps", [True, False])
def test_folds_do_not_mix(tmp_path: Path, keeps: bool) -> None:
    """Each with a trainer of its own; the second is lost, and the script starts again."""

    def fold(half: Any, *others: sp.Callback) -> sp.Trainer:
        made = trainer()
        backup = sp.callbacks.BackupAndRestore(
            tmp_path, every=1, share=None, delete_checkpoint=not keeps
        )
        made.fit(half, epochs=2, batch_size=5, callbacks=[*others, backup], verbose=0)
        return made

    first, second = halves()
    whole = [weights(fit(tmp_path / f"whole-{n}", of=half)) for n, half in enumerate(halves())]
    assert weights(fold(first)) == whole[0]
    with pytest.raises(PreemptedError):
        fold(second, Tell(3, leave))
    fit_count.forget()  # a new process
    seen = list[int]()
    again = fold(first, Tell(1, lambda: seen.append(1)))
    assert weights(again) == whole[0]
    assert not seen  # it does not train anew
    after = fold(second, Tell(2, lambda: pytest.fail("it was further")))
    assert weights(after) == whole[1]
    fit_count.end()
    assert sorted(path.name for path in tmp_path.glob("fit-*")) == ["fit-1", "fit-2"] * keeps
    assert not (tmp_path / LOCK).exists()


def test_what_is_not_complete_stays_at_the_end(tmp_path: Path) -> None:
    fit(tmp_path)
    with pytest.raises(PreemptedError):
        fit(tmp_path, Tell(3, leave))
    fit_count.end()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fit-1", "fit-2"]


def test_a_script_that_fails_after_a_fit_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "last_value", ValueError("what ends the script"), raising=False)
        fit_count.end()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fit-1"]


def test_a_fit_that_failed_before_its_first_step_is_taken_up(tmp_path: Path) -> None:
    with pytest.raises(PreemptedError):
        fit(tmp_path, Tell(3, leave))
    fit_count.forget()
    shut = sp.callbacks.ModelCheckpoint(tmp_path / "checkpoints")
    (tmp_path / "checkpoints").touch()
    with pytest.raises(UserError, match="cannot be written"):
        fit(tmp_path, shut)
    assert fit(tmp_path, Tell(2, lambda: pytest.fail("it begins anew"))).step == 8


def rate(value: float) -> dict[str, Any]:
    return {"optimizer": lambda parameters: torch.optim.SGD(parameters, value)}


def interrupted(folder: Path, *others: sp.Callback, **options: Any) -> None:
    with pytest.raises(PreemptedError):
        fit(folder, *others, Tell(3, leave), **options)
    fit_count.forget()


def test_another_learning_rate_is_refused_by_name(tmp_path: Path) -> None:
    interrupted(tmp_path)
    with pytest.raises(UserError, match=r"lr was 0\.1 there, and is 0\.001 now"):
        fit(tmp_path, **rate(0.001))
    assert fit(tmp_path).step == 8


def test_a_rate_that_a_schedule_or_a_checkpoint_changed_is_no_other(tmp_path: Path) -> None:
    def scheduler(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    whole = fit(tmp_path / "whole", scheduler=scheduler)
    interrupted(tmp_path / "kept", scheduler=scheduler)
    made = trainer(scheduler=scheduler)
    made.fit(data(), epochs=1, batch_size=5, callbacks=[Tell(2, lambda: made.save(tmp_path / "c"))])
    again = trainer(scheduler=scheduler)
    again.load(tmp_path / "c")  # older than the backup, whose step it passes over
    backup = sp.callbacks.BackupAndRestore(tmp_path / "kept")
    again.fit(data(), epochs=2, batch_size=5, callbacks=[backup], verbose=0)
    assert weights(again) == weights(whole)


def test_other_data_is_refused(tmp_path: Path) -> None:
    first, second = halves()
    interrupted(tmp_path, of=first)
    with pytest.raises(UserError, match="is the backup of another training: its data was another"):
        fit(tmp_path, of=second)
    assert fit(tmp_path, of=first).step == 8


class Noisy(Dataset[Any]):
    """Adds noise of torch's generator, as augmentations do, seldom or always."""

    def __init__(self, chance: float) -> None:
        self.rows, self.chance = data(), chance

    def __len__(self) -> int:
        return len(self.rows[0])

    def __getitem__(self, index: int) -> Any:
        x, y = (part[index] for part in self.rows)
        if torch.rand(()) < self.chance:
            x = x + torch.randn(3)
        return x, y


@pytest.mark.parametrize("chance", [1.0, 0.01])
def test_data_that_is_random_is_not_compared(tmp_path: Path, chance: float) -> None:
    interrupted(tmp_path, of=Noisy(chance))
    assert fit(tmp_path, of=Noisy(chance)).step == 8


def test_a_sample_changes_no_random_number() -> None:
    chain = sp.data.as_dataset(Noisy(1.0))
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    assert sample(chain) is None
    assert torch.equal(torch.rand(2), expected)


def test_what_a_sample_is() -> None:
    x, y = data(1000)
    whole = sample(sp.data.as_dataset(TensorDataset(x, y)))
    assert whole is not None
    assert len(whole) == 64
    assert whole == sample(sp.data.arrays(x, y).shuffle().batch(7))
    y = y.clone()
    y[500:700] += 1
    assert whole != sample(sp.data.arrays(x, y).batch(5))
    assert sample(sp.data.as_dataset(iter([(x, y)]))) is None  # a stream, which would be read
    assert sample(sp.data.arrays(x[:0], y[:0]).batch(5)) is None
    assert [*sorted(spread(10, 64))] == [*range(10)]
    first = spread(1000, 64)
    assert len({*first}) == 64
    assert {index // 250 for index in first[:4]} == {0, 1, 2, 3}
    assert digest((x[0].bfloat16(), "a")) != digest((x[0].bfloat16(), "b"))
    assert not re.search("0x", digest(object()))
    assert digest(object()) == digest(object())
