"""A task that evaluates the checkpoints of a training and takes no part in it.

    chief:       epoch 1 -> save   epoch 2 -> save   epoch 3 -> save ... training.json: finished
    evaluator:            evaluate           (busy)            evaluate ... the last, and the end

The files in the checkpoint directory are all that the two have in common: neither waits for the
other, and the death of the evaluator changes nothing for the training.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spartito.checkpoint.manager import Best, CheckpointManager, read_checkpoint, sequence_of
from spartito.cluster.limits import time_limit
from spartito.errors import TaskLostError, UserError
from spartito.heartbeat import EVALUATE, beat
from spartito.notes import note, warn
from spartito.report.evaluations import append_evaluation
from spartito.report.figures import VALIDATION, clock_time, figure, scalars
from spartito.report.page import write_report
from spartito.storage.atomic import is_whole
from spartito.system import process_began
from spartito.training.callback import Callback, Training
from spartito.training.callbacks.early_stopping import EarlyStopping
from spartito.training.callbacks.model_checkpoint import ModelCheckpoint
from spartito.training.callbacks.tensorboard import TensorBoard
from spartito.training.evaluation.evaluate import Evaluation
from spartito.training.files.heartbeat import Observation, Signal, look
from spartito.training.history import History

POLL_SECONDS = 0.25
SAY_AFTER, SAY_EVERY = 2.0, 30.0
"""Seconds of waiting before it is said, and said again."""
ARRIVAL_SECONDS = 60.0
"""For the files of a checkpoint that come one by one, through a store that is mounted."""
KEEP = 5
"""Checkpoints that stay where an evaluator wants some and the fit has no ModelCheckpoint."""


def check_callbacks(callbacks: Sequence[Callback]) -> None:
    """Refuse what cannot decide in a training that leaves its validation to an evaluator."""
    for callback in callbacks:
        if isinstance(callback, EarlyStopping) and callback.monitor.name.startswith(VALIDATION):
            raise UserError(
                f"EarlyStopping watches {callback.monitor.name!r}, which the evaluator finds out "
                "when the training has gone on",
                'Watch the training: EarlyStopping("loss"), or start the job without an evaluator.',
            )
        if (
            isinstance(callback, ModelCheckpoint)
            and callback.save_best_only
            and callback.monitor.name.startswith(VALIDATION)
        ):
            raise UserError(
                f"ModelCheckpoint(save_best_only=True) watches {callback.monitor.name!r}, which "
                "the evaluator finds out from checkpoints that are saved",
                "Use keep=1: the newest and the best stay, or start the job without an evaluator.",
            )


def first_checkpoint(callbacks: Sequence[Callback]) -> ModelCheckpoint | None:
    """The callback whose checkpoints an evaluator looks at."""
    return next((given for given in callbacks if isinstance(given, ModelCheckpoint)), None)


def own_checkpoint(run_dir: Path | None) -> ModelCheckpoint:
    """The callback of a fit that has none, but an evaluator."""
    if run_dir is None:
        raise UserError(
            "an evaluator, but fit() saves no checkpoints: it has no ModelCheckpoint, and the "
            "trainer no run folder",
            'Add callbacks=[sp.callbacks.ModelCheckpoint("checkpoints")], or Trainer(..., '
            'run_dir="runs/1").',
        )
    return ModelCheckpoint(keep=KEEP)


class Evaluator:
    """Evaluates each new checkpoint of the ``fit``-th `fit`, the newest first, until its end.

    ``checkpoint`` says where they are and what makes one the best; ``tensorboards`` get the figures
    too. A signal or checkpoint that was there before ``since`` (seconds since 1970, when this
    process began) is of an earlier job.
    """

    def __init__(
        self,
        trainer: Training,
        checkpoint: ModelCheckpoint,
        evaluation: Evaluation,
        fit: int,
        *,
        tensorboards: Sequence[TensorBoard] = (),
        verbose: bool = True,
        since: float | None = None,
    ) -> None:
        """Look where the chief is; nothing is read yet."""
        self._trainer, self._evaluation, self._verbose = trainer, evaluation, verbose
        self._fit, self._tensorboards, self._monitor = fit, tensorboards, checkpoint.monitor
        self._manager: CheckpointManager = checkpoint.local_manager
        self._since = process_began() if since is None else since
        self._chief = trainer.coordination.job.name_of(0)
        self._before = look(self._manager.directory)
        self._limit = time_limit()
        self._silence = Silence(str(trainer.coordination.job.task))
        self._sequences: dict[tuple[str, int, int], int] = {}
        self._arriving: dict[Path, float] = {}  # since when
        self._first: int | None = None
        self._last = 0
        self._best: float | None = None
        self._history = History()

    def run(self) -> History:
        """The figures of all checkpoints that were evaluated.

        Raises `TaskLostError` when the training failed, or nothing is heard of it any more.
        """
        while True:
            seen = self._look()
            newest = None if seen is None else self._newest(seen.signal)
            if newest is not None and not self._arrives(newest[1]):
                self._last = newest[0]
                self._evaluate(newest[1])
                self._silence.end()
            elif newest is None and seen is not None and self._is_over(seen.signal):
                if not self._any_arrives():
                    break
                self._wait(seen)
            else:
                self._wait(seen)
        for tensorboard in self._tensorboards:
            tensorboard.on_train_end()
        if self._trainer.run_dir is not None and self._history.epoch:
            write_report(self._trainer.run_dir)
        if seen.signal.state == "failed" and seen.signal.fit == self._fit:
            raise TaskLostError(
                f"the training failed on {self._chief}, in epoch {seen.signal.epoch + 1}",
                "Its own message says why.",
            )
        return self._history

    def _look(self) -> Observation | None:
        """The chief's signal, once it is of this job and of this fit or a later one."""
        seen = look(self._manager.directory)
        if seen is None:
            return None
        self._silence.hear(seen.mark)
        fresh = seen.time >= self._since or self._before is None or seen.mark != self._before.mark
        if not fresh or seen.signal.fit < self._fit:
            return None
        if seen.signal.fit == self._fit and seen.signal.first != self._first:
            self._begin(seen.signal)
        return seen

    def _begin(self, signal: Signal) -> None:
        """A training began, or was started again."""
        self._first, self._last = signal.first, signal.first - 1
        pointer = self._manager.best_so_far if signal.start else None
        goes_on = pointer is not None and pointer.monitor == self._monitor.name
        self._best = pointer.value if pointer is not None and goes_on else None

    def _is_over(self, signal: Signal) -> bool:
        return signal.fit > self._fit or signal.state != "running"

    def _newest(self, signal: Signal) -> tuple[int, Path] | None:
        """The newest checkpoint of this fit that was not looked at yet, with its number."""
        if self._first is None:  # the chief was through with this fit before we came to it
            return None
        end = signal.first if signal.fit > self._fit else float("inf")
        found = ((self._sequence(path), path) for path in self._manager.candidates())
        newest = max((pair for pair in found if pair[0] < end), default=None)
        return None if newest is None or newest[0] <= self._last else newest

    def _arrives(self, path: Path) -> bool:
        """Whether files of a checkpoint may still come: it is not whole, and not for long."""
        if is_whole(path) or not path.is_dir():
            return False
        since = self._arriving.setdefault(path, time.monotonic())
        return time.monotonic() - since < min(ARRIVAL_SECONDS, self._limit / 2)

    def _any_arrives(self) -> bool:
        """Whether there is a checkpoint whose manifest comes still, or has just come."""
        without = [path for path in self._manager.candidates() if self._sequence(path) < 0]
        return any(self._arrives(path) or sequence_of(path) > 0 for path in without)

    def _sequence(self, path: Path) -> int:
        """As `sequence_of`, remembered: a folder may hold thousands."""
        try:
            facts = path.stat()
        except FileNotFoundError:  # the chief has just removed it
            return -1
        key = (path.name, facts.st_ino, facts.st_mtime_ns)
        if key not in self._sequences:
            if (sequence := sequence_of(path)) < 0:
                return sequence  # its manifest may still come
            self._sequences[key] = sequence
        return self._sequences[key]

    def _evaluate(self, path: Path) -> None:
        trainer, began = self._trainer, time.perf_counter()
        state = _read(path)
        if state is None:
            return
        trainer.strategy.load({"model": state["model"]})
        saved: dict[str, Any] = state.get("trainer") or {"epoch": 0, "step": 0}
        trainer.epoch, trainer.step = saved["epoch"], saved.get("counted", saved["step"])
        beat(trainer.step, EVALUATE)
        figures = {f"{VALIDATION}{n}": value for n, value in self._evaluation.run().items()}
        seconds = time.perf_counter() - began
        begun = bool((saved.get("loop") or {}).get("done"))  # saved within the next epoch
        epoch = trainer.epoch - 1 + begun
        self._history.add(epoch, figures)
        self._say(figures, seconds)
        if trainer.run_dir is not None:
            position = {"epoch": trainer.epoch, "step": trainer.step}
            append_evaluation(trainer.run_dir, {**position, **figures, "seconds": seconds})
        if not begun:
            for tensorboard in self._tensorboards:
                tensorboard.write(epoch, figures)
        self._judge(path, figures)

    def _say(self, figures: dict[str, Any], seconds: float) -> None:
        if not self._verbose:
            return
        shown = [f"{name} {figure(name, value)}" for name, value in scalars(figures).items()]
        position = f"epoch {self._trainer.epoch}  step {self._trainer.step}"
        print("  ".join([position, *shown, clock_time(seconds)]), flush=True)

    def _judge(self, path: Path, figures: dict[str, Any]) -> None:
        """Point to this checkpoint if it is the best of those that are still there."""
        monitor = self._monitor
        if not monitor.name.startswith(VALIDATION):
            return  # the chief knows that one
        value = monitor.read(figures)
        best = self._best if self._manager.best is not None else None
        if monitor.better(value, best) and path.is_dir():
            self._manager.name_best(Best(path.name, monitor.name, value))
            self._best = value

    def _wait(self, seen: Observation | None) -> None:
        directory = self._manager.directory
        if self._silence.seconds > self._limit:
            if seen is None:
                raise TaskLostError(
                    f"{self._chief} began no training with checkpoints in {directory} within "
                    f"{self._limit:g} s",
                    "Start it, with the same directory; SPARTITO_TIMEOUT sets the limit.",
                )
            raise TaskLostError(
                f"nothing was heard of {self._chief} for {self._limit:g} s: no checkpoint and no "
                f"sign of life in {directory}",
                "Is it alive? SPARTITO_TIMEOUT sets the limit in seconds.",
            )
        what = "training to begin" if seen is None else "next checkpoint"
        self._silence.wait(f"the {what} in {directory}")


def follow(
    trainer: Training,
    given: Sequence[Callback],
    validation: Evaluation | None,
    fit: int,
    verbose: bool,
) -> History:
    """What the ``fit``-th `fit` is on the evaluator; ``given`` are its callbacks."""
    if validation is None:
        note("fit() without validation_data: the evaluator passes it over")
        return History()
    checkpoint = first_checkpoint(given) or own_checkpoint(trainer.run_dir)
    for callback in (checkpoint, *given):
        callback.set_trainer(trainer)
    writers = [callback for callback in given if isinstance(callback, TensorBoard)]
    return Evaluator(
        trainer, checkpoint, validation, fit, tensorboards=writers, verbose=verbose
    ).run()


class Silence:
    """How long nothing was heard, and what is said of the waiting."""

    def __init__(self, who: str) -> None:
        self._who = who
        self._mark: tuple[int, int] | None = None
        self.end()

    def end(self) -> None:
        """Something came: waiting begins anew."""
        self._since = time.monotonic()
        self._say_at = self._since + SAY_AFTER

    def hear(self, mark: tuple[int, int]) -> None:
        """A sign of life is new when ``mark`` is."""
        if mark != self._mark:
            self._mark, self._since = mark, time.monotonic()

    @property
    def seconds(self) -> float:
        """Since something was heard."""
        return time.monotonic() - self._since

    def wait(self, what: str) -> None:
        """Let a little time go by; tell the user now and then."""
        if time.monotonic() >= self._say_at:
            note("%s waits for %s", self._who, what)
            self._say_at = time.monotonic() + SAY_EVERY
        time.sleep(POLL_SECONDS)


def _read(path: Path) -> dict[str, Any] | None:
    """The checkpoint; None when it was removed meanwhile, or is damaged, which is said."""
    try:
        return read_checkpoint(path)
    except UserError as error:
        if path.is_dir():
            warn("%s is passed over: %s", path.name, error)
        return None
