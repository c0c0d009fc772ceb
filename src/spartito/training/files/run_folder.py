"""The folder that a run leaves behind: settings, history, and a report to look at."""

from __future__ import annotations

import errno
import json
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from spartito import __version__, status
from spartito.aside import put_aside
from spartito.cluster.resolver import starter
from spartito.engine.updates.optimizers import unwrap
from spartito.errors import UnwritableError, writable
from spartito.notes import note, warn
from spartito.report.evaluations import EVALUATIONS, keep_until
from spartito.report.lines import line_of, record_of
from spartito.report.page import OF_A_PAGE, REPORT, write_report
from spartito.report.run_ends import COMPLETE, NOT_FINITE, STOPPED
from spartito.storage.atomic import check_writable, write_file_atomically
from spartito.storage.own_files import begins_with, check_own, has_keys
from spartito.training.callback import Callback, Logs
from spartito.training.fitting.nonfinite import STOP
from spartito.training.summary import summarize

CONFIG = "config.json"
HISTORY = "history.jsonl"
FILES = {
    CONFIG: has_keys("spartito", "torch"),
    HISTORY: begins_with('{"epoch": '),
    EVALUATIONS: begins_with('{"epoch": '),
    REPORT: OF_A_PAGE,
}
"""What is written here, and how it is known."""


def check_task(run_dir: Path, task: str) -> None:
    """Refuse a run folder with files of the user's where those of a task are to be.

    Args:
        run_dir: It may be missing.
        task: What the task is called: "worker 0".

    Raises:
        UserError: There is one, which is named.
    """
    name = task.replace(" ", "-")
    files = {
        f"{name}.json": has_keys("task", "peak_memory_bytes"),
        f"{name}{status.SUFFIX}": begins_with('{"task": '),  # a lost machine may have cut it off
    }
    check_own(run_dir / status.FOLDER, files)


class RunFolder(Callback):
    """Writes ``config.json``, ``history.jsonl`` and ``report.html``; only the chief has one.

    Raises `UserError` at once when ``directory`` cannot be written. A disk that is full later ends
    no training: that is said once, and lines of the history are written when there is space.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._written: set[int] = set()
        self._waiting = ""
        self._refused = False
        check_writable(directory)
        check_own(directory, FILES)

    def on_train_begin(self) -> None:
        """Write the settings; a run that starts from nothing starts its history anew."""
        self._written, self._waiting = set(), ""
        self._left_out = self.trainer.skips.total  # by fits before this one
        if self.trainer.epoch == 0:
            self._leave_earlier()
            write_file_atomically(self.directory / HISTORY, "")
        write_file_atomically(self.directory / CONFIG, json.dumps(self._config(), indent=2))
        keep_until(self.directory / HISTORY, self.trainer.step, self.trainer.epoch)
        if not self.trainer.went_on:  # else the checkpoints that were evaluated hold
            keep_until(self.directory / EVALUATIONS, self.trainer.step, self.trainer.epoch)

    def _leave_earlier(self) -> None:
        """Keep what an earlier run has left of its epochs under other names."""
        with writable(self.directory):
            if older := put_aside(self.directory / HISTORY):
                note("%s has an earlier run: its history is in %s now", self.directory, older.name)
                for name in (CONFIG, EVALUATIONS):
                    put_aside(self.directory / name)

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """Append the epoch to the history."""
        self._append(epoch, self.trainer.step, logs)

    def complete(self, epoch: int, step: int, logs: Logs) -> None:
        """Go on with the history of another process, which may have ended in the middle of a line.

        Args:
            epoch: The last epoch that has figures, counted from 0.
            step: The steps until its end.
            logs: Its figures.
        """
        path = self.directory / HISTORY
        lines = path.read_text().splitlines() if path.exists() else []
        known = {record["epoch"]: line for line in lines if "epoch" in (record := record_of(line))}
        self._written = set(known)
        write_file_atomically(path, "".join(f"{line}\n" for line in known.values()))
        self._append(epoch, step, logs)

    def _append(self, epoch: int, step: int, logs: Logs) -> None:
        if epoch + 1 in self._written:
            return
        self._written.add(epoch + 1)
        self._waiting += line_of({"epoch": epoch + 1, "step": step, **logs}) + "\n"
        self._flush()

    def _flush(self) -> None:
        """Write the lines that wait for space."""
        if not self._waiting:
            return
        with self._going_on(), open(self.directory / HISTORY, "ab", buffering=0) as file:
            size = file.tell()
            try:
                file.write(self._waiting.encode())
                if file.tell() < size + len(self._waiting.encode()):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                file.truncate(size)  # no half of a line
                raise
            self._waiting = ""

    @contextmanager
    def _going_on(self) -> Iterator[None]:
        """Say once that something could not be written, and go on."""
        try:
            yield
        except (OSError, UnwritableError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            if not self._refused:
                warn("%s cannot be written: %s\n  Training goes on without it.",
                     self.directory, why)  # fmt: skip
            self._refused = True

    def on_train_end(self) -> None:
        """Write the settings with what the strategy found, and draw the report."""
        config = self._config()
        if (end := self._end()) is not None:
            config["fit"]["end"] = end
        self._flush()
        with self._going_on():
            write_file_atomically(self.directory / CONFIG, json.dumps(config, indent=2))
            write_report(self.directory)

    def _end(self) -> str | None:
        """How the training ended; None where it goes on elsewhere, as after a preemption."""
        trainer = self.trainer
        left_out = trainer.skips.total - self._left_out
        if trainer.stop_training and trainer.on_nonfinite == STOP and left_out:
            return NOT_FINITE
        if trainer.epoch >= trainer.epochs:
            return COMPLETE
        return STOPPED if trainer.stop_training else None

    def on_train_error(self, error: BaseException) -> None:
        """Draw the report of what there is: an hour of epochs is worth a look, error or not."""
        if self.trainer.history.epoch:
            with self._going_on():  # the error is what counts
                write_report(self.directory)

    def _config(self) -> dict[str, Any]:
        trainer, model = self.trainer, self.trainer.model
        cluster, found = trainer.coordination.cluster, summarize(unwrap(model))
        return {
            "spartito": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "cluster": {
                "source": starter(cluster),
                "replicas": trainer.strategy.num_replicas,
                "tasks": {role: list(tasks) for role, tasks in cluster.addresses.items()},
                "threads": torch.get_num_threads(),
            },
            "model": {
                "name": type(unwrap(model)).__name__,
                "summary": str(found),
                "trainable": found.trainable,
                "not_trainable": found.fixed,
            },
            "fit": {
                "epochs": trainer.epochs,
                "steps_per_epoch": trainer.steps_per_epoch,
                "batch_size": trainer.batch_size,
                "examples": trainer.examples,
                "precision": trainer.precision,
                "deterministic": trainer.deterministic,
                "seed": trainer.seed,
            },
            **trainer.coordination.describe(),
            "strategy": str(trainer.strategy),
            **trainer.about,
        }
