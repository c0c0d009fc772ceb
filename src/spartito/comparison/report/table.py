"""The table of a comparison, and its bars: what each run comes to, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from textwrap import fill

from spartito.comparison.report.charts import strategy_colours
from spartito.comparison.report.results import Comparison, Figures
from spartito.report.figures import (
    NOTHING,
    duration,
    figure,
    higher_is_better,
    label,
    or_nothing,
    percent,
    points,
    size,
)
from spartito.report.plots import page_colour

WAITING_IS = (
    "share of the workers' time spent until others came or answered: the slowest of them, and "
    "the exchange itself"
)


@dataclass(frozen=True, slots=True)
class Table:
    """Headings with their explanations, and rows of words; ``best`` marks the best of a column."""

    heads: Sequence[tuple[str, str]]
    rows: Sequence[Sequence[str]]
    best: Sequence[set[int]]
    errors: Sequence[str | None]

    def __str__(self) -> str:
        """For a terminal: a line per figure, a column per run, below how errors end."""
        names = [head for head, _ in self.heads]
        columns = [names, *(list(row) for row in self.rows)]
        widths = [max(map(len, column)) for column in columns]
        lines = [
            "  ".join(
                words.ljust(width) if place == 0 else words.rjust(width)
                for place, (words, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in zip(*columns, strict=True)
        ]
        failed = [
            f"{row[0]} failed: {last_line(error)}"
            for row, error in zip(self.rows, self.errors, strict=True)
            if error
        ]
        return "\n".join([*lines, fill(f"Waits for tasks: {WAITING_IS}.", 78), *failed])


def last_line(text: str) -> str:
    """How an error ends: in Python that is what went wrong."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def table(found: Comparison) -> Table:
    """The figures of every run of the comparison; what a run does not tell is a dash."""
    runs = found.runs
    name = runs[0].quality if runs else "loss"
    loss = next((n for run in runs for n in run.noise if n.endswith("loss")), "loss")
    goal = found.goal
    columns: list[tuple[str, str, list[str], set[int]]] = [
        ("strategy", "", [run.strategy for run in runs], set()),
        ("workers", "tasks that compute", [str(run.workers) for run in runs], set()),
        (
            f"final {label(name)}",
            "after the last epoch",
            [_with_range(name, r.final, r.finals) for r in runs],
            _best(runs, "final", higher_is_better(name)),
        ),
        (
            f"best {label(name)}",
            "of all epochs",
            [figure(name, r.best) for r in runs],
            _best(runs, "best", higher_is_better(name)),
        ),
        ("loss", label(loss), [figure("loss", r.loss) for r in runs], _best(runs, "loss", False)),
        (
            "examples/s",
            "over all workers: examples by seconds, in total, without the first epoch",
            [_with_range("examples_per_second", r.rate, r.rates) for r in runs],
            _best(runs, "rate", True),
        ),
        (
            "time to goal",
            f"seconds of training until {goal}" if goal else "no goal was given",
            [or_nothing(r.seconds_to_goal, duration) for r in runs],
            _best(runs, "seconds_to_goal", False),
        ),
        (
            "moved per step",
            "bytes between tasks, per global step",
            [or_nothing(r.bytes_per_step, size) for r in runs],
            set(),
        ),
        (
            "waits for tasks",
            WAITING_IS,
            [or_nothing(r.waited_for_tasks, percent) for r in runs],
            set(),
        ),
        (
            "waits for data",
            "share of the workers' time",
            [or_nothing(r.waited_for_data, percent) for r in runs],
            set(),
        ),
        (
            "peak memory",
            "of the task that took the most",
            [or_nothing(r.peak_memory, size) for r in runs],
            set(),
        ),
        (
            "staleness",
            "updates that a gradient came late by: mean / most",
            [_staleness(r) for r in runs],
            set(),
        ),
    ]
    return Table(
        [(head, why) for head, why, _, _ in columns],
        [[words[row] for _, _, words, _ in columns] for row in range(len(runs))],
        [{c for c, column in enumerate(columns) if row in column[3]} for row in range(len(runs))],
        [run.error for run in runs],
    )


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar: its name, its length as a share of the longest, the words at its end.

    ``span`` is from where to where repeats reach, as shares like the length; None without any.
    """

    name: str
    share: float
    value: str
    paint: str
    span: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class Bars:
    """Bars under one title, and a sentence on what they are."""

    title: str
    rows: Sequence[Bar]
    note: str = ""


NOISE_IS = (
    "How far a curve jumps around its own course from epoch to epoch: the standard deviation of "
    "its values from the middle of their two neighbours, from five epochs on."
)


def bars(found: Comparison) -> list[Bars]:
    """Throughput, noise of the curves, and how late updates came."""
    colours = strategy_colours(found)

    def rows(values: Sequence[tuple[Figures, float | None, str]]) -> list[Bar]:
        longest = max((v for _, v, _ in values if v is not None), default=0.0) or 1.0
        return [
            Bar(run.strategy, value / longest, words, page_colour(colours[run.strategy]))
            for run, value, words in values
            if value is not None
        ]

    charts = [_throughput(found, colours)]
    for name in sorted({name for run in found.runs for name in run.noise}):
        values = [
            (r, r.noise.get(name), or_nothing(r.noise.get(name), partial(points, name)))
            for r in found.runs
        ]
        note = NOISE_IS if len(charts) == 1 else ""  # once is enough
        charts.append(Bars(f"Noise of the {label(name)}", rows(values), note))
    for run in found.runs:
        pushes = sum(run.staleness.values())
        if not pushes:
            continue
        most = max(run.staleness.values())
        paint = page_colour(colours[run.strategy])
        charts.append(
            Bars(
                f"Staleness of {run.strategy}",
                [
                    Bar(str(late), count / most, f"{count / pushes:.1%}", paint)
                    for late, count in run.staleness.items()
                ],
                "How many updates a gradient came late by, and for what share of the pushes.",
            )
        )
    return charts


def _throughput(found: Comparison, colours: Mapping[str, str]) -> Bars:
    """The speeds, and how far those of repeats lie apart."""
    longest = max((rate for r in found.done for rate in (r.rate, *r.rates) if rate), default=1.0)
    repeated = any(len(run.rates) > 1 for run in found.done)
    return Bars(
        "Throughput, examples/s",
        [
            Bar(
                run.strategy,
                run.rate / longest,
                figure("examples_per_second", run.rate),
                page_colour(colours[run.strategy]),
                (min(run.rates) / longest, max(run.rates) / longest)
                if len(run.rates) > 1
                else None,
            )
            for run in found.done
            if run.rate is not None
        ],
        "The line at the end of a bar goes from the slowest repeat to the fastest."
        if repeated
        else "",
    )


def _with_range(name: str, value: float | None, repeats: Sequence[float]) -> str:
    """The figure, and from where to where its repeats reach: ``95.1% (94.9% to 95.3%)``."""
    written = figure(name, value)
    if len(repeats) < 2:
        return written
    return f"{written} ({figure(name, min(repeats))} to {figure(name, max(repeats))})"


def _best(runs: Sequence[Figures], what: str, higher: bool) -> set[int]:
    """The rows whose figure ``what`` is the best of those that ended well; none if all are equal.

    Two are equal when a reader would see the same: to four digits.
    """
    found = {
        row: float(f"{value:.4g}")
        for row, run in enumerate(runs)
        if run.is_done and (value := getattr(run, what)) is not None and value == value
    }
    if len(set(found.values())) < 2:
        return set()
    best = (max if higher else min)(found.values())
    return {row for row, value in found.items() if value == best}


def _staleness(run: Figures) -> str:
    mean = run.mean_staleness
    return NOTHING if mean is None else f"{mean:.2f} / {max(run.staleness)}"
