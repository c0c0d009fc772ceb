"""The loop of a training that goes on when a task is lost: at most the step in flight is repeated.

Each task remembers where the last update left it. When it hears of a loss it goes back there,
leaves the groups, meets those who live and those who are new, and all go on from the state of one
that was furthest. What all need to know of the others' rows rides along with the updates.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from spartito.collectives.collective import Piggybacked
from spartito.data.batch import Batch
from spartito.data.dataset import Dataset
from spartito.data.reading.loader import used_up
from spartito.engine.randomness.seed import random_state, set_random_state
from spartito.errors import TaskLostError
from spartito.heartbeat import RECOVER, during
from spartito.notes import note
from spartito.steps.batches import Placed
from spartito.steps.groups import Groups
from spartito.steps.recovery import OF_GROUP, ElsewhereError, Regrouping, ShardsLostError, Standing
from spartito.strategies import StepResult
from spartito.training.callback import hooks
from spartito.training.callbacks.backup_and_restore import BackupAndRestore
from spartito.training.callbacks.early_stopping import forget_kept, give_kept, kept_by
from spartito.training.evaluation.evaluate import Evaluation
from spartito.training.files.resume import check_position, meaning, restore, trained_on
from spartito.training.files.saving import callback_states
from spartito.training.fitting.own_callbacks import take_office
from spartito.training.fitting.schedule import load_scheduler, scheduler_state
from spartito.training.history import History
from spartito.training.loops.callback_catch_up import keys_of, missed
from spartito.training.loops.clock import StepLogs
from spartito.training.loops.training_loop import TrainingLoop
from spartito.training.metrics import Metric
from spartito.training.metrics.carried import CarriedMetrics

if TYPE_CHECKING:
    from spartito.training.trainer import Trainer


TRAIN, CONCLUDE, CALLBACKS, AGREE, END = range(5)
"""The stages of an epoch: its steps, its figures, its callbacks, whether another one comes."""

ALL = 1 << 30
"""Every callback was called."""


@dataclass(frozen=True, slots=True)
class Mark:
    """Where the last update left a task."""

    data: dict[str, Any]
    seen: tuple[Any, ...]
    done: int
    examples: int


class _SomebodyWaits(Exception):
    """A task that was started anew wants to take part."""


class RecoveringLoop(TrainingLoop):
    """As `TrainingLoop`, for replicas that meet in every step, and may be lost and replaced."""

    _metrics: CarriedMetrics

    def __init__(self, trainer: Trainer, chain: Dataset, before: TrainingLoop | None) -> None:
        super().__init__(trainer, chain, before)
        self._recovering = trainer
        self._engine = trainer.strategy.engine
        assert isinstance(self._engine.recovery, Regrouping), "else the loop is another one"
        self._meeting = self._engine.recovery
        hidden = self._engine.parts.placement.account.hides_outputs
        self._metrics = CarriedMetrics(trainer.metrics, rides=not hidden)
        self._logs = StepLogs(self._metrics)
        self._stage, self._hook, self._epoch, self._begun = TRAIN, ALL, 0, -1
        self._counts = self._ends = self._welcomes = self._is_late = False
        self._found: dict[str, Any] = {}
        self._found_at = 0
        self._saved_callbacks: list[list[Any]] = []
        self._nowhere: ShardsLostError | None = None

    @property
    def _groups(self) -> Groups:
        return self._engine.groups

    @property
    def _placed(self) -> Placed:
        assert isinstance(self._batches, Placed), "as replicas that meet in every step have them"
        return self._batches

    def run(
        self, epochs: range, steps: int | None, validation: Evaluation | None, history: History
    ) -> None:
        self._steps, self._validation, self._history = steps, validation, history
        self._stage, self._hook = TRAIN, ALL
        self._epoch, self._begun, self._ends = epochs.start, epochs.start - 1, False
        self._keep_mark()
        self._meeting.aboard, self._meeting.fits = self, self._meeting.fits + 1
        try:
            if joins := self._groups.joins:
                self._recovering.went_on = True
                if self._meet(None, is_new=True):
                    epochs = self._begin_anew(epochs)
                take_office(self._recovering)
            else:
                self._meeting.keep_copies()
                self._groups.training_begins()
            for callback in self._trainer.callbacks:
                callback.on_train_begin()
            if joins:
                self._catch_up()
                self._say("takes part")
            while True:
                cause: TaskLostError | None = None
                try:
                    self._go_on(epochs)
                    return
                except TaskLostError as error:
                    cause = error
                except _SomebodyWaits:
                    pass
                with during(RECOVER):
                    epochs = self._recover(cause, epochs)
        finally:
            self._meeting.aboard = None

    # What rides along with the updates (`Aboard`)

    def saw(self, output: Any, batch: Batch) -> None:
        """As `Aboard.saw`."""
        self._metrics.update(output, batch)

    def brings(self) -> Piggybacked:
        """As `Aboard.brings`."""
        return (
            float(self._groups.somebody_waits),
            *self._metrics.brings(self._collect),
        )

    def _collect(self, own: bytes) -> list[bytes]:
        engine = self._engine
        found = engine.groups.replicas.all_gather_bytes(own)
        return engine.parts.placement.account.counted(found)

    def brought(self, total: Sequence[float]) -> None:
        """As `Aboard.brought`."""
        self._welcomes = total[0] > 0
        self._metrics.brought(total[1:])

    # The epochs, from wherever this task is

    def _go_on(self, epochs: range) -> None:
        trainer, callbacks = self._trainer, self._trainer.callbacks
        first = self._epoch + (self._stage > TRAIN)
        done = self._done if self._stage == TRAIN else 0
        with closing(self._batches.epochs(epochs.stop - first, self._steps, done, self)) as batches:
            while self._stage < END and self._epoch < epochs.stop:
                self._running = self._epoch
                if self._stage == TRAIN:
                    self._begin_epoch(self._epoch)
                    with closing(next(batches)) as given, self._listening():
                        self._train_epoch(given)
                    trainer.epoch = self._epoch + self._is_whole()
                    self._stage, self._hook = CONCLUDE, ALL
                    self._keep_mark()
                if self._stage == CONCLUDE:
                    with self._coordination.during("end of epoch"):
                        self._found = self._conclude(self._epoch, self._validation, self._history)
                    self._found_at = trainer.step
                    self._end_epoch()
                    self._keep_mark()
                    self._stage, self._hook = CALLBACKS, 0
                if self._stage == CALLBACKS:
                    self._call("on_epoch_end", self._epoch, self._found)
                    self._stage = AGREE
                if self._agree_to_stop(last=self._epoch + 1 == epochs.stop):
                    break
                self._stage, self._hook, self._epoch = TRAIN, ALL, self._epoch + 1
        self._stage = END
        for callback in callbacks:
            callback.on_train_end()

    def _begin_epoch(self, epoch: int) -> None:
        if self._begun < epoch:
            super()._begin_epoch(epoch)
            self._begun = epoch

    def _train_epoch(self, batches: Any) -> None:
        self._meet_groups()
        if self._hook != ALL:
            self._call("on_train_batch_end", self._done - 1, self._logs)
        if not self._ends:
            super()._train_epoch(batches)
            self._hook = ALL
            return
        trainer = self._trainer  # all have heard that one asked for an end: it may be lost since
        self._ends = self._coordination.agree_to_stop(trainer.stop_training or trainer.notice.came)
        if self._ends:
            self._leave()
            trainer.stop_training = True
        else:
            self._train_epoch(batches)

    def _step(self, batch: Batch) -> StepResult:
        trainer = self._trainer
        stop = trainer.stop_training or trainer.notice.came or trainer.ends_next
        return self._strategy.step(batch, trainer.loss, stop=stop)

    def _after_steps(self) -> list[Callable[..., None]]:
        callbacks = self._trainer.callbacks
        asked = hooks(callbacks, "on_train_batch_end")
        found: list[Callable[..., None]] = []
        for callback, key in zip(callbacks, self._keys(), strict=True):
            if callback.on_train_batch_end in asked:
                found.append(partial(self._call_one, key, callback.on_train_batch_end))
        return [*found, self._stepped]

    def _call_one(self, key: int, hook: Callable[..., None], *given: Any) -> None:
        if self._counts:
            self._hook = key
        hook(*given)

    def _stepped(self, batch: int, logs: Any) -> None:
        """After all that is called after a step."""
        self._hook = ALL
        if self._counts:
            self._metrics.keep_reports()
        if self._welcomes and not self._ends:
            raise _SomebodyWaits

    def _came(self, result: StepResult) -> bool:
        ends = super()._came(result)
        self._counts = result.updates > 0
        if self._counts:
            self._ends = self._ends or ends
            self._hook = 0
            self._keep_mark()
            ends |= self._meet_groups()
        return ends

    def _meet_groups(self) -> bool:
        """Merge the groups, where that is due after the last update; whether one asks to end."""
        ends = self._engine.team.outer.meet_due()
        self._ends |= ends
        return ends

    def _whole_metrics(self) -> list[Metric]:
        metrics = self._metrics
        found, near = [*metrics.carried(), *self._collect(metrics.rest())], self._placed.near
        if near is not None:  # those of all groups
            own = json.dumps([part.hex() for part in found] if near.is_leader else []).encode()
            told = self._groups.data.all_gather_bytes(own)
            found = [bytes.fromhex(part) for text in told for part in json.loads(text)]
        return metrics.merged(found, self._metrics_before)

    def _call(self, name: str, *given: Any) -> None:
        """Call a hook of the callbacks from where this task is on."""
        for callback, key in zip(self._trainer.callbacks, self._keys(), strict=True):
            if self._hook <= key:
                self._hook = key
                getattr(callback, name)(*given)
        self._hook = ALL

    def _keys(self) -> list[int]:
        """A number for each callback, in order: the same on all tasks for those that all have."""
        return keys_of(self._trainer.callbacks, self._recovering._given)

    # After a loss

    def _keep_mark(self) -> None:
        examples = self.clock.examples if self._done else 0
        self._mark = Mark(self._batches.state_dict(), self._placed.seen, self._done, examples)

    def _go_back(self) -> None:
        """To the last update: what came since then comes again."""
        self._done, self._examples = self._mark.done, self._mark.examples
        self._metrics.forget_step()
        self._welcomes = False

    def _recover(self, cause: TaskLostError | None, epochs: range) -> range:
        began = time.perf_counter()
        if cause is not None:
            note("%s", str(cause).partition("\n")[0])
            if used_up(self.chain) is not None:
                raise TaskLostError(
                    f"{str(cause).partition(chr(10))[0]}: and the data can be read only once, so "
                    "that the step cannot be repeated",
                    "Give what can be iterated again: arrays, a list, a DataLoader.",
                ) from cause
            self._recovering.saves.leave(cause)
        else:
            try:
                self._recovering.saves.finish()  # who is new has none to wait for
            except TaskLostError as error:
                return self._recover(error, epochs)
        self._recovering.went_on = True
        self._go_back()
        before = self._trainer.step, self._epoch, self._stage, self._hook
        if self._meet(cause, is_new=False):
            epochs = self._begin_anew(epochs)
        self._take_office()
        self._make_up_for(*before)
        self._say("goes on", f" after {time.perf_counter() - began:.2f} s")
        return epochs

    def _say(self, what: str, when: str = "") -> None:
        cluster = self._engine.cluster
        if cluster.is_chief:
            names = ", ".join(str(cluster.task_of(rank)) for rank in range(cluster.world_size))
            note("%s%s at step %d: %s", what, when, self._trainer.step, names)

    def _meet(self, cause: TaskLostError | None, is_new: bool) -> bool:
        """Meet the others; afterwards all are equally far. Returns whether all of them are new."""
        meeting, trainer = self._meeting, self._recovering
        progress = trainer.step, self._epoch, self._stage, self._hook
        while True:
            is_new = not meeting.regroup(cause) or is_new
            self._metrics.compact()
            own = Standing(progress, is_new, meeting.fits, len(meeting.team.pairs.all))
            try:
                best, state = meeting.meet_again(own, self._state)
                break
            except ElsewhereError:
                raise
            except TaskLostError as error:
                cause = error
                if isinstance(error, ShardsLostError):  # on all tasks: nobody has the state
                    self._nowhere, is_new = error, True
        self._batches = self._engine.distribute(self.chain, seed=trainer.seed)
        if self._validation is not None:
            self._validation.distribute()
        _, self._epoch, self._stage, self._hook = best.progress
        if state is not None:
            self._load(state, is_new)
        for callback in trainer._given:
            forget_kept(callback)
        self._batches.load_state_dict(self._mark.data)
        self._placed.seen = self._mark.seen
        return best.is_new

    def _begin_anew(self, epochs: range) -> range:
        """Nobody is left who has the state: go on from a backup, if there is one."""
        trainer = self._recovering
        backup = next((each for each in trainer._given if isinstance(each, BackupAndRestore)), None)
        found = backup and backup.find(trainer, trained_on(trainer, self.chain, self._steps))
        saved, trainer._restored, self._saved_callbacks = trainer._restored, None, []
        if not found or saved is None:
            if self._nowhere is not None:
                raise self._nowhere
            return epochs
        self._history.take(found[0].epoch, found[0].history)
        self._metrics.reset()
        self.load_state_dict(saved["loop"], self._steps, whole=False)
        restore(trainer._given, saved["callbacks"])
        self._epoch, self._begun, self._ends = trainer.epoch, trainer.epoch - 1, False
        self._stage, self._hook = TRAIN, ALL
        self._keep_mark()
        return range(trainer.epoch, trainer.epoch if found[1] else epochs.stop)

    def _state(self) -> dict[str, Any]:
        """What a new task needs beside model and optimizer; of this task alone."""
        trainer, mark = self._recovering, self._mark
        return {
            "at": [trainer.step, trainer.epoch],
            "scheduler": scheduler_state(trainer.scheduler),
            "loss": trainer.loss_buffers.changed(),
            "callbacks": callback_states(trainer._given),
            "meaning": meaning(self.chain, self._steps, trainer.seed),
            "mark": [mark.data, list(mark.seen), mark.done, mark.examples],
            "before": self._before,
            "last": [float(each) for each in self._logs.last or ()],
            OF_GROUP: [self._loss, self._weight, self._metrics.state_dict()],
            "metrics_before": self._metrics_before,
            "history": asdict(self._history),
            "found": [self._found_at, dict(self._found)],
            "kept": [kept_by(each) for each in trainer._given],
            "stop": [trainer.stop_training, self._ends, trainer.skips.state_dict()],
            "begun": self._begun,
            "random": random_state(),
        }

    def _load(self, state: dict[str, Any], is_new: bool) -> None:
        trainer = self._recovering
        data, seen, done, examples = state["mark"]
        there = {"data": data, "done": done, "meaning": state["meaning"]}
        check_position(there, meaning(self.chain, self._steps, trainer.seed))
        self._mark = Mark(data, tuple(seen), done, examples)
        self._done, self._examples = done, examples
        self._before = state["before"]
        self._logs.last = tuple(state["last"]) or None
        self._loss, self._weight, metrics = state.get(OF_GROUP, (0.0, 0.0, None))
        if metrics is None:  # what a group has found is lost with it
            self._metrics.reset()
        else:
            self._metrics.load_state_dict(metrics)
        self._metrics_before = state["metrics_before"]
        self._history.take(**state["history"])
        self._found_at, self._found = state["found"]
        for callback, kept in zip(trainer._given, state["kept"], strict=True):
            give_kept(callback, kept, trainer.strategy)
        trainer.stop_training, self._ends, skips = state["stop"]
        trainer.skips.load_state_dict(skips)
        trainer.step, trainer.epoch = state["at"]
        load_scheduler(trainer.scheduler, state["scheduler"])
        if is_new:  # who was there has its own, of the rows that it has seen
            trainer.loss_buffers.take(state["loss"])
        self._is_late, self._saved_callbacks = state["begun"] >= self._epoch, state["callbacks"]
        restore(trainer._given, self._saved_callbacks)
        if is_new:  # who was behind has drawn for that step already
            set_random_state(state["random"])

    def _catch_up(self) -> None:
        """What a new task does before its first step; its callbacks begin where the others are."""
        self._complete_history()
        self._begin_late()
        restore(self._recovering._given, self._saved_callbacks)

    def _begin_late(self) -> None:
        """Begin the epoch that the others have begun: what callbacks set then is set already."""
        rates = [dict(group) for group in self._trainer.optimizer.param_groups]
        if self._stage == TRAIN and self._is_late:
            self._begin_epoch(self._epoch)
            for group, before in zip(self._trainer.optimizer.param_groups, rates, strict=True):
                group.update(before)

    def _make_up_for(self, step: int, epoch: int, stage: int, hook: int) -> None:
        """Call what callbacks missed while this task was behind, unless they keep a state.

        That came with the others', and knows of it. Others may have ended who was interrupted.
        """
        trainer, until = self._trainer, self._hook
        if (step, epoch, stage, hook) >= (trainer.step, self._epoch, self._stage, until):
            return
        after = -1 if stage == CONCLUDE or step < trainer.step else hook
        for callback in missed(trainer.callbacks, self._keys(), after, until):
            if stage == TRAIN:
                callback.on_train_batch_end(self._done - 1, self._logs)
            else:
                callback.on_epoch_end(epoch, self._found)
        self._begin_late()

    def _take_office(self) -> None:
        """Another task may be the first now: it writes and prints from now on."""
        trainer = self._recovering
        if take_office(trainer):
            restore(trainer._given, callback_states(trainer._given))
            for callback in trainer.callbacks:
                callback.on_train_begin()
            self._complete_history()

    def _complete_history(self) -> None:
        folder = self._recovering._folder
        if folder is not None and self._found and self._history.epoch:
            folder.complete(self._history.epoch[-1], self._found_at, self._found)
