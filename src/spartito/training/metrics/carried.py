"""Metrics of which every task knows the whole after every update, so that none is lost with one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from spartito.collectives.collective import Piggybacked
from spartito.training.metrics.base import Metric, decode, encode
from spartito.training.metrics.gathering import MetricSet
from spartito.training.metrics.logged import Logged
from spartito.training.metrics.mean import MeanMetric

MOST_RIDE = 8
"""Means that ride along with the piggybacked scalars; more metrics are gathered in each step."""

COMPACT = 64
"""So many parts of metrics are kept before they become one."""


class CarriedMetrics(MetricSet):
    """Metrics of the rows of all tasks, which every task knows after every update.

    Means ride along with the scalars of the update. The states of others are gathered before it:
    that is one meeting more in each step. So it is where not ``rides``: some tasks see no outputs.
    What `sp.log` reports is gathered so too, from the second update on in which any task does.
    """

    def __init__(self, metrics: Sequence[Metric], rides: bool = True) -> None:
        super().__init__(metrics)
        self._ride = (
            rides
            and len(metrics) <= MOST_RIDE
            and all(isinstance(metric, MeanMetric) for metric in metrics)
        )
        self._reports = False
        self._early = self.logged.fresh()
        """What was reported here that nobody has gathered, and is not of the step that runs."""
        self._sums = [0.0] * (2 * len(metrics) if self._ride else 0)
        self._parts: list[bytes] = []
        self._gathered: list[bytes] = []

    def brings(self, collect: Callable[[bytes], list[bytes]]) -> Piggybacked:
        """What came on this task since the last update, to be summed; or all of it is collected."""
        reports = float(self.logged.has_any or self._early.has_any)
        if not self._ride:
            own = [metric.state_dict() for metric in self._given]
            self._gathered = collect(encode([*own, self._reported().state_dict()]))
            return (reports,)
        if self._reports:
            self._gathered = collect(self.rest())
        means = (metric for metric in self._given if isinstance(metric, MeanMetric))
        return (reports, *(number for metric in means for number in metric.sums))

    def brought(self, total: Sequence[float]) -> None:
        """Take what came on all tasks."""
        if not self._ride or self._reports:
            self._early.reset()
        elif self.logged.has_any:
            self._early = self._reported()
        for metric in self._metrics:
            metric.reset()
        self._reports = self._reports or total[0] > 0
        self._sums = [before + more for before, more in zip(self._sums, total[1:], strict=True)]
        self._parts += self._gathered
        self._gathered = []
        if len(self._parts) > COMPACT:
            self.compact()

    def rest(self) -> bytes:
        """What this task has reported and nobody gathered yet, as `merged` takes it."""
        return encode([*({} for _ in self._given), self._reported().state_dict()])

    def _reported(self) -> Logged:
        found = self.logged.fresh()
        found.merge([self._early.state_dict(), self.logged.state_dict()])
        return found

    def keep_reports(self) -> None:
        """What callbacks have reported after an update stays, whatever becomes of the next step."""
        if self.logged.has_any:
            self._early = self._reported()
            self.logged.reset()

    def forget_step(self) -> None:
        """The batches since the last update come again."""
        self._gathered = []
        for metric in self._metrics:
            metric.reset()

    def compact(self) -> None:
        """Make one of all parts; all tasks do so after the same update, and have the same bits."""
        if self._parts:
            found = super().merged(self._parts, {})
            self._parts = [encode([metric.state_dict() for metric in found])]

    def reset(self) -> None:
        super().reset()
        self._sums, self._parts, self._gathered = [0.0] * len(self._sums), [], []
        self._early.reset()

    def carried(self) -> list[bytes]:
        """All of the epoch so far, as `merged` takes it."""
        if not self._ride:
            return self._parts
        pairs = zip(self._sums[::2], self._sums[1::2], strict=True)
        sums = [{"sums": torch.tensor(pair, dtype=torch.float64)} for pair in pairs]
        return [encode([*sums, {}]), *self._parts]

    def state_dict(self) -> dict[str, Any]:
        """What a task needs to go on with them."""
        parts = [decode(part) for part in self._parts]
        return {"sums": self._sums, "parts": parts, "reports": self._reports}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` returned."""
        self._sums, self._parts = state["sums"], [encode(part) for part in state["parts"]]
        self._reports = state["reports"]

    def _own(self) -> list[Metric]:
        return self.merged(self.carried(), {})
