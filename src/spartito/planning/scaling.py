"""How strategies scale: each predicted on fewer and on more tasks than a plan has."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from spartito.errors import UserError
from spartito.planning.cluster import Cluster
from spartito.planning.search import Choice, predict

TIMES = 10
"""How many times as many tasks as the plan has are looked at."""
GROUPS = "groups"
GAIN = 1.2
"""Twice the tasks have to give so much; else the curve has bent."""


@dataclass(frozen=True, slots=True)
class Curve:
    """What one strategy is predicted to give on several numbers of tasks.

    Attributes:
        strategy: With its options.
        tasks: Their numbers, growing.
        rates: Examples a second with each; None where it cannot be.
    """

    strategy: str
    tasks: Sequence[int]
    rates: Sequence[float | None]

    @property
    def bend(self) -> int | None:
        """The number of tasks from which on twice as many give less than `GAIN` times as much."""
        known = [(n, r) for n, r in zip(self.tasks, self.rates, strict=True) if r is not None]
        for (n, rate), (m, more) in pairwise(known):
            if more / rate < GAIN ** math.log2(m / n):
                return n
        return None


def curves(choices: Sequence[Choice], fail: float) -> list[Curve]:
    """Predict strategies on one task, and on up to `TIMES` as many as planned.

    The global batch stays as it is. Where there are several machines their number changes, else
    that of the workers of the one. Groups that are machines grow with these.

    Args:
        choices: Those to look at.
        fail: Failures of one machine in a second.

    Returns:
        A curve for each that has several points.
    """
    found = []
    for choice in choices:
        sizes = _sizes(choice.situation.cluster)
        rates = [_rate(choice, cluster, fail) for cluster in sizes]
        if sum(rate is not None for rate in rates) > 1:
            found.append(Curve(str(choice.strategy), [each.tasks for each in sizes], rates))
    return found


def _sizes(cluster: Cluster) -> list[Cluster]:
    """The cluster with fewer and with more machines, or workers."""
    now = cluster.machines if cluster.machines > 1 else cluster.workers
    counts = [1]
    while counts[-1] * 2 < TIMES * now:
        counts.append(counts[-1] * 2)
    counts = sorted({*counts, now, TIMES * now})
    if cluster.machines == 1:
        return [replace(cluster, workers=count) for count in counts]
    first = cluster.kinds[0]
    return [replace(cluster, kinds=(replace(first, count=count),)) for count in counts]


def _rate(choice: Choice, cluster: Cluster, fail: float) -> float | None:
    strategy, now = choice.strategy, choice.situation.cluster.machines
    if strategy.options.get(GROUPS) == now > 1:
        strategy = strategy.with_options({GROUPS: cluster.machines})
    try:
        return predict(strategy, replace(choice.situation, cluster=cluster), fail).rate
    except UserError:
        return None
