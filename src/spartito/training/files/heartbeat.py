"""How a training tells those who watch its checkpoints where it is: one small file beside them."""

from __future__ import annotations

import json
import os
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from spartito.checkpoint.manager import CheckpointManager
from spartito.errors import UserError
from spartito.storage.atomic import write_file_atomically
from spartito.storage.own_files import check_own, has_keys
from spartito.training.callback import Callback

FILE = "training.json"
BEAT_SECONDS = 1.0
"""Between two signs of life of a training that runs: the file's time is set anew."""

State = Literal["running", "finished", "failed"]


@dataclass(frozen=True, slots=True)
class Signal:
    """What the chief says of its ``fit``-th `fit`, counted from 1.

    Its checkpoints have the sequence numbers from ``first`` on; it began at global step
    ``start``, and is now, as of the last change of ``state``, in ``epoch`` and ``step``.
    """

    state: State
    fit: int
    first: int
    start: int
    epoch: int
    step: int


@dataclass(frozen=True, slots=True)
class Observation:
    """A signal as it was seen: ``time`` of its last beat (seconds), ``mark`` changes with it."""

    signal: Signal
    time: float
    mark: tuple[int, int]


def look(directory: Path) -> Observation | None:
    """The signal in ``directory``, None where there is none; `UserError` for another file."""
    file = directory / FILE
    try:
        with file.open("rb") as opened:
            facts = os.fstat(opened.fileno())
            raw = json.load(opened)
        return Observation(Signal(**raw), facts.st_mtime, (facts.st_mtime_ns, facts.st_ino))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{file} cannot be understood: {error}", "Remove it.") from error


class Heartbeat(Callback):
    """Keeps the signal beside the checkpoints of a `fit`; the chief alone has one.

    It comes after all other callbacks: what it announces has been written. A thread gives the
    signs of life, so that a chief that waits for another task, or evaluates, still gives them.
    """

    def __init__(self, manager: CheckpointManager, fit: int) -> None:
        """Nothing is written before training begins."""
        self._manager, self._fit = manager, fit
        self._file = manager.directory / FILE
        self._first = self._start = 0
        self._over = threading.Event()

    def on_train_begin(self) -> None:
        """Say that the training runs, in place of what an earlier one left."""
        check_own(self._manager.directory, {FILE: has_keys("state", "fit", "first")})
        self._over.set()  # of an `on_train_begin` before this one, where a task came back
        before = look(self._manager.directory) if self.trainer.went_on else None
        if before is not None and before.signal.fit == self._fit:  # another process's, of this fit
            self._first, self._start = before.signal.first, before.signal.start
        else:
            self._first, self._start = self._manager.next_sequence, self.trainer.step
        self._tell("running")
        self._over = threading.Event()
        beats = threading.Thread(
            target=self._beat, args=(self._over,), name="spartito-signal", daemon=True
        )
        beats.start()

    def on_train_end(self) -> None:
        """Say that no more checkpoints come."""
        self._over.set()
        self._tell("finished")

    def on_train_error(self, error: BaseException) -> None:
        """Say that no more checkpoints come, if it was ever said that some would."""
        self._over.set()
        if self._first:
            self._tell("failed")

    def _tell(self, state: State) -> None:
        epoch, step = self.trainer.epoch, self.trainer.step
        signal = Signal(state, self._fit, self._first, self._start, epoch, step)
        write_file_atomically(self._file, json.dumps(asdict(signal)) + "\n")

    def _beat(self, over: threading.Event) -> None:
        while not over.wait(BEAT_SECONDS):
            try:
                os.utime(self._file)
            except FileNotFoundError:  # somebody cleared the folder; the training goes on
                self._tell("running")
