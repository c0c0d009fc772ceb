"""Writes the figures of every epoch for TensorBoard."""

from __future__ import annotations

import os
from pathlib import Path

from spartito.errors import UserError
from spartito.report.figures import VALIDATION, scalars
from spartito.training.arguments import known_names
from spartito.training.callback import Callback, Logs
from spartito.training.callbacks.event_file import EventFile

_RUNS = ("train", "validation")


class TensorBoard(Callback):
    """Writes ``epoch_loss``, ``epoch_<metric>`` and the speed of each epoch, counted from 1.

    Training and validation are two runs, the subfolders ``train`` and ``validation``, with the
    same tags, so their curves lie over each other. The chief alone writes. Look at them with
    ``tensorboard --logdir DIRECTORY``.

    Args:
        directory: Where the runs are; None: ``logs`` in the run folder.

    Raises:
        UserError: The directory cannot be written, or another job writes there.
    """

    @known_names("TensorBoard")
    def __init__(self, directory: str | os.PathLike[str] | None = None) -> None:
        """Remember the directory; nothing is written before training begins."""
        self.directory = None if directory is None else Path(directory)
        self._files: dict[str, EventFile] = {}

    def on_train_begin(self) -> None:
        """Open the event file of the training; that of validation comes with its first figure."""
        if self.trainer.is_chief:
            self._open(_RUNS[0])

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """Add the figures of this epoch."""
        if not self.trainer.is_chief:
            return
        self.write(epoch, logs)

    def write(self, epoch: int, logs: Logs) -> None:
        """Add the figures of an epoch; an evaluator calls this itself.

        Args:
            epoch: Its number, counted from 0.
            logs: Its figures by name.
        """
        figures = {n: value for n, value in scalars(logs).items() if n not in ("epoch", "step")}
        validation = {n: v for n, v in figures.items() if n.startswith(VALIDATION)}
        parts = ({n: v for n, v in figures.items() if n not in validation}, validation)
        for run, part in zip(_RUNS, parts, strict=True):
            if part:
                tags = {f"epoch_{name.removeprefix(VALIDATION)}": v for name, v in part.items()}
                self._open(run).scalars(epoch + 1, tags)

    def on_train_end(self) -> None:
        """Close the files."""
        self._close()

    def on_train_error(self, error: BaseException) -> None:
        """Close the files; what was written stays."""
        self._close()

    @property
    def folder(self) -> Path:
        """Where the runs are; a `UserError` when that is not known."""
        if self.directory is not None:
            return self.directory
        if self.trainer.run_dir is None:
            raise UserError(
                "TensorBoard has no directory, and this trainer no run folder",
                'TensorBoard("logs") or Trainer(..., run_dir="runs/1")',
            )
        return Path(self.trainer.run_dir) / "logs"

    def _open(self, run: str) -> EventFile:
        if run not in self._files:
            directory = self.folder / run
            try:
                self._files[run] = EventFile(directory)
            except OSError as error:
                raise UserError(
                    f"{directory} cannot be written: {error.strerror}",
                    "Name a folder that this process may write to.",
                ) from error
        return self._files[run]

    def _close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()
