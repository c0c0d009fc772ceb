"""What several runs of one job say beside each other: the records of a comparison as figures."""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, combinations
from pathlib import Path
from typing import Any

from spartito.comparison.report.outcome import DIVERGED, DONE, FAILED, Outcome, outcome
from spartito.declared import Declared, parse
from spartito.errors import UserError
from spartito.names import plural
from spartito.report.figures import (
    VALIDATION,
    figure,
    finite,
    higher_is_better,
    label,
    metric_names,
    number,
)
from spartito.report.lines import json_object
from spartito.report.page import CONFIG, HISTORY, read_run

COMPARISON = "compare.json"
TASKS = "tasks"

SHORTEST_CURVE = 5
"""Epochs that a curve needs before its noise is told from its trend."""

Epoch = Mapping[str, Any]
Record = Mapping[str, Any]


def read_result(folder: Path) -> dict[str, Any]:
    """What the run folder ``folder`` holds for a comparison; what it lacks is empty.

    ``history`` is a list of epochs with what an evaluator found, ``tasks`` one object per task, and
    ``config`` the settings.
    """
    there = any((folder / name).is_file() for name in (CONFIG, HISTORY))
    run = read_run(folder) if there else None
    return {
        "history": [dict(epoch) for epoch in run.epochs] if run else [],
        "tasks": [
            task
            for file in sorted((folder / TASKS).glob("*.json"))
            if (task := json_object(file.read_text()))
        ],
        "config": dict(run.config) if run else {},
    }


@dataclass(frozen=True, slots=True)
class Goal:
    """A figure of an epoch, and the value that it shall reach."""

    name: str
    value: float

    def __str__(self) -> str:
        """As a sentence says it: ``validation accuracy 95.00%``."""
        return f"{label(self.name)} {figure(self.name, self.value)}"

    def is_reached(self, found: float) -> bool:
        """Whether ``found`` is as good as the goal or better."""
        return found >= self.value if higher_is_better(self.name) else found <= self.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One run in figures, or several repeats of it; what the files do not say is None or empty.

    ``quality`` is the figure that tells how well the model does, the same for all runs of a
    comparison. ``rate`` is examples over seconds, both in total, without the first epoch.
    Times are in seconds of training, summed over epochs; fractions are of the time of the
    tasks that computed; ``noise`` is by a figure's name, on its own scale.

    Of repeats, ``rate``, ``final``, ``best`` and what concerns the goal are medians; ``rates``
    and ``finals`` have one value per repeat that ended well; all else, curves too, is that of
    the first of these, ``run``. ``failures`` are the folders and reasons of the others. Where one
    of them diverged, all of it did.

    ``asked_threads`` is set for a run that got another number of threads than it takes by itself.
    ``others`` is the part of the cores that other programs took from the run, ``pressure`` the
    part of its time in which something waited for a core; None where nobody looked. Speeds and
    times are those of the repeats that had the machine for themselves, if there are any.
    ``least_noise`` is the part by which two runs of the same engine differ here: so much is noise.
    """

    strategy: Declared
    workers: int
    ps: int
    batch_size: int | None
    threads: int | None
    sweep: str | None
    slow: Mapping[str, float]
    error: str | None
    run: str
    epochs: Sequence[Epoch]
    quality: str
    final: float | None
    best: float | None
    loss: float | None
    rate: float | None
    rate_noise: float | None
    noise: Mapping[str, float]
    seconds_to_goal: float | None
    steps_to_goal: int | None
    bytes_per_step: float | None
    waited_for_tasks: float | None
    waited_for_data: float | None
    memory: Mapping[str, int]
    staleness: Mapping[int, int]
    rates: Sequence[float] = ()
    finals: Sequence[float] = ()
    failures: Sequence[tuple[str, str]] = ()
    ended: Outcome = field(default_factory=Outcome)
    asked_threads: int | None = None
    others: float | None = None
    pressure: float | None = None
    least_noise: float = 0.0

    @property
    def title(self) -> str:
        """What it is called: its strategy, and threads that it was given."""
        if self.asked_threads is None:
            return str(self.strategy)
        return f"{self.strategy} ({plural(self.asked_threads, 'thread')})"

    @property
    def is_done(self) -> bool:
        """Whether it ended well, with a speed to compare."""
        return self.ended.state == DONE and self.rate is not None

    @property
    def peak_memory(self) -> int | None:
        """Bytes of the task that took the most."""
        return max(self.memory.values(), default=None)

    @property
    def mean_staleness(self) -> float | None:
        """Updates that a push came late by, on average over all pushes."""
        pushes = sum(self.staleness.values())
        return sum(s * n for s, n in self.staleness.items()) / pushes if pushes else None

    def series(self, name: str) -> list[float | None]:
        """The figure ``name`` of every epoch."""
        return [number(epoch.get(name)) for epoch in self.epochs]

    @property
    def steps(self) -> list[float]:
        """The global step at the end of every epoch."""
        return [_or_nan(value) for value in self.series("step")]

    @property
    def times(self) -> list[float]:
        """Seconds of training until the end of every epoch."""
        return list(accumulate(_or_nan(value) for value in self.series("seconds")))


@dataclass(frozen=True, slots=True)
class Comparison:
    """All runs of a comparison: those of the table first, then what sweeps added.

    ``link`` is the line at which each task was on a machine of its own, "" where there was none.
    """

    target: str
    goal: Goal | None
    machine: Mapping[str, Any]
    all_runs: Sequence[Figures]
    link: str = ""

    @property
    def runs(self) -> list[Figures]:
        """One run per strategy, all under the same settings."""
        return [run for run in self.all_runs if run.sweep is None]

    @property
    def done(self) -> list[Figures]:
        """Those of `runs` that ended well."""
        return [run for run in self.runs if run.is_done]

    def points(self, sweep: str) -> dict[str, list[Figures]]:
        """The runs of the sweep over ``sweep`` by strategy, in its order; empty without one."""
        if all(run.sweep != sweep for run in self.all_runs):
            return {}
        found: dict[str, list[Figures]] = {}
        for run in self.all_runs:
            if run.is_done and run.sweep in (None, sweep) and getattr(run, sweep) is not None:
                found.setdefault(run.title, []).append(run)
        return {
            strategy: sorted(runs, key=lambda run: int(getattr(run, sweep)))
            for strategy, runs in found.items()
            if len(runs) > 1
        }


def read_comparison(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The record that ``compare.json`` of ``folder`` holds; a `UserError` when there is none."""
    file = Path(folder) / COMPARISON
    try:
        record = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise UserError(
            f"{file} is no comparison: {error}", "Name the folder that --out named in comparing."
        ) from error
    return dict(record)


def comparison(record: Record) -> Comparison:
    """The record of a comparison as figures."""
    runs: Sequence[Record] = record["runs"]
    given = record.get("goal")
    goal = Goal(str(given["name"]), float(given["value"])) if given else None
    epochs: list[Sequence[Epoch]] = [_history(run) for run in runs]
    quality = _quality(goal, (epoch for found in epochs for epoch in found))
    repeats: dict[Any, list[Figures]] = {}
    for index, (run, found) in enumerate(zip(runs, epochs, strict=True)):
        setting = run.get("setting", index)
        repeats.setdefault(setting, []).append(_figures(run, found, quality, goal))
    link = record.get("link") or ""
    pooled = [_pooled(runs) for runs in repeats.values()]
    least_noise = 0.0 if link else engine_noise(pooled)
    return Comparison(
        str(record.get("target", "")),
        goal,
        record.get("machine") or {},
        [replace(run, least_noise=least_noise) for run in pooled],
        link,
    )


SAME_ENGINE = frozenset({"mirrored", "multi_worker_mirrored"})
"""Strategies that compute and exchange alike where all tasks are on one machine."""


def is_same_engine(one: Figures, other: Figures) -> bool:
    """Whether two runs on one machine did the same thing under two names."""
    alike = (one.workers, one.batch_size, one.slow) == (other.workers, other.batch_size, other.slow)
    names = {one.strategy.name, other.strategy.name}
    return alike and names <= SAME_ENGINE and one.strategy.options == other.strategy.options


def engine_noise(runs: Sequence[Figures]) -> float:
    """The largest part by which the speeds of two runs of the same engine differ; 0 for none."""
    known = [run for run in runs if run.is_done and run.strategy.name in SAME_ENGINE and run.rate]
    return max(
        (
            abs((one.rate or 0.0) - (other.rate or 0.0)) / max(one.rate or 0.0, other.rate or 0.0)
            for one, other in combinations(known, 2)
            if one.strategy != other.strategy and is_same_engine(one, other)
        ),
        default=0.0,
    )


def _history(run: Record) -> list[Epoch]:
    """The epochs of a run, with NaN for the null that JSON has instead."""
    return [
        {name: math.nan if value is None else value for name, value in epoch.items()}
        for epoch in run.get("history") or []
    ]


def _pooled(repeats: Sequence[Figures]) -> Figures:
    """The repeats of one run as one; of a repeat that did not end well only that counts."""
    failures = [(run.run, run.ended.reason) for run in repeats if run.ended.state != DONE]
    done = [run for run in repeats if run.is_done]
    diverged = [run for run in repeats if run.ended.state == DIVERGED]
    if not done or diverged:  # a failure may be an accident, a divergence is the training's own
        first = (diverged or repeats)[0]
        if diverged and len(repeats) > 1:
            many = f"in {len(diverged)} of {len(repeats)} repeats "
            first = replace(first, ended=replace(first.ended, reason=many + first.ended.reason))
        return replace(first, failures=failures)
    timed = [run for run in done if not is_disturbed(run)] or done

    def median(name: str, runs: Sequence[Figures]) -> float | None:
        """Over ``runs``; one that has none counts as one that never got there."""
        values = [getattr(run, name) for run in runs]
        found = statistics.median(math.inf if value is None else value for value in values)
        return None if math.isinf(found) and None in values else found

    to_goal = median("steps_to_goal", done)
    return replace(
        done[0],
        rate=median("rate", timed),
        final=median("final", done),
        best=median("best", done),
        seconds_to_goal=median("seconds_to_goal", timed),
        steps_to_goal=None if to_goal is None else int(to_goal),
        rates=[run.rate for run in timed if run.rate is not None],
        others=median("others", timed),
        pressure=median("pressure", timed),
        finals=[run.final for run in done if run.final is not None],
        failures=failures,
    )


BUSY = 0.1
"""The part of its cores that other programs may take from a run before its speed says little."""


def is_disturbed(run: Figures) -> bool:
    """Whether other programs took so much of the machine that its times say little."""
    return run.others is not None and run.others > BUSY


def noise(values: Sequence[float | None]) -> float | None:
    """How far a curve jumps around its own trend from epoch to epoch, on its own scale.

    The standard deviation of the values from the middle of their two neighbours, which takes
    any steady rise or fall away; by the median of these distances, so that the first steep
    epochs do not count. None below five epochs.
    """
    if len(values) < SHORTEST_CURVE:
        return None
    known = [_or_nan(value) for value in values]
    distances = [
        abs(now - (before + after) / 2)
        for before, now, after in zip(known, known[1:], known[2:], strict=False)
    ]
    if not all(map(math.isfinite, distances)):
        return None
    # 0.6745: the median of |x| of a normal distribution; 1.5: the variance of a distance.
    return statistics.median(distances) / (0.6745 * math.sqrt(1.5))


def _figures(run: Record, epochs: Sequence[Epoch], quality: str, goal: Goal | None) -> Figures:
    tasks: Sequence[Record] = run.get("tasks") or []
    config: Record = run.get("config") or {}
    steady = _steady(epochs)
    rates = [rate for _, rate in steady]
    values = finite(epoch.get(quality) for epoch in epochs)
    loss = next((n for n in (VALIDATION + "loss", "loss") if any(n in e for e in epochs)), "loss")
    curves = {name: noise([number(e.get(name)) for e in epochs]) for name in {loss, quality}}
    reached = _first_reach(epochs, goal)
    seconds = [_or_nan(number(epoch.get("seconds"))) for epoch in epochs]
    until = math.nan if reached is None else sum(seconds[: reached + 1])
    step = None if reached is None else number(epochs[reached].get("step"))
    load: Record = run.get("load") or {}
    fit = _part(config, "fit")
    told = number(fit.get("epochs"))
    ended = outcome(
        run.get("error"), epochs, quality, None if told is None else int(told), fit.get("end")
    )
    rate = _total_rate(steady)
    if ended.state == DONE and rate is None:
        ended = Outcome(FAILED, "none of its epochs has a speed")
    batch_size = run.get("batch_size") or fit.get("batch_size")
    return Figures(
        strategy=parse(str(run["strategy"]), "a comparison", checked=False),
        workers=int(run["workers"]),
        ps=int(run.get("ps") or 0),
        batch_size=batch_size,
        threads=_part(config, "cluster").get("threads"),
        sweep=run.get("sweep"),
        slow=run.get("slow") or {},
        error=run.get("error"),
        run=str(run.get("run", "")),
        epochs=epochs,
        quality=quality,
        final=_last(epochs, quality),
        best=(max if higher_is_better(quality) else min)(values, default=None),
        loss=_last(epochs, loss),
        rate=rate,
        rate_noise=statistics.stdev(rates) if len(rates) > 1 else None,
        noise={name: found for name, found in curves.items() if found is not None},
        seconds_to_goal=until if math.isfinite(until) else None,
        steps_to_goal=None if step is None else int(step),
        bytes_per_step=_bytes_per_step(tasks, epochs),
        waited_for_tasks=_fraction(tasks, "waited_for_tasks_seconds"),
        waited_for_data=_waited_for_data(tasks, epochs),
        memory={
            str(task.get("task")): int(task["peak_memory_bytes"])
            for task in tasks
            if number(task.get("peak_memory_bytes")) is not None
        },
        staleness=_staleness(tasks),
        ended=ended,
        asked_threads=run.get("threads"),
        others=number(load.get("others")),
        pressure=number(load.get("pressure")),
    )


def _steady(epochs: Sequence[Epoch]) -> list[tuple[float, float]]:
    """Steps and examples per second of each epoch but the first, which warms up."""
    ends = [0.0, *(_or_nan(number(epoch.get("step"))) for epoch in epochs)]
    found = [
        (end - start if end > start else 1.0, float(epoch["examples_per_second"]))
        for start, end, epoch in zip(ends, ends[1:], epochs, strict=False)
        if finite([epoch.get("examples_per_second")])
    ]
    return found[1:] if len(found) > 2 else found


def _total_rate(epochs: Sequence[tuple[float, float]]) -> float | None:
    """Examples over seconds, in total, from the steps and the rate of each epoch.

    Where tasks do not wait for one another, work moves between epochs: single rates jump, and
    neither their mean nor their median is a speed.
    """
    if not epochs:
        return None
    steps, rates = zip(*epochs, strict=True)
    return float(statistics.harmonic_mean(rates, weights=steps))


def _quality(goal: Goal | None, epochs: Iterable[Epoch]) -> str:
    """The goal's figure; else the first metric of validation, its loss, or those of training."""
    there = dict.fromkeys(name for epoch in epochs for name in epoch)
    if goal is not None and goal.name in there:
        return goal.name
    loss_last = sorted(metric_names(there), key=lambda name: name == "loss")
    choices = [*(VALIDATION + name for name in loss_last), *loss_last]
    return next((name for name in choices if name in there), "loss")


def _first_reach(epochs: Sequence[Epoch], goal: Goal | None) -> int | None:
    if goal is None:
        return None
    values = (number(epoch.get(goal.name)) for epoch in epochs)
    return next((i for i, v in enumerate(values) if v is not None and goal.is_reached(v)), None)


def _bytes_per_step(tasks: Sequence[Record], epochs: Sequence[Epoch]) -> float | None:
    """What all tasks sent, or received where that is more, per global step."""
    steps = _last(epochs, "step")
    sums = [
        sum(found)
        for key in ("bytes_sent", "bytes_received")
        if (found := finite(task.get(key) for task in tasks))
    ]
    return max(sums) / steps if sums and steps else None


def _fraction(tasks: Sequence[Record], key: str) -> float | None:
    """Seconds under ``key`` of the tasks that computed, as a fraction of all their seconds."""
    times = [
        (waited, total)
        for task in tasks
        if task.get("examples")
        and "pushes" not in task  # a server: it counts the examples of others, and waits by trade
        and (waited := number(task.get(key))) is not None
        and (total := number(task.get("seconds")))
    ]
    return sum(w for w, _ in times) / sum(t for _, t in times) if times else None


def _waited_for_data(tasks: Sequence[Record], epochs: Sequence[Epoch]) -> float | None:
    by_tasks = _fraction(tasks, "waited_for_data_seconds")
    if by_tasks is not None:
        return by_tasks
    fractions = finite(epoch.get("data_wait_fraction") for epoch in epochs)
    return statistics.fmean(fractions) if fractions else None


def _staleness(tasks: Sequence[Record]) -> dict[int, int]:
    """Pushes by staleness, over all servers."""
    found: dict[int, int] = {}
    for task in tasks:
        for staleness, count in (task.get("staleness") or {}).items():
            found[int(staleness)] = found.get(int(staleness), 0) + int(count)
    return dict(sorted(found.items()))


def _part(config: Record, name: str) -> Record:
    part = config.get(name)
    return part if isinstance(part, dict) else {}


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def _last(epochs: Sequence[Epoch], name: str) -> float | None:
    """The newest value there is: an evaluator may not have looked at the last epoch."""
    values = (number(epoch.get(name)) for epoch in reversed(epochs))
    return next((value for value in values if value is not None), None)
