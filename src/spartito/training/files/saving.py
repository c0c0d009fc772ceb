"""Checkpoints of a whole training, written by all of its tasks together, at once or in a thread."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread, main_thread
from typing import TYPE_CHECKING, Any

from spartito.checkpoint.manager import write_sections
from spartito.checkpoint.saving import Unwritten
from spartito.errors import TaskLostError, UnwritableError, UserError, writable
from spartito.heartbeat import SAVE, during
from spartito.notes import warn
from spartito.storage.atomic import write_directory
from spartito.storage.tensors import copied
from spartito.training.callback import Callback
from spartito.training.files.write_refusals import Destination, reason_of
from spartito.training.fitting.schedule import scheduler_state

if TYPE_CHECKING:
    from spartito.training.trainer import Trainer

About = Callable[[], Mapping[str, Any]]
"""What a manifest is to say beside the files, as JSON; asked on the chief."""

Beside = Callable[[], Mapping[str, Any]]
"""Further sections of a checkpoint; asked on all tasks, the chief's are written."""

Then = Callable[[], None]
"""What the chief does once a checkpoint is there."""

POLL_SECONDS = 0.02
LAST_SECONDS = 10.0  # that a training which ends with an error waits for a write


class Saves:
    """The checkpoints that a trainer writes, one at a time.

    Args:
        trainer: Whose training it is.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._writing: Writing | None = None
        self.destinations: dict[Path, Destination] = {}
        """Where automatic saves went in this fit, equal on all tasks that call `save`."""
        self.cost = 0.0
        """Seconds that the last one took of this task: its own, and of a thread's processor."""

    @property
    def writes(self) -> bool:
        """Whether a thread of this task writes at this moment."""
        return self._writing is not None and self._writing.runs

    def save(
        self,
        path: Path,
        about: About | None = None,
        then: Then | None = None,
        later: bool = False,
        otherwise: Then | None = None,
        beside: Beside = dict,
        keeps: bool = True,
    ) -> bool:
        """Write a checkpoint; all tasks call it, and have the same error where it fails.

        Args:
            path: Its directory.
            about: For its manifest.
            then: What the chief does once it is there.
            later: Whether it is written in a thread, from a copy that is taken now.
            otherwise: What all tasks do where a disk refuses: then that is a warning, and training
                goes on.
            beside: Further sections.
            keeps: Whether it outlives the training.

        Returns:
            Whether it is written, or, with ``later``, begun.

        Raises:
            UserError: On all tasks; also for the one before, which was written in a thread.
        """
        self.finish()
        target = Target(path, self._trainer.step, otherwise, keeps)
        self.cost, began = 0.0, time.perf_counter()
        try:
            with during(SAVE):
                self._save(target, about, then, later, beside)
        except UnwritableError as error:
            if otherwise is None:
                raise
            self._refuse(target, error)
            otherwise()
            return False
        finally:
            self.cost += time.perf_counter() - began
        if not later:
            self._succeed(target)
        return True

    def _refuse(self, target: Target, error: UnwritableError) -> None:
        """Say once that nothing can be written there; all tasks call it."""
        folder = target.path.parent
        before = self.destinations.get(folder, Destination())
        if not before.refused and self._trainer.is_chief:
            warn("%s\n  Training goes on without it; each turn is another try.", error)
        self.destinations[folder] = before.after_refusal(reason_of(error), target.keeps)

    def _succeed(self, target: Target) -> None:
        if target.otherwise is not None:
            folder = target.path.parent
            before = self.destinations.get(folder, Destination())
            self.destinations[folder] = before.after_success(target.step, target.keeps)

    def _save(
        self,
        target: Target,
        about: About | None,
        then: Then | None,
        later: bool,
        beside: Beside,
    ) -> None:
        trainer, path = self._trainer, target.path
        attempt = trainer.coordination.attempt
        with ExitStack() as stack:

            def begin() -> str:
                if not trainer.is_chief:
                    return ""
                told = {**_position(trainer), **(about() if about else {})}
                return str(stack.enter_context(write_directory(path, told)))

            directory = Path(attempt(begin)[0])
            unwritten = trainer.strategy.save(directory, later)
            state = {"trainer": _state(trainer), **beside()}
            own = copied(state) if later else state

            def end(entered: ExitStack) -> str:
                if trainer.is_chief:
                    with writable(path.parent):
                        write_sections(directory, own)
                        entered.close()
                        if then is not None:
                            then()
                if later:
                    self.cost += time.thread_time()
                return ""

            if later:
                self._writing = Writing(unwritten, end, stack.pop_all(), target)
            else:
                attempt(lambda: end(stack))

    def finish(self) -> None:
        """Wait for the checkpoint that is written in a thread; all tasks call it.

        Raises:
            UserError: On all tasks, if one could not write, unless that is none to the training.
        """
        writing, self._writing = self._writing, None
        if writing is None:
            return
        try:
            self._finish(writing)
        except UnwritableError as error:
            if writing.target.otherwise is None:
                raise
            self._refuse(writing.target, error)
            writing.target.otherwise()
        else:
            self._succeed(writing.target)

    def _finish(self, writing: Writing) -> None:
        attempt = self._trainer.coordination.attempt
        try:
            attempt(writing.own)  # then nobody is missing, or all know of the error
        except BaseException:
            writing.give_up()
            raise
        attempt(writing.end)

    def leave(self, error: BaseException) -> None:
        """Training ends with ``error``: let the checkpoint be written, unless a task is lost."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.give_up(0.0 if isinstance(error, TaskLostError) else LAST_SECONDS)


@dataclass(frozen=True)
class Target:
    """What is saved, and where.

    Args:
        path: The directory of the checkpoint.
        step: The global step that it is of.
        otherwise: What all tasks do where a disk refuses, if that is no error of the training.
        keeps: Whether it outlives the training.
    """

    path: Path
    step: int
    otherwise: Then | None
    keeps: bool


class Writing:
    """A checkpoint that a thread writes.

    Args:
        unwritten: This task's own part.
        end: What is done once the parts of all tasks are there; closes ``entered``.
        entered: On the chief the directory that is being written; left with an error if one comes.
        target: What it is.
    """

    def __init__(
        self,
        unwritten: Unwritten,
        end: Callable[[ExitStack], str],
        entered: ExitStack,
        target: Target,
    ) -> None:
        self.target = target
        self._unwritten, self._end, self._entered = unwritten, end, entered
        self._written, self._given_up = Event(), Event()
        self._error: UserError | None = None
        # No daemon: a script that ends first lets it be written.
        self._thread = Thread(target=self._run, name="spartito checkpoint", daemon=False)
        self._thread.start()

    @property
    def runs(self) -> bool:
        """Whether the thread is still at it."""
        return self._thread.is_alive()

    def own(self) -> str:
        """Wait until this task's own part is written; raises if it could not be."""
        self._written.wait()
        return self._result()

    def end(self) -> str:
        """Wait for all of it; raises if something could not be written."""
        self._thread.join()
        return self._result()

    def give_up(self, seconds: float = 0.0) -> None:
        """Wait so long for it; what is not there by then is removed."""
        self._thread.join(seconds)
        self._given_up.set()
        self._thread.join(LAST_SECONDS)

    def _result(self) -> str:
        if self._error is not None:
            raise self._error
        return ""

    def _run(self) -> None:
        self._try(self._unwritten.write)
        self._written.set()
        self._try(self._wait)  # after an error too: others still write in the directory
        if self._error is None:
            self._try(lambda: self._end(self._entered))
        if self._error is not None:
            with suppress(BaseException):  # it raises the error again
                self._entered.__exit__(type(self._error), self._error, None)

    def _try(self, work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:
            found = error if isinstance(error, UserError) else UserError(repr(error))
            self._error = self._error or found

    def _wait(self) -> None:
        """Wait for the parts of other tasks; not long when nobody waits for this one any more."""
        last = math.inf
        while self._unwritten.missing():
            if last == math.inf and not main_thread().is_alive():
                last = time.monotonic() + LAST_SECONDS
            if self._given_up.wait(POLL_SECONDS) or time.monotonic() > last:
                raise UserError("a checkpoint was given up: other tasks have not written theirs")


def _position(trainer: Trainer) -> dict[str, Any]:
    """Where the training is, and on what, for people who look into a manifest."""
    coordination = trainer.coordination
    return {
        "strategy": str(trainer.strategy),
        "tasks": coordination.cluster.num_computing,
        "step": trainer.step,
        "epoch": trainer.epoch,
    }


def _state(trainer: Trainer) -> dict[str, Any]:
    """What training needs to go on beside model and optimizer; all replicas call it."""
    loop = trainer._loop.state_dict() if trainer._loop else None
    step = loop["step"] if loop else trainer.step
    return {
        "step": step,
        "counted": trainer.step,  # as the line of the epoch in the history
        "epoch": trainer.epoch,
        "seed": trainer.seed,
        "scheduler": scheduler_state(trainer.scheduler),
        "ahead": trainer.step - step + trainer.schedule.ahead,
        "loop": loop,
        "loss": trainer.loss_buffers.changed(),
        "callbacks": callback_states(trainer._given),
    }


def callback_states(callbacks: Sequence[Callback]) -> list[list[Any]]:
    """The state of each callback, which `spartito.training.files.resume.restore` gives back."""
    return [[type(callback).__name__, callback.state_dict()] for callback in callbacks]
