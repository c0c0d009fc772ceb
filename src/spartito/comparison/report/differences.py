"""Which runs of a comparison differ by more than their noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import stdev

from spartito.comparison.report.results import Figures, is_same_engine
from spartito.registry import simplest_first
from spartito.report.figures import higher_is_better, is_fraction

MARGIN = 0.05
"""The fraction by which two speeds or times differ at least before we call them different.

Two that differ by less are equal. Two that differ by more, but not beyond their noise, are not
equal: they cannot be told apart.
"""


def not_behind(runs: Sequence[Figures]) -> list[Figures]:
    """Those whose model is as good as the best one's, as far as the noise lets us see."""
    known = [run for run in runs if is_number(run.final)]
    if not known:
        return [run for run in runs if run.final is None] or list(runs)
    best = ranked(known)[0]
    return [run for run in known if not is_behind(run, best)]


def is_behind(run: Figures, best: Figures) -> bool:
    """Whether ``run`` ended worse than ``best`` by more than twice the noise of a difference."""
    if not is_number(run.final) or run.final is None or best.final is None:
        return True
    gap = abs(run.final - best.final)
    if noise_known([run, best]):
        return gap > 2 * noise_of(run, best)
    # Too few epochs for noise: only what nobody would take for noise counts.
    return gap > (MARGIN if is_fraction(best.quality) else MARGIN * abs(best.final))


def ranked(runs: Sequence[Figures]) -> list[Figures]:
    """By how well the model ended, best first."""
    sign = -1.0 if higher_is_better(runs[0].quality) else 1.0
    return sorted(runs, key=lambda run: sign * (run.final or 0.0))


def noise_of(one: Figures, other: Figures) -> float:
    """The noise of the difference between two runs' figures."""
    return math.hypot(_noise(one) or 0.0, _noise(other) or 0.0)


def noise_known(runs: Sequence[Figures]) -> bool:
    """Whether all runs tell how far a repeat may end elsewhere."""
    return all(_noise(run) is not None for run in runs)


def _noise(run: Figures) -> float | None:
    """By how much a repeat may end elsewhere: what its curve and its repeats tell."""
    told = [run.noise.get(run.quality), stdev(run.finals) if len(run.finals) > 1 else None]
    return max((value for value in told if value is not None), default=None)


def is_close(one: Figures, other: Figures) -> bool:
    """Whether two speeds differ so little that nobody minds which it is."""
    return abs(rate_of(one) - rate_of(other)) <= MARGIN * max(rate_of(one), rate_of(other))


def is_same_speed(one: Figures, other: Figures) -> bool:
    """Whether two speeds are close, or cannot be told apart.

    Two runs of the same engine are the same, whatever one measurement of each says; by how much
    they differ is the least noise of all others that ran once.
    """
    if len(one.rates) > 1 and len(other.rates) > 1:
        overlap = min(one.rates) <= max(other.rates) and min(other.rates) <= max(one.rates)
        return overlap or is_close(one, other)
    if is_same_engine(one, other):
        return True
    return abs(rate_of(one) - rate_of(other)) <= _speed_margin(one, other)


def variation(run: Figures) -> float:
    """How much the speed of its epochs varies, as a fraction of it."""
    return (run.rate_noise or 0.0) / (rate_of(run) or math.inf)


def is_same_time(one: Figures, other: Figures) -> bool:
    """Whether two times to the goal differ by no more than the speeds of their epochs do."""
    repeated = len(one.rates) > 1 and len(other.rates) > 1
    if is_same_engine(one, other) and not repeated:
        return True
    relative = _speed_margin(one, other) / max(rate_of(one), rate_of(other))
    return abs(seconds_of(one) - seconds_of(other)) <= relative * max(
        seconds_of(one), seconds_of(other)
    )


def _speed_margin(one: Figures, other: Figures) -> float:
    """Examples per second that two runs may differ by without meaning."""
    noise = math.hypot(one.rate_noise or 0.0, other.rate_noise or 0.0)
    least_noise = max(MARGIN, one.least_noise, other.least_noise)
    return max(2 * noise, least_noise * max(rate_of(one), rate_of(other)))


def simplest(runs: Sequence[Figures]) -> Figures:
    """The run whose strategy takes the least to understand."""
    return min(runs, key=_complexity)


def _complexity(run: Figures) -> tuple[tuple[int, str], int, bool]:
    options = str(run.strategy).count("=")
    return simplest_first(run.strategy.name), options, run.asked_threads is not None


def rate_of(run: Figures) -> float:
    """Examples per second; 0 where none is known."""
    return run.rate or 0.0


def seconds_of(run: Figures) -> float:
    """The time to the goal; infinite where it was not reached."""
    return math.inf if run.seconds_to_goal is None else run.seconds_to_goal


def is_number(value: float | None) -> bool:
    """Whether a figure is there, and finite."""
    return value is not None and math.isfinite(value)
