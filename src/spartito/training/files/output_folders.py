"""The folders that a `fit` writes into, which are this job's alone as long as it runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from spartito.folders import hold, release
from spartito.training.backups.fit_count import hold_store
from spartito.training.callback import Callback, Training
from spartito.training.callbacks.backup_and_restore import BackupAndRestore
from spartito.training.callbacks.csv_logger import CSVLogger
from spartito.training.callbacks.model_checkpoint import ModelCheckpoint
from spartito.training.callbacks.tensorboard import TensorBoard
from spartito.training.files.run_folder import RunFolder


def take_outputs(trainer: Training, inherits: bool = False) -> None:
    """On the chief: have its callbacks' folders for this job, or refuse.

    Args:
        trainer: With the callbacks of the running `fit`.
        inherits: Whether this task goes on in place of a chief that was lost.

    Raises:
        UserError: Another job writes there, or two callbacks into one folder.
    """
    if not trainer.is_chief:
        return
    for callback in trainer.callbacks:
        if isinstance(callback, BackupAndRestore):
            callback.hold(inherits)
        elif isinstance(callback, ModelCheckpoint) and callback.url:
            hold_store(callback.url, inherits)
        elif (output := output_of(callback)) is not None:
            folder, what, file = output
            hold(folder, what, callback, inherits, file=file)


def output_of(callback: Callback) -> tuple[Path, str, str] | None:
    """Where a callback writes during a `fit`: the folder, what, and into which file alone.

    None where it needs nothing for itself.
    """
    if isinstance(callback, ModelCheckpoint):
        if callback.url:
            return None  # a store is held besides
        return callback.local_manager.directory, "checkpoints", ""
    if isinstance(callback, RunFolder):
        return callback.directory, "figures", ""
    if isinstance(callback, TensorBoard):
        return callback.folder, "events", ""
    if isinstance(callback, CSVLogger) and not callback.is_device:
        return callback.path.parent, "rows", callback.path.name
    return None


@contextmanager
def held_outputs(trainer: Training) -> Iterator[None]:
    """A `fit`, in which its folders are this job's; all tasks are refused where the chief is."""
    before = list(trainer.callbacks)

    def take() -> str:
        take_outputs(trainer)
        return ""

    try:
        if not trainer.coordination.joins:  # else when the others have told who is the chief
            trainer.coordination.attempt(take)
        yield
    finally:
        for callback in (*before, *trainer.callbacks):
            release(callback)
