"""What a task does to itself in a step of `fit`, and its trace: when it did which step.

A launcher's environment brings it in: ``SPARTITO_STEP_HOOK=spartito.chaos.inside:attach``.
"""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import Any

from spartito import failpoints
from spartito.chaos.schedule import KINDS, Fault, parse_schedules

ENV = "SPARTITO_CHAOS"
"""The folder with the faults of a run, where its tasks write their traces."""

FAULTS, TRACES = "faults", "traces"
JUMP = 3600.0
FULL_FOR = 130
"""Steps for which a disk is full."""


class Provoked(RuntimeError):
    """The exception that ``exception`` raises."""


def attach(trainer: Any) -> None:
    """Have the steps of ``trainer`` leave a trace, and fail as the folder says.

    Args:
        trainer: a `Trainer` whose training begins; one that has it already is left alone.
    """
    folder = os.environ.get(ENV)
    if folder and not isinstance(getattr(trainer.strategy.engine.step, "__self__", None), Observed):
        trainer.strategy.engine.step = Observed(trainer, Path(folder)).step


class Observed:
    """The ``step`` of a strategy, and a line in a file after each: seconds, step, its loss.

    Args:
        trainer: whose steps they are.
        folder: as `ENV` says.
    """

    def __init__(self, trainer: Any, folder: Path) -> None:
        self._trainer, self._folder = trainer, folder
        self._step = trainer.strategy.engine.step
        task = trainer.coordination.cluster.task
        name = f"{task.type}:{task.index}"
        faults = (fault for run in _faults(folder) for fault in run)
        self._faults = [
            (number, fault)
            for number, fault in enumerate(faults)
            if fault.task == name and KINDS[fault.kind].inside
        ]
        self._heal_at = math.inf
        path = folder / TRACES / f"{name}.{os.getpid()}"
        path.parent.mkdir(exist_ok=True)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)

    def step(self, batch: Any, loss: Any, *, stop: bool = False) -> Any:
        """As `Strategy.step`."""
        undo = self._before(self._trainer.step)
        try:
            result = self._step(batch, loss, stop=stop)
        finally:
            if undo is not None:
                undo.remove()
        weight = float(result.weight)
        shown = float(result.loss) / weight if weight else math.nan
        line = f"{time.monotonic():.6f} {self._trainer.step + result.updates} {shown.hex()}\n"
        os.write(self._file, line.encode())
        return result

    def _before(self, step: int) -> Any:
        """Do what is due; returns what is to be taken away after the step, if anything."""
        if step >= self._heal_at:
            os.environ.pop(failpoints.ENV, None)
            self._heal_at = math.inf
        for number, fault in self._faults:
            if step >= fault.step:
                self._faults.remove((number, fault))
                if _first(self._folder, number):
                    return self._do(fault)
                break
        return None

    def _do(self, fault: Fault) -> Any:
        if fault.kind == "exception":
            raise Provoked(f"provoked by {fault}")
        if fault.kind == "spin":
            sum(iter(int, 1))  # a loop in C: no other thread runs any more, no signal is handled
        if fault.kind == "clock":
            plain = time.time
            time.time = lambda: plain() + JUMP
        if fault.kind == "disk":
            os.environ[failpoints.ENV] = "storage.stream.begun:error"
            self._heal_at = fault.step + FULL_FOR
        if fault.kind == "nan":
            last = [one for one in self._trainer.model.parameters() if one.requires_grad][-1]
            return last.register_hook(lambda gradient: gradient * math.nan)
        return None


def _faults(folder: Path) -> list[tuple[Fault, ...]]:
    text = (folder / FAULTS).read_text() if (folder / FAULTS).exists() else ""
    return parse_schedules(text) if text.strip() else []


def fired(folder: Path, number: int) -> Path:
    """The file that says when the fault with this number happened.

    Args:
        folder: of the run.
        number: its index in the schedule.

    Returns:
        Its path; it holds seconds of the machine's monotonic clock.
    """
    return folder / f"fired-{number}"


def _first(folder: Path, number: int) -> bool:
    """Whether the fault has not happened yet: a task that was started again does not repeat it."""
    try:
        with fired(folder, number).open("x") as file:
            file.write(f"{time.monotonic():.6f}\n")
    except FileExistsError:
        return False
    return True
