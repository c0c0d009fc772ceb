"""Writes what some steps of a training do, operation by operation."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from spartito.aside import put_aside
from spartito.errors import UserError, writable
from spartito.notes import note, warn
from spartito.training.callback import Callback, Logs

SHOWN = 8
"""Operations that are printed."""


class Profiler(Callback):
    """Writes a trace of some steps by ``torch.profiler``, and prints what took longest.

    Each task that computes writes its own file, ``worker-0.trace.json``, which a browser shows at
    ``ui.perfetto.dev`` or ``chrome://tracing``. An older one gets a number behind its name. The
    steps before are as fast as without it; those that are recorded take longer.

    Args:
        directory: Where the traces go; it is made.
        first: The first step that is recorded, counted from 0 in this `fit`: not one of the
            first, which make memory and caches.
        steps: How many are recorded.

    Raises:
        UserError: Less than one step, or the folder cannot be written.
    """

    def __init__(
        self, directory: str | os.PathLike[str] = "profile", first: int = 10, steps: int = 3
    ) -> None:
        """Remember what is asked for; nothing is written before the steps are over."""
        if first < 0 or steps < 1:
            raise UserError(
                f"Profiler(first={first}, steps={steps})", "Count from 0, and record 1 or more."
            )
        self.directory, self.first, self.steps = Path(directory), first, steps
        self._profile: Any = None
        self._done = 0

    def on_train_begin(self) -> None:
        """Count steps from 0."""
        self._done = 0

    def on_train_batch_begin(self, batch: int) -> None:
        """Begin to record, when it is time."""
        if self._done == self.first and self._profile is None:
            self._profile = torch.profiler.profile(record_shapes=True)
            self._profile.__enter__()

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        """Write, when enough is recorded."""
        self._done += 1
        if self._done >= self.first + self.steps:
            self._write()

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """Write what was recorded: an epoch's end is no step."""
        self._write()

    def on_train_end(self) -> None:
        """Say so, where the training was too short."""
        if self._done <= self.first and self.trainer.is_chief:
            warn("Profiler(first=%d) recorded nothing: fit() made %d steps", self.first, self._done)

    def on_train_error(self, error: BaseException) -> None:
        """Let go of the profiler."""
        if self._profile is not None:
            profile, self._profile = self._profile, None
            profile.__exit__(None, None, None)

    def _write(self) -> None:
        if self._profile is None:
            return
        profile, self._profile = self._profile, None
        profile.__exit__(None, None, None)
        task = str(self.trainer.coordination.job.task).replace(" ", "-")
        path = self.directory / f"{task}.trace.json"
        with writable(self.directory):
            self.directory.mkdir(parents=True, exist_ok=True)
            put_aside(path)
            profile.export_chrome_trace(str(path))
        if self.trainer.is_chief:
            found = profile.key_averages()
            key = "self_cpu_time_total"
            if any(each.self_device_time_total for each in found):
                key = "self_device_time_total"
            print(found.table(sort_by=key, row_limit=SHOWN, max_name_column_width=40), flush=True)
            note("%s has the trace: open it at ui.perfetto.dev or chrome://tracing", path)
