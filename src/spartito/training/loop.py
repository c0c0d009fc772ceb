"""The loops inside `Trainer.fit` and `Trainer.evaluate`."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from spartito.data.batch import Batch
from spartito.data.dataset import Dataset
from spartito.engine.loss import LossFunction
from spartito.errors import UserError
from spartito.strategies import StepResult, Strategy
from spartito.training.callback import Callback, Training
from spartito.training.history import History
from spartito.training.metrics import MeanMetric


class Clock:
    """Where the time of an epoch goes, and how many examples it saw."""

    def __init__(self) -> None:
        self.start()

    def start(self, examples: int = 0) -> None:
        """Begin an epoch of which ``examples`` were trained on before."""
        self.began = time.perf_counter()
        self.waited = 0.0
        self.examples = examples
        self._before = examples

    @property
    def seconds(self) -> float:
        """Since the epoch began."""
        return time.perf_counter() - self.began

    @property
    def rate(self) -> float:
        """Examples per second over all replicas."""
        return (self.examples - self._before) / max(self.seconds, 1e-9)

    @property
    def wait_share(self) -> float:
        """The share of the time that this replica waited for data."""
        return self.waited / max(self.seconds, 1e-9)


class StepLogs(Mapping[str, float]):
    """The figures of the epoch so far, computed when they are looked at.

    ``loss`` is the last step's and exact over all replicas; a metric is this replica's mean.
    """

    def __init__(self, metrics: Sequence[MeanMetric]) -> None:
        self._metrics = {metric.name: metric for metric in metrics}
        self.last = float("nan")

    def __getitem__(self, name: str) -> float:
        return self.last if name == "loss" else self._metrics[name].value

    def __iter__(self) -> Iterator[str]:
        yield "loss"
        yield from self._metrics

    def __len__(self) -> int:
        return 1 + len(self._metrics)


class TrainingLoop:
    """Runs epochs over one data set, and knows where it is in them."""

    def __init__(self, trainer: Training, chain: Dataset, before: TrainingLoop | None) -> None:
        self.chain = chain
        self.clock = Clock()
        self._trainer = trainer
        self._strategy = trainer.strategy
        self._batches = trainer.strategy.distribute(chain, seed=trainer.seed)
        if before is not None:  # other data, but no order of passes that was seen already
            self._batches.load_state({"pass": before._batches.state()["pass"] + 1, "step": 0})
        self._stream: Iterator[Batch] | None = None
        self._metrics = [copy.copy(metric) for metric in trainer.metrics]
        self._logs = StepLogs(self._metrics)
        self._forget()

    def run(
        self,
        epochs: range,
        steps: int | None,
        validation: Evaluation | None,
        history: History,
    ) -> None:
        """Train the ``epochs``, each of ``steps`` batches or as many as there are."""
        callbacks = self._trainer.callbacks
        for callback in callbacks:
            callback.on_train_begin()
        try:
            for epoch in epochs:
                self._run_epoch(epoch, steps, validation, history)
                if self._agree_to_stop():
                    break
        finally:
            self._end_stream()
        for callback in callbacks:
            callback.on_train_end()

    def state(self) -> dict[str, Any]:
        """Where the loop is: the place in the data, and the sums of the epoch over all replicas."""
        return {
            "data": self._batches.state(),
            "done": self._done,
            "examples": self.clock.examples if self._done else 0,
            "loss": self._loss,
            "weight": self._weight,
            "metrics": dict(zip([m.name for m in self._metrics], self._sums(), strict=True)),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Go there, under any number of replicas."""
        self._end_stream()
        self._batches.load_state(state["data"])
        self._done, self._examples = state["done"], state["examples"]
        self._loss, self._weight = state["loss"], state["weight"]
        if self._strategy.is_chief:  # the sums are over all replicas: one of them keeps them
            for metric in self._metrics:
                metric.total, metric.count = state["metrics"].get(metric.name, (0.0, 0.0))

    def _run_epoch(
        self, epoch: int, steps: int | None, validation: Evaluation | None, history: History
    ) -> None:
        trainer, callbacks = self._trainer, self._trainer.callbacks
        for callback in callbacks:
            callback.on_epoch_begin(epoch)
        self._train_epoch(steps)
        figures, timing = self._figures()
        if validation is not None:
            figures |= {f"val_{name}": value for name, value in validation.run().items()}
        timing["seconds"] = self.clock.seconds
        if isinstance(trainer.scheduler, ReduceLROnPlateau):
            trainer.scheduler.step(figures.get("val_loss", figures["loss"]))
        trainer.epoch = epoch + 1
        history.add(epoch, figures)
        self._forget()
        for callback in callbacks:
            callback.on_epoch_end(epoch, {**figures, **timing})

    def _train_epoch(self, steps: int | None) -> None:
        trainer, strategy, clock = self._trainer, self._strategy, self.clock
        loss, metrics, logs = trainer.loss, self._metrics, self._logs
        listeners = [
            callback
            for callback in trainer.callbacks
            if type(callback).on_train_batch_end is not Callback.on_train_batch_end
        ]
        scheduler = None if isinstance(trainer.scheduler, ReduceLROnPlateau) else trainer.scheduler
        batches = self._open(endless=steps is not None)
        trainer.model.train()
        clock.start(self._examples)
        now = time.perf_counter
        while steps is None or self._done < steps:
            before = now()
            batch = next(batches, None)
            clock.waited += now() - before
            if batch is None:
                break
            result = strategy.step(batch, loss, stop=trainer.stop_training)
            self._done += 1
            clock.examples += batch.global_size
            if metrics and result.output is not None and batch.size:
                target = batch.y
                with torch.no_grad():
                    for metric in metrics:
                        metric.update(result.output, target, batch.size)
            if result.updated:
                self._updated(result)
                if scheduler is not None:
                    scheduler.step()
            for callback in listeners:
                callback.on_train_batch_end(self._done - 1, logs)
            if result.stop:
                trainer.stop_training = True
                break
        rest = strategy.flush()
        if rest is not None:
            self._updated(rest)
            if scheduler is not None:
                scheduler.step()

    def _updated(self, result: StepResult) -> None:
        self._trainer.step += 1
        self._loss += result.loss
        self._weight += result.weight
        if result.weight:
            self._logs.last = result.loss / result.weight

    def _figures(self) -> tuple[dict[str, float], dict[str, float]]:
        """The epoch's loss and metrics over all replicas, and where its time went."""
        timing = {
            "examples_per_second": self.clock.rate,
            "data_wait_share": float(
                self._strategy.reduce("mean", torch.tensor([self.clock.wait_share]).double())
            ),
        }
        figures = {"loss": self._loss / self._weight if self._weight else float("nan")}
        for metric, (total, count) in zip(self._metrics, self._sums(), strict=True):
            figures[metric.name] = total / count if count else float("nan")
        return figures, timing

    def _sums(self) -> list[list[float]]:
        return sum_over_replicas(
            self._strategy, [[metric.total, metric.count] for metric in self._metrics]
        )

    def _forget(self) -> None:
        """Begin a new epoch."""
        self._done = self._examples = 0
        self._loss = self._weight = 0.0
        for metric in self._metrics:
            metric.reset()

    def _agree_to_stop(self) -> bool:
        asked = torch.tensor([float(self._trainer.stop_training)])
        self._trainer.stop_training = bool(self._strategy.reduce("max", asked))
        return self._trainer.stop_training

    def _open(self, endless: bool) -> Iterator[Batch]:
        """The batches from here on; an endless stream stays open, with what it has read ahead."""
        if not endless:
            self._end_stream()
            return iter(self._batches)
        self._stream = self._stream or self._batches.endless()
        return self._stream

    def _end_stream(self) -> None:
        if self._stream is not None:
            self._stream.close()  # type: ignore[attr-defined]
            self._stream = None


class Evaluation:
    """Loss and metrics over a data set, exact over all replicas."""

    def __init__(
        self,
        strategy: Strategy,
        model: nn.Module,
        loss: LossFunction | None,
        metrics: Sequence[MeanMetric],
        chain: Dataset,
        steps: int | None,
    ) -> None:
        self._strategy, self._model, self._loss = strategy, model, loss
        self._metrics = [copy.copy(metric) for metric in metrics]
        self._batches, self._steps = strategy.distribute(chain), steps

    def run(self) -> dict[str, float]:
        """The figures, equal on all replicas: ``{"loss": ..., "accuracy": ...}``."""
        for metric in self._metrics:
            metric.reset()
        losses = [0.0, 0.0]
        self._strategy.synchronize()
        with evaluating(self._model):
            batches = self._batches  # kept, so that a corrupt example is named once
            batches.load_state({"pass": 0, "step": 0})
            for batch in islice(batches if self._steps is None else batches.endless(), self._steps):
                loss, weight, output = self._strategy.evaluate(batch, self._loss)
                losses[0] += loss
                losses[1] += weight
                if batch.size:
                    for metric in self._metrics:
                        metric.update(output, batch.y, batch.size)
        pairs = [losses, *([metric.total, metric.count] for metric in self._metrics)]
        names = ["loss", *(metric.name for metric in self._metrics)]
        sums = sum_over_replicas(self._strategy, pairs)
        if not sums[0][1]:
            raise UserError("an evaluation without examples", "Give it some data.")
        return {name: total / count for name, (total, count) in zip(names, sums, strict=True)}


def sum_over_replicas(strategy: Strategy, pairs: list[list[float]]) -> list[list[float]]:
    """Each number summed over the replicas, in double precision."""
    if not pairs:
        return []
    total: list[list[float]] = strategy.reduce(
        "sum", torch.tensor(pairs, dtype=torch.float64)
    ).tolist()
    return total


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode, without gradients, and then as it was."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)
