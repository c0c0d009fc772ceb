"""The callbacks that every `fit` has beside those of the user."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from spartito.notes import note
from spartito.training.callback import Callback, Training
from spartito.training.callbacks.backup_and_restore import BackupAndRestore
from spartito.training.callbacks.model_checkpoint import ModelCheckpoint
from spartito.training.callbacks.progress_bar import ProgressBar
from spartito.training.evaluation.evaluator import first_checkpoint, own_checkpoint
from spartito.training.files.heartbeat import Heartbeat
from spartito.training.files.output_folders import take_outputs
from spartito.training.files.run_folder import RunFolder
from spartito.training.fitting.nonfinite import IGNORE, NonFinite

if TYPE_CHECKING:
    from spartito.training.trainer import Trainer


def with_own(
    trainer: Training,
    given: Sequence[Callback],
    folder: RunFolder | None,
    fit: int,
    verbose: bool,
) -> list[Callback]:
    """The user's callbacks, and those that every `fit` has.

    Checkpoints come late: they hold the state of all others after the same epoch. Backups hold
    theirs too. Last comes what tells of checkpoints.
    """
    own: list[Callback] = [] if trainer.on_nonfinite == IGNORE else [NonFinite()]
    if verbose and not any(isinstance(callback, ProgressBar) for callback in given):
        own.append(ProgressBar())
    if folder is not None:
        own.append(folder)
    checkpoint = first_checkpoint(given)
    if checkpoint is None and trainer.left_to_evaluator:
        checkpoint = own_checkpoint(trainer.run_dir)
        own.append(checkpoint)
    if checkpoint is not None and trainer.is_chief:
        checkpoint.set_trainer(trainer)
        if trainer.left_to_evaluator or not checkpoint.url:
            own.append(Heartbeat(checkpoint.local_manager, fit))
    if trainer.left_to_evaluator and trainer.is_chief:
        note("validation is left to the evaluator: this history has no val_ figures")
    return sorted([*given, *own], key=_turn)


def _turn(callback: Callback) -> int:
    late = (ModelCheckpoint, BackupAndRestore, Heartbeat)
    return next((turn for turn, kind in enumerate(late, 1) if isinstance(callback, kind)), 0)


def take_office(trainer: Trainer) -> bool:
    """Make ``trainer`` the chief's, or no longer, as the tasks have their ranks now.

    Returns whether that has changed; it has other callbacks then.
    """
    is_chief = trainer.coordination.cluster.is_chief
    changed = is_chief != trainer.is_chief
    if changed:
        trainer.is_chief = is_chief
        trainer._folder = RunFolder(trainer.run_dir) if trainer.run_dir and is_chief else None
        trainer.callbacks = trainer._all_callbacks()
        for callback in trainer.callbacks:
            callback.set_trainer(trainer)
    take_outputs(trainer, inherits=True)
    return changed
