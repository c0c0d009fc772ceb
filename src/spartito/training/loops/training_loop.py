"""The loop inside `Trainer.fit`."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, closing
from typing import Any

import torch

from spartito.data.batch import Batch
from spartito.data.dataset import Dataset
from spartito.data.memory import few_rows, which_examples
from spartito.engine.devices.host_reads import Number, added, read
from spartito.engine.logged import listening, log
from spartito.engine.modules.absent_values import RefusingAbsent
from spartito.engine.randomness.seed import random_state, set_random_state
from spartito.failpoints import watched
from spartito.heartbeat import DATA, EVALUATE, SERVE, STEP, beat
from spartito.notes import warn
from spartito.strategies import StepResult
from spartito.training.callback import Training, hooks, runs_users_code
from spartito.training.evaluation.evaluate import Evaluation
from spartito.training.files.resume import check_position, meaning, next_epoch
from spartito.training.fitting.batch_blame import note_batch
from spartito.training.fitting.nonfinite import SKIP, SKIPPED
from spartito.training.history import History
from spartito.training.loops.clock import Clock, StepLogs
from spartito.training.metrics import Metric
from spartito.training.metrics.base import State
from spartito.training.metrics.gathering import MetricSet, computed
from spartito.training.metrics.logged import refuse_uncounted
from spartito.training.metrics.names import GRADIENT_NORM


class TrainingLoop:
    """Runs epochs over one data set, and knows where it is in them."""

    _loss: Number
    _weight: Number

    def __init__(self, trainer: Training, chain: Dataset, before: TrainingLoop | None) -> None:
        self.chain = chain
        self._trainer = trainer
        self._strategy, self._coordination = trainer.strategy, trainer.coordination
        self._coordination.compare_data(few_rows(chain.source), which_examples(chain.source))
        self._batches = trainer.strategy.distribute(chain, seed=trainer.seed)
        self.clock = Clock(lambda: self._batches.waited, self._batches.overlaps)
        if before is not None:  # other data, but no order of passes that was seen already
            position = before._batches.state_dict()
            self._batches.load_state_dict(next_epoch({**position, "step": 1}, chain))
        self._metrics = MetricSet(trainer.metrics)
        self._metrics_before: dict[str, State] = {}
        self._logs = StepLogs(self._metrics)
        self._steps: int | None = None
        self._own_examples = self._own_batches = 0
        self._waited = 0.0  # for other tasks, inside of epochs
        self._was_finite, self._running = True, 0
        watched(trainer)
        self._random = ""  # of the moment at which a resumed epoch goes on
        self._forget()

    def run(
        self, epochs: range, steps: int | None, validation: Evaluation | None, history: History
    ) -> None:
        """Train the ``epochs``, each of ``steps`` batches or as many as there are."""
        callbacks = self._trainer.callbacks
        self._steps = steps
        self._coordination.watch(any(map(runs_users_code, callbacks)), alone=True)
        with self._coordination.in_callbacks():
            for callback in callbacks:
                callback.on_train_begin()
        batches = self._batches.epochs(len(epochs), steps, self._done, self)
        with closing(batches):
            for epoch in epochs:
                self._begin_epoch(epoch)  # before the next line gives out any work
                self._run_epoch(epoch, next(batches), validation, history)
                if self._agree_to_stop(last=epoch + 1 == epochs.stop):
                    break
        with self._coordination.in_callbacks():
            for callback in callbacks:
                callback.on_train_end()

    def _begin_epoch(self, epoch: int) -> None:
        with self._listening(), self._between_steps():
            for callback in self._trainer.callbacks:
                callback.on_epoch_begin(epoch)
        self._coordination.publish_rates()

    @property
    def position(self) -> tuple[int, int]:
        """The epoch that runs, and how many of its batches are done; both begin at 0."""
        return self._running, self._done

    def record(self) -> dict[str, Any]:
        """What this task did so far, and where its time went."""
        traffic = self._coordination.traffic
        return {
            "seconds": self.clock.total_seconds,
            "waited_for_data_seconds": self.clock.total_waited,
            "waited_for_tasks_seconds": self._waited,
            "bytes_sent": traffic.sent,
            "bytes_received": traffic.received,
            "compression_error": traffic.compression_error,
            "examples": self._own_examples,
            "batches": self._own_batches,
        }

    def state_dict(self) -> dict[str, Any]:
        """Where the loop is: the position in the data, and the sums of the epoch over all."""
        loss, weight = self._sums()
        metrics = self._whole_metrics() if self._done else []
        ended = self._trainer.epoch > self._running
        data, step, done = self._batches.settled(self._trainer.step, self._done, ended)
        return {
            "data": data,
            "step": step,
            "meaning": meaning(self.chain, self._steps, self._trainer.seed),
            "done": done,
            "examples": self.clock.examples if self._done else 0,
            "loss": loss,
            "weight": weight,
            "own": self._own_sums(),
            "metrics": {metric.name: metric.state_dict() for metric in metrics},
            "skips": self._trainer.skips.state_dict(),
            "random": self._coordination.tell_all(random_state()),
            "tasks": self._coordination.cluster.num_computing,
        }

    def load_state_dict(self, state: dict[str, Any], steps: int | None, whole: bool) -> None:
        """Go there, under any number of replicas; ``whole`` begins an epoch after it instead.

        Raises `UserError` where an epoch of ``steps`` of this data has no such position.
        """
        self._cut = False
        if whole:
            self._batches.load_state_dict(next_epoch(state["data"], self.chain))
            return
        check_position(state, meaning(self.chain, steps, self._trainer.seed))
        self._batches.load_state_dict(state["data"])
        self._done, self._examples = state["done"], state["examples"]
        self._trainer.skips.load_state_dict(state.get("skips", {}))
        before = [state["loss"], state["weight"]]
        if not self._batches.alike:
            self._before = before
            self._take_own(state.get("own", []))
        else:  # all have the same sums, and go on adding where they were: bitwise
            self._loss, self._weight = before
        cluster, found = self._coordination.cluster, state.get("random", ())
        if state.get("tasks") == cluster.num_computing and cluster.rank < len(found):
            self._random = found[cluster.rank]
        self._metrics_before = {
            name: saved if isinstance(saved, dict) else {"sums": torch.tensor(saved).double()}
            for name, saved in state["metrics"].items()
        }

    def _run_epoch(
        self,
        epoch: int,
        batches: Generator[Batch],
        validation: Evaluation | None,
        history: History,
    ) -> None:
        trainer, callbacks = self._trainer, self._trainer.callbacks
        self._running = epoch
        with closing(batches), self._listening():
            self._train_epoch(batches)
        trainer.epoch = epoch + self._is_whole()
        coordination = self._coordination
        with coordination.deciding():
            with coordination.during("end of epoch"):
                logs = self._conclude(epoch, validation, history) if coordination.decides else {}
            self._end_epoch()
            with self._between_steps():
                for callback in callbacks:
                    callback.on_epoch_end(epoch, logs)

    def _listening(self) -> AbstractContextManager[None]:
        """A block of steps, in which figures are reported by `sp.log`."""
        return listening(self._metrics.logged.take if self._is_counted else None)

    def _between_steps(self) -> AbstractContextManager[object]:
        """A block of callbacks, to which some tasks show layers without values."""
        hidden = self._strategy.engine.parts.placement.account.hides_outputs
        return RefusingAbsent() if hidden else self._coordination.in_callbacks()

    @property
    def _is_counted(self) -> bool:
        return self._strategy.engine.parts.placement.account.counts

    def _conclude(
        self, epoch: int, validation: Evaluation | None, history: History
    ) -> dict[str, Any]:
        """What the epoch came to, which also decides about the next learning rate."""
        trainer = self._trainer
        self._coordination.compare(self._batches.order())
        figures, timing = self._figures()
        if validation is not None:
            found = validation.run(trainer.callbacks)
            figures |= {f"val_{name}": value for name, value in found.items()}
        timing["seconds"] = self.clock.seconds
        if trainer.epoch > epoch and trainer.schedule.end_epoch(figures):
            self._coordination.publish_rates()
        history.add(epoch, figures)
        return {**figures, **timing}

    def _train_epoch(self, batches: Iterator[Batch]) -> None:
        trainer, strategy, clock, logs = self._trainer, self._strategy, self.clock, self._logs
        begin = hooks(trainer.callbacks, "on_train_batch_begin")
        end = self._after_steps()
        trainer.modes.begin(trainer.model, trainer.is_chief)
        trainer.schedule.begin_epoch()
        clock.start(self._examples)
        if self._random:
            set_random_state(self._random)
            self._random = ""
        waited = self._coordination.traffic.waited
        now, step = time.perf_counter, self._step if self._is_counted else self._step_uncounted
        while True:
            before = now()
            beat(trainer.step, DATA)
            batch = next(batches, None)
            beat(trainer.step, EVALUATE if batch is None else STEP)
            clock.waited += now() - before
            if batch is None:
                break
            if begin:
                with self._between_steps():
                    for hook in begin:
                        hook(self._done)
            try:
                result = step(batch)
            except Exception as error:
                at = f"in step {self._done + 1} of epoch {self._running + 1}"
                note_batch(error, batch, self.chain, at, trainer.model)
                raise
            self._own_examples += batch.size
            self._own_batches += 1
            ends = self._came(result)
            if end:
                with self._between_steps():
                    for hook in end:  # of several workers the first batch may be open
                        hook(max(self._done - 1, 0), logs)
            self._metrics.logged.settle(batch.size)  # what callbacks reported is of these rows
            if ends:
                self._leave()
                trainer.stop_training = True
                break
        for result in self._batches.watch():
            beat(trainer.step, SERVE)
            self._came(result)
            if end and (result.updates or result.batches):
                with self._between_steps():
                    for hook in end:
                        hook(max(self._done - 1, 0), logs)
            if self._coordination.agree_to_stop(trainer.stop_training or trainer.is_at_end):
                break
        rest = strategy.flush()
        if rest is not None:
            self._came(rest)
        clock.stop()
        self._waited += self._coordination.traffic.waited - waited

    def _step(self, batch: Batch) -> StepResult:
        """Train on a batch, and look at what the model made of its rows."""
        trainer = self._trainer
        stop = trainer.stop_training or trainer.notice.came or trainer.ends_next
        result = self._strategy.step(batch, trainer.loss, stop=stop)
        if result.output is not None:
            self._metrics.update(result.output, batch)
        elif not batch.size:
            self._metrics.logged.forget()
        return result

    def _step_uncounted(self, batch: Batch) -> StepResult:
        """The same on a task whose figures do not count: its part of the model reports none."""
        with listening(refuse_uncounted):
            return self._step(batch)

    def _after_steps(self) -> list[Callable[..., None]]:
        """What is called after each step."""
        return hooks(self._trainer.callbacks, "on_train_batch_end")

    def _came(self, result: StepResult) -> bool:
        """Count what was done, here and by others; whether an end was asked for."""
        self._done += result.batches
        self.clock.examples += result.examples
        self._loss = added(self._loss, result.loss)
        self._weight = added(self._weight, result.weight)
        self._logs.last = result.shown or self._logs.last
        trainer = self._trainer
        trainer.step += result.updates
        trainer.skips.came(result.updates, result.dropped)
        if result.norm is not None:
            log(GRADIENT_NORM, result.norm, 1)
        if self._coordination.decides:  # under servers the chief's options are everybody's
            trainer.schedule.came(result.batches, result.updates, trainer.steps_per_epoch)
        return result.stop

    def _figures(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The epoch's loss and metrics over all replicas, and where its time went."""
        clock = self.clock
        timing = {
            "examples_per_second": clock.rate,
            **self._coordination.waits(clock.wait_fraction, clock.seconds),
        }
        loss, weight = self._sums()
        found = {"loss": loss / weight if weight else float("nan")}
        counts = weight or self._trainer.skips.epoch
        if not counts and self.clock.examples and self._trainer.is_chief:
            warn(
                "none of the %d examples of this epoch counts: their targets are all left out "
                "(ignore_index), or weigh nothing",
                self.clock.examples,
            )
        if weight and not math.isfinite(loss) and self._was_finite and self._trainer.is_chief:
            warn(
                "the loss of this epoch is %s: Trainer(on_nonfinite='skip') leaves out updates "
                "that are not finite, the callback TerminateOnNaN() ends the training",
                loss / weight,
            )
        self._was_finite = math.isfinite(loss)
        found |= computed(self._whole_metrics())
        if self._trainer.on_nonfinite == SKIP:
            found[SKIPPED] = self._trainer.skips.epoch
        found |= self._coordination.figures(self.sums())
        return found, timing

    def sums(self) -> list[float]:
        """This task's sums of the epoch: loss and its weight."""
        self._loss, self._weight = found = read([self._loss, self._weight])
        return found

    def take(self) -> bytes:
        """The state of this task's metrics since the last call."""
        return self._metrics.take()

    def show(self) -> bytes:
        """The same, which is not taken, and without the batch that is computed now."""
        return self._metrics.show()

    def _sums(self) -> list[float]:
        """The same over all replicas, with what came before a checkpoint."""
        total = self._batches.total(self.sums(), ())
        return [now + before for now, before in zip(total, self._before, strict=True)]

    def _own_sums(self) -> list[list[float]]:
        """The sums of each task, where they differ and all meet: for a bitwise resume."""
        if self._batches.alike or self._batches.overlaps:
            return []
        return [json.loads(each) for each in self._coordination.tell_all(json.dumps(self.sums()))]

    def _take_own(self, found: list[list[float]]) -> None:
        """Go on from one's own sums, if those of all tasks are still what they were together."""
        cluster = self._coordination.cluster
        if len(found) == cluster.num_computing and cluster.rank < len(found):
            mine = found[cluster.rank]
            if self._batches.total(mine, ()) == self._before:
                (self._loss, self._weight), self._before = mine, [0.0, 0.0]

    def _whole_metrics(self) -> list[Metric]:
        """The epoch's metrics over all replicas, with what came before a checkpoint."""
        return self._metrics.merged(
            self._batches.collect(self._metrics.state()), self._metrics_before
        )

    def _is_whole(self) -> bool:
        """Whether the epoch has come to its end: not where ``max_steps`` came before.

        What is left of such a one is trained on where the training goes on.
        """
        if not self._trainer.is_at_end:
            return True
        steps = self._steps
        if self._batches.overlaps:  # its position is behind: what was leased in part comes again
            steps = steps or self.chain.steps_per_epoch
        if steps is not None:
            return bool(self._done >= steps)
        position = self._batches.state_dict()
        return not position["step"] and not position["pass"] % (self.chain.repeats or 1)

    def _end_epoch(self) -> None:
        """Begin a new epoch, unless this one is to be gone on with where it is."""
        self._cut = self._trainer.epoch <= self._running and not self._batches.overlaps
        if not self._cut:
            self._forget()

    def begin_anew(self) -> None:
        """A new fit begins: what `max_steps` has left of an epoch is no part of its first one."""
        if self._cut:
            self._forget()

    def _forget(self) -> None:
        """Have trained nothing of an epoch."""
        self._cut = False
        self._done = self._examples = 0
        self._loss = self._weight = 0.0
        self._before = [0.0, 0.0]
        self._trainer.skips.epoch = 0
        self._metrics_before = {}
        self._metrics.reset()

    def _agree_to_stop(self, *, last: bool) -> bool:
        trainer = self._trainer
        with self._coordination.during("end of epoch"):
            asked = trainer.stop_training or trainer.is_at_end
            asked = asked or (trainer.notice.came and not last)
            found = self._coordination.agree_to_end(asked)
            if found and not last:
                self._leave()
        trainer.stop_training = found
        return found

    def _leave(self) -> None:
        """All stop: save and leave where a task was told to, unless somebody wants an end."""
        trainer, coordination = self._trainer, self._coordination
        mine = json.dumps([trainer.stop_training, trainer.notice.text])
        told = [json.loads(text) for text in coordination.tell_all(mine)]
        if any(stops for stops, _ in told):
            return
        for rank, (_, text) in enumerate(told):
            if text:
                name = (
                    coordination.cluster.name_of(rank) if len(told) > 1 else coordination.job.task
                )
                trainer.notice.leave(f"{text} came to {name}")
