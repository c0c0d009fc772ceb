"""Saves the training, so that it can go on, and the model that did best."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from spartito.checkpoint.in_store import StoredCheckpoints
from spartito.checkpoint.manager import CheckpointManager, Score
from spartito.errors import TaskLostError, UserError
from spartito.notes import warn
from spartito.report.figures import VALIDATION
from spartito.training.arguments import known_names
from spartito.training.callback import Callback, Logs, Training
from spartito.training.callbacks.monitor import Monitor
from spartito.urls import is_remote, local_path

_DEFAULT = "val_loss"
_FILES = (".keras", ".h5", ".hdf5", ".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".tf")


class ModelCheckpoint(Callback):
    """Saves a checkpoint after every epoch and remembers which one is the best.

    Each checkpoint is a directory ``step-00000400`` with ``model.safetensors`` under the model's
    own names; ``best.json`` points to the best one. In a job with an evaluator every epoch is
    saved, and the evaluator points to the best by its own ``val_`` figures. All replicas take
    part in collecting the state, the chief alone writes. A disk that is full ends no training: it
    is said once, and the next checkpoint is another try. Where the last one is refused too, and
    nothing else has the trained model, `fit` ends with an error once the training is complete.

    Args:
        directory: Where they are: a folder, or the URL of a store (then ``best.json`` is missing,
            and the manifest of each says whether it was the best); None: ``checkpoints`` in the run
            folder.
        monitor: The figure that makes one the best. A fit without validation data watches
            ``loss`` in place of the default.
        mode: "min", "max", or "auto": accuracies up, everything else down.
        save_best_only: Whether an epoch is saved only when it is the best so far.
        keep: How many of the newest stay; None: all. The best always stays.
        every_steps: Saves after so many global steps too; None: after epochs alone.
        asynchronous: Whether training goes on while a checkpoint is written, from a copy of model
            and optimizer: one at a time, and the end of `fit` waits for the last.

    Raises:
        UserError: The directory cannot be written, or no epoch reports the monitor.
    """

    @known_names("ModelCheckpoint")
    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        monitor: str = _DEFAULT,
        mode: str = "auto",
        save_best_only: bool = False,
        keep: int | None = None,
        every_steps: int | None = None,
        asynchronous: bool = False,
    ) -> None:
        """Check the arguments; nothing is written before training begins."""
        if every_steps is not None and every_steps < 1:
            raise UserError(
                f"every_steps is {every_steps}, and a step is the least", "every_steps=100"
            )
        if every_steps is not None and save_best_only:
            raise UserError(
                "every_steps and save_best_only exclude each other: "
                "what is best is known at the end of an epoch",
                "Use two ModelCheckpoints with two directories.",
            )
        CheckpointManager("", keep)
        if directory is not None:
            _check_folder(os.fspath(directory))
        where = None if directory is None else os.fspath(directory)
        self.url = where if where and is_remote(where) and not local_path(where) else ""
        self.directory = None if where is None or self.url else Path(local_path(where))
        self.monitor = Monitor(monitor, mode)
        self.save_best_only = save_best_only
        self.keep = keep
        self.every_steps = every_steps
        self.asynchronous = asynchronous
        self.best: float | None = None
        self._best_of = ""
        self._seen = 0

    @property
    def manager(self) -> CheckpointManager | StoredCheckpoints:
        """The checkpoints of this training; a `UserError` when it is not known where."""
        if self.url:
            return StoredCheckpoints(self.url, self.keep)
        return self.local_manager

    @property
    def local_manager(self) -> CheckpointManager:
        """Those in a folder; a `UserError` when it is not known where, or they are in a store."""
        if self.url:
            raise UserError(
                f"ModelCheckpoint({self.url!r}) in a job with an evaluator, which reads them from "
                "a folder",
                "Name a folder that all tasks share.",
            )
        directory = self.directory
        if directory is None:
            if self.trainer.run_dir is None:
                raise UserError(
                    "ModelCheckpoint has no directory, and this trainer no run folder",
                    'ModelCheckpoint("checkpoints") or Trainer(..., run_dir="runs/1")',
                )
            directory = Path(self.trainer.run_dir) / "checkpoints"
        return CheckpointManager(directory, self.keep)

    def set_trainer(self, trainer: Training) -> None:
        """As `Callback.set_trainer`; another training has a best of its own."""
        if getattr(self, "trainer", trainer) is not trainer:
            self.best = None
        super().set_trainer(trainer)

    def on_train_begin(self) -> None:
        """Find out at once whether the directory can be written."""
        manager, self._seen = self.manager, self.trainer.step
        if self.trainer.is_chief:
            manager.prepare()
            if self.trainer.step == 0 and (earlier := manager.mine()):
                gone = "" if self.url else "replaces those of the same steps"
                if self.keep is not None:
                    gone += f"{', and ' if gone else ''}keep={self.keep} removes the others"
                warn(
                    "%s has %d checkpoints of an earlier training, as %s, and this one begins "
                    "anew: %s.\n  Name another folder to keep them, or load one to go on.",
                    self.url or manager.directory, len(earlier), os.path.basename(earlier[-1]),
                    gone or "its own come beside them",
                )  # fmt: skip

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        """Save when ``every_steps`` says so."""
        step = self.trainer.step
        # Batches of one accumulated step share its number.
        if self.every_steps is None or step % self.every_steps or step == self._seen:
            return
        # The end of the epoch follows at once and saves the same step with its validation.
        if batch + 1 != self.trainer.steps_per_epoch:
            self._save({})
        self._seen = step

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """Save the epoch, as the best when it is."""
        if self.trainer.left_to_evaluator and self.monitor.name.startswith(VALIDATION):
            self._save(logs)
            return
        if self.asynchronous:  # whether the best so far could be written
            self.trainer.wait()
        monitor = self._monitor_for(logs)
        value = monitor.read(logs)
        if self._best_of not in ("", monitor.name):  # a fit without a validation, then one with it
            self.best = None
        self._best_of = monitor.name
        before, is_best = self.best, monitor.better(value, self.best)
        if is_best:
            self.best = value
        try:
            if is_best or not self.save_best_only:
                self._save(logs, (monitor.name, value) if is_best else None, before)
        except TaskLostError:  # where the training goes on it is saved again
            self.best = before
            raise

    def state_dict(self) -> dict[str, Any]:
        """The best value so far, and the last step that was saved within an epoch."""
        return {"best": self.best, "of": self._best_of, "seen": self._seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from the best value of the training that is resumed."""
        self.best, self._seen = state["best"], state.get("seen", self._seen)
        self._best_of = state.get("of", "")

    def _monitor_for(self, logs: Logs) -> Monitor:
        validated = any(name.startswith(VALIDATION) for name in logs)
        if self.monitor.name == _DEFAULT and not validated and not self.save_best_only:
            return Monitor("loss", self.monitor.mode)
        return self.monitor

    def _save(self, logs: Logs, best: Score | None = None, before: float | None = None) -> None:
        """Write it; where a disk refuses, the best one is that of ``before``."""

        def otherwise() -> None:
            if best is not None:
                self.best = before

        manager, name = self.manager, f"step-{self.trainer.step:08d}"
        self.trainer.save(
            manager.directory / name,
            lambda: manager.begin(name, dict(logs), best),
            asynchronous=self.asynchronous,
            otherwise=otherwise,
            then=lambda: manager.end(name, best),
        )


def _check_folder(name: str) -> None:
    """Refuse what Keras and others would take for the name of a file, or of many."""
    last = Path(name).name
    if "{" in name or last.endswith(_FILES):
        raise UserError(
            f"ModelCheckpoint({name!r}) names files, and it takes a folder, in which checkpoints "
            "are called by their step: step-00000400",
            'Write ModelCheckpoint("checkpoints"); best.json in it names the best one.',
        )
