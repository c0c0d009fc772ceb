"""The metrics of one epoch or evaluation: what this task has seen, and what all have."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from spartito.data.batch import Batch
from spartito.training.metrics.base import Metric, State, Value, decode, encode, named
from spartito.training.metrics.logged import Logged


class MetricSet:
    """Fresh copies of ``metrics``, which this task updates with its own rows.

    What was handed in (`take`) still counts for the values that are shown here.
    """

    def __init__(self, metrics: Sequence[Metric]) -> None:
        self._given = [metric.fresh() for metric in metrics]
        self.logged = Logged({metric.name for metric in metrics})
        self._metrics = [*self._given, self.logged]
        self._taken: list[bytes] = []

    def update(self, output: Any, batch: Batch) -> None:
        """Add the rows of a local batch, if there are any, and what was reported of them."""
        size = batch.size
        if not size:
            self.logged.forget()
            return
        if self._given:
            target, learns = batch.target, torch.is_grad_enabled()
            torch._C._set_grad_enabled(False)  # torch.no_grad() is four calls of Python
            try:
                for metric in self._given:
                    metric.update(output, target, size)
            finally:
                torch._C._set_grad_enabled(learns)
        self.logged.settle(size)

    def reset(self) -> None:
        """Begin a new epoch."""
        self._taken.clear()
        for metric in self._metrics:
            metric.reset()

    def states(self) -> list[State]:
        """What came since the last `take`, on the devices where it is."""
        return [metric.state_dict() for metric in self._metrics]

    def state(self) -> bytes:
        """The same for other tasks; empty where there is nothing to tell."""
        return encode(self.states()) if self._given or self.logged.has_any else b""

    def show(self) -> bytes:
        """The same in the middle of a batch, which counts for nothing yet."""
        own = [*(metric.state_dict() for metric in self._given), self.logged.settled()]
        return encode(own) if self._given or own[-1] else b""

    def take(self) -> bytes:
        """What `state` returns, which is not handed in again."""
        data = self.state()
        if data:
            self._taken.append(data)
            for metric in self._metrics:
                metric.reset()
        return data

    def merged(self, parts: Iterable[bytes], before: Mapping[str, State]) -> list[Metric]:
        """Metrics of all that ``parts`` have seen, and ``before`` (states by name)."""
        states = [decode(part) for part in parts if part]
        found = [metric.fresh() for metric in self._metrics]
        for number, metric in enumerate(found):
            metric.merge([before.get(metric.name, {}), *(part[number] for part in states)])
        return found

    def value(self, name: str) -> Value:
        """The figure ``name`` of this task's own rows so far."""
        for metric in self._own():
            if not metric.name or name == metric.name or name.startswith(f"{metric.name}_"):
                values = named(metric.name, metric.compute())
                if name in values:
                    return values[name]
        raise KeyError(name)

    def names(self) -> Iterator[str]:
        """The figures that are known so far, and cost little."""
        for metric in self._own():
            if not metric.costly:
                values = named(metric.name, metric.compute())
                yield from (name for name, value in values.items() if value == value)

    def _own(self) -> list[Metric]:
        return self.merged([*self._taken, self.state()], {}) if self._taken else self._metrics


def computed(metrics: Iterable[Metric]) -> dict[str, Value]:
    """The values of all ``metrics`` by name."""
    return {
        name: value
        for metric in metrics
        for name, value in named(metric.name, metric.compute()).items()
    }
