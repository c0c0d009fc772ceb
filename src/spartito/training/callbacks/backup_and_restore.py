"""Goes on at the very next step after any interruption."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spartito.checkpoint.manager import read_sections
from spartito.cluster.limits import time_limit
from spartito.errors import UserError
from spartito.folders import hold
from spartito.notes import note
from spartito.steps.task_end import PREEMPTING
from spartito.storage.atomic import read_manifest
from spartito.storage.store_lock import HeldStore
from spartito.storage.stores import open_store
from spartito.training.arguments import known_names
from spartito.training.backups import fit_count
from spartito.training.backups.fit_count import Fit
from spartito.training.backups.folder import (
    BACKUPS,
    OF,
    Backups,
    LocalBackups,
    check_training,
    folder_of,
)
from spartito.training.backups.interval import NEVER, interval_of
from spartito.training.backups.remote import RemoteBackups
from spartito.training.callback import Callback, Logs
from spartito.training.fitting.preemption import Notice, Preemption, Source, numbers_of
from spartito.training.fitting.train_modes import Roles, are_roles, take_roles
from spartito.training.history import History
from spartito.urls import is_remote, local_path

if TYPE_CHECKING:
    from spartito.training.trainer import Trainer

SOONER = 10
"""Where a backup is still being written when the next is due, it is asked for again so often."""

LONGEST = 25.0
"""Seconds after a backup from which the next one is written whatever it costs."""


class BackupAndRestore(Callback):
    """Lets `fit` with the same arguments go on where it was interrupted, as in Keras.

    A backup holds all of a training: model, optimizer, schedule, position in the data, sums of
    the epoch, history, callbacks, and the random generators of each task. With as many tasks the
    losses are bitwise those without the interruption; with another number they are equal to
    rounding where the trainer is ``deterministic``, and generators begin anew. All tasks copy
    their part and train on while a thread writes it. Backups are removed when the script ends well,
    which shows a script that is started again what its earlier fits have done.

    A signal or a notice that the machine is to be given back ends `fit` after the step in
    flight, on all tasks, with a backup of it and a `PreemptedError`, which ends the process with
    75; a second run goes on. Only the main thread hears signals.

    The folder is this job's alone until it ends: another one is refused. Its fits have numbers in
    it, over all trainers of the script; one that was interrupted is taken up by the next. A script
    that leaves out fits which are done names a directory for each.

    Args:
        directory: Where they are, for every task: a folder, or a URL that fsspec knows, as
            ``s3://bucket/run``. None: ``backup`` in the run folder. Each `fit` of a script has a
            folder of its own in it, ``fit-1``.
        every: When: after so many global steps (100), so much time ("30s", "5m", "1h" or a
            timedelta), or after each "epoch".
        share: What part of the time they take at most: one that is due waits for the next turn
            while the last cost more of the time since then, if that is less than half a minute.
            None: none waits.
        delete_checkpoint: Whether those of complete fits are removed at the end of the script.
            Else the end of a `fit` is backed up too, and the same one returns its history at once.
        save_before_preemption: Whether signals and notices are followed.
        signals: Which, by name. Handlers of the script's own are put back when `fit` ends.
        notice: Another one: a file that appears, or a function that returns something true, which
            a thread asks every second.

    Raises:
        UserError: The directory cannot be written, another job writes there, or it has the backup
            of another training.
    """

    @known_names("BackupAndRestore")
    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        every: int | str | timedelta = "60s",
        *,
        share: float | None = 0.01,
        delete_checkpoint: bool = True,
        save_before_preemption: bool = True,
        signals: Sequence[str | int] = PREEMPTING,
        notice: Source | None = None,
    ) -> None:
        """Check the arguments; nothing is written before training begins."""
        self.directory = None if directory is None else os.fspath(directory)
        if self.directory is not None and re.search(r"\{[\w:.]*\}", self.directory):
            raise UserError(
                f"BackupAndRestore({self.directory!r}) has a field in braces, and backups of one "
                "training share a folder",
                'Write BackupAndRestore("backup"): each fit has a folder of its own in it.',
            )
        self.every = every
        self.interval = interval_of(every)
        if share is not None and not (isinstance(share, int | float) and share > 0):
            raise UserError(f"share={share!r}", "Give a part of the time (0.01), or None.")
        self.share = share
        self.delete_checkpoint = delete_checkpoint
        numbers = numbers_of(signals)
        self.notice: Notice = (
            Preemption(self._leave, numbers, notice) if save_before_preemption else Notice()
        )
        self._next, self._owed, self._last = NEVER, False, 0.0
        self._of: dict[str, Any] = {}
        self._position = 0, 0
        self._fit: Fit | None = None
        self._store: HeldStore | None = None
        self._number, self._comes_late = 1, False
        self._trains, self._first = False, Roles()
        self.written = 0
        """How many were begun."""
        self.missed = 0
        """How many of them a disk or a store has refused."""

    def find(self, trainer: Trainer, of: dict[str, Any]) -> tuple[History, bool] | None:
        """Before a fit: load the newest backup of it, if there is one; all tasks call it.

        One that comes to a job which already trains gets all from those who are there. A backup
        that is older than the checkpoint which the trainer has loaded is passed over.

        Args:
            trainer: Whose it is.
            of: What is trained on what, as JSON: a backup of anything else is refused.

        Returns:
            The epochs so far, and whether the training is over; None without a backup.
        """
        self._trainer, self._of = trainer, of
        self._fit, self._number = None, 1
        if not self._trains:
            self._first = trainer.modes.roles(trainer.model)
        self.backups = self._backups_of(1)
        self._comes_late = trainer.coordination.joins
        if self._comes_late:
            return None

        with self._fetched(trainer.step if trainer.goes_on else 0, begins=True) as path:
            if path is not None:
                try:
                    trainer.load(path)
                    found = read_sections(path, OF)[OF]
                    self._take_roles(found)
                except UserError:
                    if trainer.coordination.decides:
                        raise
                    # A worker of servers that comes late: newer ones have replaced it.
                    trainer.step, trainer.epoch = self._position
                    found = {"history": asdict(History()), "over": False}
        if trainer.is_chief and (path is not None or trainer.goes_on):
            where = self.backups.where(path.name) if path else "the checkpoint that was loaded"
            note("going on after step %d, from %s", trainer.step, where)
        return None if path is None else (History(**found["history"]), found["over"])

    def hold(self, inherits: bool = False) -> None:
        """On the chief: have the directory for this job, to its end.

        Args:
            inherits: Whether this task goes on in place of a chief that was lost.

        Raises:
            UserError: Another job has it, which is named.
        """
        where = self._where
        if folder := local_path(where):  # also that of a store which lies in a file system
            hold(folder, "backups", fit_count.HOLDER, inherits)
        if is_remote(where):
            self._store = fit_count.hold_store(where, inherits)
        if self._fit is None and inherits:
            for fit in fit_count.adopt(where, self, self._number):
                self._fit = self._kept(fit)

    def _take_roles(self, found: dict[str, Any]) -> None:
        """Have what a callback had frozen and put into eval mode, unless the script is another."""
        model, first = self._trainer.model, found.get("first")  # earlier versions kept none
        if first and (self._trains or are_roles(model, first, self._first)):
            take_roles(model, found["roles"])

    def go_back(self) -> str:
        """Have model and optimizer as in the newest backup, with the options of now; all call it.

        Returns:
            Where that is; "" without one.
        """
        trainer = self._trainer
        trainer.wait()
        with self._fetched() as path:
            if path is None:
                return ""
            options = [dict(group) for group in trainer.optimizer.param_groups]
            trainer.strategy.load(path)
        for group, now in zip(trainer.optimizer.param_groups, options, strict=True):
            group.update(now)
        return self.backups.where(path.name)

    def on_train_begin(self) -> None:
        """Find out when to save first."""
        self._trains = True
        if self._fit is not None:
            self._fit.state = "running"
        self._next, self._owed = self.interval.begin(self.trainer.step), False
        self._last = time.monotonic()

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        """Save when it is due; at the last step of an epoch its end does."""
        if self._is_due and batch + 1 != self.trainer.steps_per_epoch:
            self._meet()

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """Save when it is due; also that a callback has ended the training here."""
        if self.interval.at_epochs or self._is_due:
            self._meet(ends=True)

    def on_train_end(self) -> None:
        """Keep all of this training, or what there is until the script ends."""
        if not self.delete_checkpoint:
            self._save(later=False, over=self._is_over)
        self._trainer.wait()
        self._trains = False
        if self._fit is not None:
            self._fit.state = "complete"

    def on_train_error(self, error: BaseException) -> None:
        """Leave the rest of this fit to the next one."""
        self._trains = False
        if self._fit is not None:
            self._fit.state = "interrupted"

    def state_dict(self) -> dict[str, Any]:
        """When the tasks meet next: who joins them is told."""
        return {"next": self._next, "owed": self._owed, "fit": self._number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Meet when the others do; a training that begins plans anew."""
        self._next, self._owed = state["next"], state["owed"]
        if self._comes_late:
            self._number, self._comes_late = state.get("fit", 1), False
            self.backups = self._backups_of(self._number)

    @property
    def _is_due(self) -> bool:
        """Whether to meet; not while no update is finite: the last backup is what to go back to."""
        return self.trainer.step >= self._next and not self.trainer.skips.row

    @contextmanager
    def _fetched(self, after: int = 0, begins: bool = False) -> Iterator[Path | None]:
        """Where this task reads the newest backup; None where it is of a step before ``after``.

        Where a fit ``begins`` its number is found out first.
        """
        trainer, coordination = self._trainer, self._trainer.coordination

        def newest() -> str:
            if not trainer.is_chief:
                return ""
            if begins:
                self.hold()
                self._fit = self._kept(fit_count.take(self._where, self))
                self._turn_to(self._fit.number)
            name = self.backups.newest()
            if not name:
                return f"{self._number}"
            path = self.backups.fetch(name)
            about = read_manifest(path).about
            if int(about["step"]) < after:
                return f"{self._number}"
            check_training(path, self._of)
            return f"{self._number} {name} {about['step']} {about['epoch']}"

        def fetched() -> str:
            try:
                return str(self.backups.fetch(name)) if name else ""
            except UserError:
                if coordination.decides:
                    raise
                return ""

        try:
            came = coordination.publish(lambda: coordination.attempt(newest)[0])
            number, name, step, epoch = came.split() if " " in came else (came, "", 0, 0)
            self._turn_to(int(number))
            self._position = int(step), int(epoch)
            coordination.attempt(fetched)
            yield self.backups.path_of(name) if name else None
        finally:
            self.backups.release()

    @property
    def _is_over(self) -> bool:
        """Whether a callback wants the end here: ``max_steps`` may be another next time."""
        return self.trainer.stop_training and not self.trainer.is_at_end

    def _meet(self, ends: bool = False) -> None:
        """Agree whether to save now, and when to meet again: not while one is being written.

        Args:
            ends: Whether an epoch ends here, and with it the training where a task wants that.
        """
        step, coordination = self.trainer.step, self.trainer.coordination
        saves, since = self._trainer.saves, time.monotonic() - self._last
        over = ends and self._is_over
        mine = [saves.writes, saves.cost, over, since, *self.interval.meet(step)]
        with coordination.during("save"):
            told = [json.loads(text) for text in coordination.tell_all(json.dumps(mine))]
            *_, since, due, self._next = told[0]
            if not (due or self._owed):
                return
            self._owed = any(writes for writes, *_ in told)
            if self._owed:
                self._next = step + max(1, (self._next - step) // SOONER)
            elif since >= self._wait(max(cost for _, cost, *_ in told)):
                self._last = time.monotonic()
                self._save(later=True, over=any(over for _, _, over, *_ in told))

    def _wait(self, cost: float) -> float:
        """Seconds from one backup to the next, where one costs so many."""
        return min(cost / self.share, LONGEST) if self.share is not None else 0.0

    def _save(self, later: bool, over: bool = False) -> bool:
        trainer, backups = self._trainer, self.backups

        def begin() -> dict[str, Any]:
            return {**backups.begin(name), OF: self._of}

        def end() -> None:
            if self._store is not None:
                self._store.check()
            backups.end(name)

        self.written += 1
        name = f"step-{trainer.step:08d}"
        return trainer.saves.save(
            backups.directory / name,
            begin,
            end,
            later=later,
            otherwise=self._miss,
            beside=lambda: {
                OF: {"history": asdict(trainer.history), "over": over, **self._roles()}
            },
            keeps=not self.delete_checkpoint,
        )

    def _roles(self) -> dict[str, Roles]:
        """What no tensor tells of the model, now and when the fit began; all tasks call it."""
        trainer = self._trainer
        mine = {"first": self._first, "roles": trainer.modes.roles(trainer.model)}
        told = [json.loads(text) for text in trainer.coordination.tell_all(json.dumps(mine))]
        return {
            when: {kind: sorted({n for one in told for n in one[when][kind]}) for kind in names}
            for when, names in mine.items()
        }

    def _leave(self) -> str:
        """Save, and say where it goes on."""
        trainer, backups = self._trainer, self.backups
        if not trainer.coordination.decides:
            return "its work is left to others"
        done = self._save(later=False)
        where = f"step {trainer.step} is saved" if done else f"step {trainer.step} cannot be saved"
        return f"{where}, and the next run goes on from {backups.where('')}"

    def _miss(self) -> None:
        """One could not be written."""
        self.missed += 1

    @property
    def _where(self) -> str:
        """The folder or URL, in which each fit has a folder."""
        if self.directory is not None:
            if is_remote(short := self.directory.rstrip("/")):
                return short
            return self.directory if is_remote(self.directory) else os.path.realpath(self.directory)
        if self._trainer.run_dir is None:
            raise UserError(
                "BackupAndRestore has no directory, and this trainer no run folder",
                'BackupAndRestore("backup") or Trainer(..., run_dir="runs/1")',
            )
        return os.path.realpath(self._trainer.run_dir / BACKUPS)

    def _turn_to(self, number: int) -> None:
        """Have the backups of the fit of this number."""
        if number != self._number:
            self._number, self.backups = number, self._backups_of(number)

    def _backups_of(self, number: int) -> Backups:
        where = self._where
        if is_remote(where):
            return RemoteBackups(open_store(f"{where}/{folder_of(number)}", time_limit() / 2))
        return LocalBackups(Path(where) / folder_of(number))

    def _kept(self, fit: Fit) -> Fit:
        """A fit whose backups stay until the script ends, or longer."""
        if self.delete_checkpoint:
            fit.remove = self._backups_of(fit.number).remove
            fit.folder = Path(self._where) if self.directory is None else None
        return fit
