"""The drawings of a comparison: curves of all strategies, and the pictures of the sweeps."""

from __future__ import annotations

from spartito.comparison.report.curves import Chart, Line, ideal, series_colour
from spartito.comparison.report.results import Comparison, Figures
from spartito.report.figures import VALIDATION, is_fraction, label


def strategy_colours(found: Comparison) -> dict[str, str]:
    """One colour per strategy, the same in every drawing."""
    names = dict.fromkeys(run.strategy for run in found.all_runs)
    return {name: series_colour(place) for place, name in enumerate(names)}


def curve_charts(found: Comparison, colours: dict[str, str]) -> list[Chart]:
    """How well every strategy does over steps and over time, in training and in validation."""
    runs = found.runs
    there = {name for run in runs for epoch in run.epochs for name in epoch}
    plain = dict.fromkeys(
        name.removeprefix(VALIDATION) for name in (*(r.quality for r in runs), "loss")
    )
    charts = []
    for name in plain:
        if not {name, VALIDATION + name} & there:
            continue
        for axis, words in (("steps", "global step"), ("times", "seconds of training")):
            lines = [
                Line(run.strategy, getattr(run, axis), run.series(key), colours[run.strategy], low)
                for run in runs
                for key, low in ((name, VALIDATION + name in there), (VALIDATION + name, False))
            ]
            over = "steps" if axis == "steps" else "time"
            title = f"{label(name).capitalize()} over {over}"
            charts.append(Chart(title, words, lines, percent=is_fraction(name)))
    return charts


def sweep_charts(found: Comparison, colours: dict[str, str]) -> list[tuple[str, list[Chart]]]:
    """The classic pictures: more workers, and larger batches."""
    return [
        ("More workers", _worker_charts(found, colours)),
        ("Larger batches", _batch_charts(found, colours)),
    ]


def _worker_charts(found: Comparison, colours: dict[str, str]) -> list[Chart]:
    points = found.points("workers")
    if not points:
        return []
    speeds = _lines(points, "workers", "rate", colours)
    straight = ideal(speeds)
    ticks = _ticks(points, "workers")
    charts = [
        Chart(
            "Throughput against workers",
            "workers",
            [*speeds, *([straight] if straight else [])],
            from_zero=True,
            ticks=ticks,
        ),
        _against(found, points, "workers", "workers", "final", colours),
        *_steps_to_goal(found, points, "workers", "workers", colours),
    ]
    for strategy, runs in points.items():
        name = runs[0].quality
        lines = [
            Line(f"workers: {run.workers}", run.steps, run.series(name), series_colour(place))
            for place, run in enumerate(runs)
        ]
        title = f"{label(name).capitalize()}, {strategy}"
        charts.append(Chart(title, "global step", lines, percent=is_fraction(name)))
    return [chart for chart in charts if not chart.is_empty]


def _batch_charts(found: Comparison, colours: dict[str, str]) -> list[Chart]:
    points = found.points("batch_size")
    if not points:
        return []
    axis = "global batch"
    charts = [
        _against(found, points, "batch_size", axis, "final", colours),
        _against(found, points, "batch_size", axis, "best", colours),
        *_steps_to_goal(found, points, "batch_size", axis, colours),
        Chart(
            "Throughput against the batch",
            axis,
            _lines(points, "batch_size", "rate", colours),
            from_zero=True,
            ticks=_ticks(points, "batch_size"),
        ),
    ]
    return [chart for chart in charts if not chart.is_empty]


def _against(
    found: Comparison,
    points: dict[str, list[Figures]],
    sweep: str,
    axis: str,
    what: str,
    colours: dict[str, str],
) -> Chart:
    name = found.all_runs[0].quality
    over = "workers" if sweep == "workers" else "the batch"
    return Chart(
        f"{what.capitalize()} {label(name)} against {over}",
        axis,
        _lines(points, sweep, what, colours),
        percent=is_fraction(name),
        ticks=_ticks(points, sweep),
    )


def _steps_to_goal(
    found: Comparison,
    points: dict[str, list[Figures]],
    sweep: str,
    axis: str,
    colours: dict[str, str],
) -> list[Chart]:
    if found.goal is None:
        return []
    over = "workers" if sweep == "workers" else "the batch"
    lines = _lines(points, sweep, "steps_to_goal", colours)
    ticks = _ticks(points, sweep)
    return [Chart(f"Steps to the goal against {over}", axis, lines, ticks=ticks, log_y=True)]


def _lines(
    points: dict[str, list[Figures]], sweep: str, what: str, colours: dict[str, str]
) -> list[Line]:
    return [
        Line(
            strategy,
            [float(getattr(run, sweep)) for run in runs],
            [getattr(run, what) for run in runs],
            colours[strategy],
        )
        for strategy, runs in points.items()
    ]


def _ticks(points: dict[str, list[Figures]], sweep: str) -> list[float]:
    return sorted({float(getattr(run, sweep)) for runs in points.values() for run in runs})
