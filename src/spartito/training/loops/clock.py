"""Where the time of an epoch goes, and its figures so far."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping

from torch import Tensor

from spartito.engine.devices.host_reads import read
from spartito.training.metrics.base import Value
from spartito.training.metrics.gathering import MetricSet


class Clock:
    """Where the time of an epoch goes, and how many examples it saw.

    ``others`` returns the seconds so far in which other tasks kept this one from its next batch.
    With ``overlaps`` they train while this one evaluates, so that this time counts for the rate.
    """

    def __init__(self, others: Callable[[], float] = float, overlaps: bool = False) -> None:
        self.total_seconds = self.total_waited = 0.0
        self._others = others
        self._overlaps = overlaps
        self._ended: float | None = None
        self.start()

    def start(self, examples: int = 0) -> None:
        """Begin an epoch of which ``examples`` were trained on before."""
        self.began = time.perf_counter()
        self._working = self._ended if self._overlaps and self._ended else self.began
        self.waited = 0.0
        self.examples = examples
        self._before = examples
        self._others_before = self._others()

    def stop(self) -> None:
        """The epoch ends: add its time to that of all."""
        self._ended = time.perf_counter()
        self.total_seconds += self.seconds
        self.total_waited += self.waited_for_data

    @property
    def seconds(self) -> float:
        """Since the epoch began."""
        return time.perf_counter() - self.began

    @property
    def rate(self) -> float:
        """Examples per second over all replicas."""
        return (self.examples - self._before) / max(time.perf_counter() - self._working, 1e-9)

    @property
    def waited_for_data(self) -> float:
        """Seconds of the epoch in which this replica waited for data."""
        return max(0.0, self.waited - (self._others() - self._others_before))

    @property
    def wait_fraction(self) -> float:
        """The same as a fraction of the time."""
        return self.waited_for_data / max(self.seconds, 1e-9)


class StepLogs(Mapping[str, Value]):
    """The figures of the epoch so far, computed when they are looked at.

    ``loss`` is the last step's and exact over all replicas; a metric is that of this replica's
    rows. What a task that computes nothing has not seen is NaN, and not among the names, nor are
    metrics that take long to compute.
    """

    def __init__(self, metrics: MetricSet) -> None:
        self._metrics = metrics
        self.last: tuple[float | Tensor, float | Tensor] | None = None
        """The loss of the last update, and what it is divided by."""

    def __getitem__(self, name: str) -> Value:
        if name != "loss":
            return self._metrics.value(name)
        loss, weight = read(self.last or (0.0, 0.0))
        return loss / weight if weight else float("nan")

    def __iter__(self) -> Iterator[str]:
        if self.last is not None:
            yield "loss"
        yield from self._metrics.names()

    def __len__(self) -> int:
        return len(list(iter(self)))
