"""The drawings of a comparison: curves of all strategies, and the pictures of the sweeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from spartito.comparison.report.results import Comparison, Figures
from spartito.report.charts import MUTED, SERIES, Chart, Line
from spartito.report.figures import VALIDATION, is_fraction, label

Points = Mapping[str, Sequence[Figures]]
"""The runs of a sweep by their strategy."""

Colours = Mapping[str, str]
AXES = {"steps": "global step", "times": "seconds of training"}
SWEPT = {"workers": ("workers", "workers"), "batch_size": ("the batch", "global batch")}
"""What the charts of a sweep are against, in their titles and at their axes."""


def strategy_colours(found: Comparison) -> dict[str, str]:
    """One colour per strategy, the same in every drawing."""
    names = dict.fromkeys(run.title for run in found.all_runs)
    return {name: _series_colour(index) for index, name in enumerate(names)}


def curve_charts(found: Comparison, colours: Colours) -> list[Chart]:
    """How well every strategy does over steps and over time, in training and in validation."""
    runs = found.runs
    there = {name for run in runs for epoch in run.epochs for name in epoch}
    plain = dict.fromkeys(
        name.removeprefix(VALIDATION) for name in (*(r.quality for r in runs), "loss")
    )
    return [
        Chart(
            f"{label(name).capitalize()} over {'steps' if axis == 'steps' else 'time'}",
            words,
            [
                Line(run.title, getattr(run, axis), run.series(key), colours[run.title], low)
                for run in runs
                for key, low in ((name, VALIDATION + name in there), (VALIDATION + name, False))
            ],
            percent=is_fraction(name),
        )
        for name in plain
        if {name, VALIDATION + name} & there
        for axis, words in AXES.items()
    ]


def sweep_charts(found: Comparison, colours: Colours) -> dict[str, list[Chart]]:
    """The classic pictures, by their headings: more workers, and larger batches."""
    workers, batches = found.points("workers"), found.points("batch_size")
    drawn: dict[str, list[Chart]] = {}
    if workers:
        speed = _against("workers", workers, "rate", "Throughput (examples/s)", colours)
        drawn["More workers"] = [
            _with_ideal(speed),
            *_quality(found, "workers", workers, ["final"], colours),
            *map(_over_steps, workers, workers.values()),
        ]
    if batches:
        drawn["Larger batches"] = [
            *_quality(found, "batch_size", batches, ["final", "best"], colours),
            _against("batch_size", batches, "rate", "Throughput (examples/s)", colours),
        ]
    return drawn


def _quality(
    found: Comparison, sweep: str, points: Points, which: Sequence[str], colours: Colours
) -> list[Chart]:
    """The figure that tells how well the model does, and how soon the goal was reached."""
    name = found.all_runs[0].quality
    charts = [
        replace(
            _against(sweep, points, what, f"{what.capitalize()} {label(name)}", colours),
            percent=is_fraction(name),
        )
        for what in which
    ]
    if found.goal is not None:
        steps = _against(sweep, points, "steps_to_goal", "Steps to the goal", colours)
        charts.append(replace(steps, log_y=True))
    return charts


def _against(sweep: str, points: Points, what: str, title: str, colours: Colours) -> Chart:
    """The figure ``what`` of every strategy's runs against the swept setting."""
    over, axis = SWEPT[sweep]
    lines = [
        Line(
            strategy,
            [float(getattr(run, sweep)) for run in runs],
            [getattr(run, what) for run in runs],
            colours[strategy],
        )
        for strategy, runs in points.items()
    ]
    ticks = sorted({x for line in lines for x in line.xs})
    reach = 0.0 if what == "rate" else None
    return Chart(f"{title} against {over}", axis, lines, ticks=ticks, reach=reach)


def _with_ideal(chart: Chart) -> Chart:
    """``chart`` and what its fastest start would grow to if each worker added as much."""
    starts = [line.points[0] for line in chart.lines if not line.is_empty]
    if not starts:
        return chart
    least = min(x for x, _ in starts)
    each = max(y for x, y in starts if x == least) / least
    ideal = Line("ideal", chart.ticks, [each * x for x in chart.ticks], MUTED, quiet=True)
    return replace(chart, lines=[*chart.lines, ideal])


def _over_steps(strategy: str, runs: Sequence[Figures]) -> Chart:
    """The curves of one strategy with each number of workers."""
    name = runs[0].quality
    lines = [
        Line(f"workers: {run.workers}", run.steps, run.series(name), _series_colour(index))
        for index, run in enumerate(runs)
    ]
    title = f"{label(name).capitalize()}, {strategy}"
    return Chart(title, AXES["steps"], lines, percent=is_fraction(name))


def _series_colour(index: int) -> str:
    return SERIES[index % len(SERIES)]
