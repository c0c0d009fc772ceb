"""Loss and metrics over a data set, exact over all replicas."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from itertools import chain as flatten
from itertools import islice
from typing import Any

from torch import Tensor, nn

from spartito.data.batch import Batch
from spartito.data.dataset import Dataset
from spartito.engine.devices.host_reads import Number, added, on_host
from spartito.engine.logged import listening
from spartito.engine.losses.loss import LossFunction
from spartito.errors import UserError
from spartito.heartbeat import EVALUATE, beat
from spartito.notes import warn
from spartito.strategies import Strategy
from spartito.training.callback import Callback, hooks
from spartito.training.evaluation.eval_prediction import ComputeMetrics, Predictions
from spartito.training.fitting.batch_blame import note_batch
from spartito.training.fitting.train_modes import evaluating
from spartito.training.loops.clock import StepLogs
from spartito.training.metrics import Metric
from spartito.training.metrics.base import encode
from spartito.training.metrics.gathering import MetricSet, computed
from spartito.training.metrics.logged import refuse_uncounted


class Evaluation:
    """Loss and metrics over a data set, exact over all replicas."""

    def __init__(
        self,
        strategy: Strategy,
        model: nn.Module,
        loss: LossFunction | None,
        metrics: Sequence[Metric],
        chain: Dataset,
        steps: int | None,
        compute_metrics: ComputeMetrics | None = None,
    ) -> None:
        self._compute = compute_metrics
        self._strategy, self._model, self._loss = strategy, model, loss
        self._metrics = MetricSet(metrics)
        self._chain, self._steps = chain, steps
        self.distribute()

    def distribute(self) -> None:
        """Take this task's part of the data, anew where others are there than before."""
        self._batches = self._strategy.distribute(self._chain, training=False)

    def run(self, callbacks: Sequence[Callback] = ()) -> dict[str, Any]:
        """The figures, equal on all replicas: ``{"loss": ..., "accuracy": ...}``."""
        self._metrics.reset()
        begin, end = (hooks(callbacks, f"on_test_batch_{when}") for when in ("begin", "end"))
        logs = StepLogs(self._metrics)
        for callback in callbacks:
            callback.on_test_begin()
        predictions = None if self._compute is None else Predictions(self._compute)
        losses: list[Number] = [0.0, 0.0]
        examples = 0
        self._strategy.coordination.synchronize()
        with evaluating(self._model), self._listening():
            # It is kept, so that a corrupt example is named once.
            self._batches.load_state_dict({"pass": 0, "step": 0})
            with closing(self._once()) as batches:
                for number, batch in enumerate(batches):
                    beat(None, EVALUATE)
                    for hook in begin:
                        hook(number)
                    try:
                        with self._refusing():
                            loss, weight, output = self._strategy.evaluate(batch, self._loss)
                    except Exception as error:
                        at = f"in evaluation step {number + 1}"
                        note_batch(error, batch, self._chain, at, self._model)
                        raise
                    losses = [added(losses[0], loss), added(losses[1], weight)]
                    examples += batch.size
                    self._metrics.update(output, batch)
                    if predictions is not None:
                        predictions.add(output, batch)
                    if end and (isinstance(losses[1], Tensor) or losses[1]):
                        logs.last = losses[0], losses[1]
                    for hook in end:
                        hook(number, logs)
                    self._metrics.logged.settle(batch.size)
        own, states = on_host((losses, self._metrics.states()))  # the one wait for the device
        loss, weight, examples_in_all = self._batches.total((), [*map(float, own), examples])
        if not examples_in_all:
            raise UserError("an evaluation without examples", "Give it some data.")
        if not weight:
            raise UserError(
                f"an evaluation of {examples_in_all:.0f} examples of which none counts",
                "Their targets are all left out (ignore_index), or weigh nothing.",
            )
        found = {"loss": loss / weight}
        parts = self._batches.collect(encode(states))
        found |= computed(self._metrics.merged(parts, {}))
        if predictions is not None:
            found |= predictions.figures(self._batches.collect(predictions.state()), [*found])
        for callback in callbacks:
            callback.on_test_end(found)
        return found

    def _listening(self) -> AbstractContextManager[None]:
        """A block in which figures are reported by `sp.log`."""
        return listening(self._metrics.logged.take if self._is_counted else None)

    def _refusing(self) -> AbstractContextManager[None]:
        """A block in which the model reports none on a task whose figures do not count."""
        return nullcontext() if self._is_counted else listening(refuse_uncounted)

    @property
    def _is_counted(self) -> bool:
        return self._strategy.engine.parts.placement.account.counts

    def _once(self) -> Generator[Batch]:
        """The batches of one epoch, no more than the steps that were asked for."""
        if self._chain.repeats is None:
            yield from flatten.from_iterable(self._batches.epochs(1, self._steps, 0))
            return
        done = 0
        for batch in islice(self._batches, self._steps):
            done += 1
            yield batch
        if self._steps is not None and done < self._steps:
            warn("%d steps to evaluate, and the data has %d batches", self._steps, done)
            self._steps = None  # said once
