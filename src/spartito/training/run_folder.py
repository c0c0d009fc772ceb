"""The folder that a run leaves behind: settings, history, and a report to look at."""

from __future__ import annotations

import json
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from spartito.engine.optimizers import unwrap
from spartito.report.evaluations import EVALUATIONS, keep_until
from spartito.report.lines import line_of, record_of
from spartito.report.page import write_report
from spartito.storage.atomic import write_file_atomically
from spartito.training.callback import Callback, Logs
from spartito.training.summary import summarize

CONFIG = "config.json"
HISTORY = "history.jsonl"


class RunFolder(Callback):
    """Writes ``config.json``, ``history.jsonl`` and ``report.html``; only the chief has one.

    Raises `UserError` at once when ``directory`` cannot be written.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._written: set[int] = set()
        write_file_atomically(directory / ".writable", "")
        (directory / ".writable").unlink()

    def on_train_begin(self) -> None:
        """Write the settings; a run that starts from nothing starts its history anew."""
        self._written = set()
        write_file_atomically(self._directory / CONFIG, json.dumps(self._config(), indent=2))
        if self.trainer.epoch == 0:
            write_file_atomically(self._directory / HISTORY, "")
        keep_until(self._directory / HISTORY, self.trainer.step, self.trainer.epoch)
        if not self.trainer.went_on:  # else the checkpoints that were evaluated hold
            keep_until(self._directory / EVALUATIONS, self.trainer.step, self.trainer.epoch)

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
        path = self._directory / HISTORY
        lines = path.read_text().splitlines() if path.exists() else []
        known = {record["epoch"]: line for line in lines if "epoch" in (record := record_of(line))}
        self._written = set(known)
        write_file_atomically(path, "".join(f"{line}\n" for line in known.values()))
        self._append(epoch, step, logs)

    def _append(self, epoch: int, step: int, logs: Logs) -> None:
        if epoch + 1 in self._written:
            return
        self._written.add(epoch + 1)
        with open(self._directory / HISTORY, "a") as file:
            file.write(line_of({"epoch": epoch + 1, "step": step, **logs}) + "\n")

    def on_train_end(self) -> None:
        """Write the settings with what the strategy found, and draw the report."""
        write_file_atomically(self._directory / CONFIG, json.dumps(self._config(), indent=2))
        write_report(self._directory)

    def on_train_error(self, error: BaseException) -> None:
        """Draw the report of what there is: an hour of epochs is worth a look, error or not."""
        if self.trainer.history.epoch:
            write_report(self._directory)

    def _config(self) -> dict[str, Any]:
        trainer, model = self.trainer, self.trainer.model
        cluster, found = trainer.coordination.cluster, summarize(unwrap(model))
        return {
            "spartito": version("spartito"),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "cluster": {
                "source": cluster.source,
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
            **trainer.about,
        }
