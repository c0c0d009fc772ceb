"""The table of a comparison, and its bars: what each run comes to, in words."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from textwrap import fill

from spartito.comparison.report.drawings import strategy_colours
from spartito.comparison.report.outcome import DONE, FAILED, VERBS
from spartito.comparison.report.results import Comparison, Figures
from spartito.names import FOR_DATA, FOR_TASKS, RATE, aligned, size
from spartito.report.bars import Bar, Bars, staleness_bars
from spartito.report.charts import page_colour
from spartito.report.figures import (
    NOTHING,
    clock_time,
    figure,
    higher_is_better,
    label,
    or_nothing,
    percent,
    points,
)

WAITING_IS = (
    "fraction of the workers' time in which they wait for other tasks, or exchange with them; "
    "where cores are fewer than tasks, also the time in which another task has the core"
)


@dataclass(frozen=True, slots=True)
class Table:
    """Headings with their explanations, and rows of words; ``best`` marks the best of a column.

    ``errors`` are those of the runs that failed, None for others; ``notes`` say how a run ended
    that did not end well, or was ended by a callback; "" for others.
    """

    heads: Sequence[tuple[str, str]]
    rows: Sequence[Sequence[str]]
    best: Sequence[set[int]]
    errors: Sequence[str | None]
    notes: Sequence[str]

    def __str__(self) -> str:
        """For a terminal: a line per figure, a column per run, below how errors end."""
        names = [head for head, _ in self.heads]
        columns = [names, *self.rows]
        lines = aligned([*zip(*columns, strict=True)], right=range(1, len(columns)))
        failed = [
            f"{row[0]} {said}" for row, said in zip(self.rows, self.notes, strict=True) if said
        ]
        return "\n".join([*lines, fill(f"Waits for tasks: {WAITING_IS}.", 78), *failed])


def last_line(text: str) -> str:
    """How an error ends: in Python that is what went wrong."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


@dataclass(frozen=True, slots=True)
class Column:
    """A heading, what it means, and how a run's cell is written.

    ``best``: the figure whose best value is marked; ``higher``: whether that is the highest;
    ``is_always``: it is there also where no run has anything to write.
    """

    head: str
    why: str
    write: Callable[[Figures], str]
    best: str = ""
    higher: bool = False
    is_always: bool = False


def table(found: Comparison) -> Table:
    """The figures of every run; what one does not tell is a dash, what none tells is left out."""
    runs = found.runs
    columns = [
        column
        for column in _columns(found)
        if column.is_always or any(column.write(run) != NOTHING for run in runs)
    ]
    best = [_best(runs, column.best, column.higher) for column in columns]
    return Table(
        [(column.head, column.why) for column in columns],
        [[column.write(run) for column in columns] for run in runs],
        [{c for c, rows in enumerate(best) if row in rows} for row in range(len(runs))],
        [run.ended.reason if run.ended.state == FAILED else None for run in runs],
        [ended_note(run) for run in runs],
    )


def ended_note(run: Figures) -> str:
    """How ``run`` ended, to follow its name: ``diverged: its loss is NaN ...``; "" if well."""
    if run.ended.state != DONE:
        return f"{VERBS[run.ended.state]}: {last_line(run.ended.reason)}"
    if run.ended.stopped_after is not None:
        trained, told = run.ended.stopped_after
        return f"was stopped (by a callback, or max_steps) after {trained} of {told} epochs"
    return ""


def _columns(found: Comparison) -> list[Column]:
    name = found.runs[0].quality if found.runs else "loss"
    loss = next((n for run in found.runs for n in run.noise if n.endswith("loss")), "loss")
    higher, goal = higher_is_better(name), found.goal
    return [
        Column("strategy", "", lambda run: run.title),
        Column("workers", "tasks that compute", lambda run: str(run.workers)),
        Column(
            f"final {label(name)}",
            "after the last epoch; of repeats the median, and from where to where they reach",
            lambda run: _with_range(name, run.final, run.finals),
            "final",
            higher,
        ),
        Column(
            f"best {label(name)}",
            "of all epochs",
            lambda run: figure(name, run.best),
            "best",
            higher,
        ),
        Column("loss", f"the {label(loss)}", lambda run: figure("loss", run.loss), "loss"),
        Column(
            RATE,
            "over all workers: examples by seconds, in total, without the first epoch",
            lambda run: _with_range("examples_per_second", run.rate, run.rates),
            "rate",
            True,
        ),
        Column(
            "time to goal",
            f"seconds of training until {goal}",
            lambda run: or_nothing(run.seconds_to_goal, clock_time),
            "seconds_to_goal",
            is_always=bool(goal),
        ),
        Column(
            "moved per step",
            "bytes between tasks, per global step",
            lambda run: or_nothing(run.bytes_per_step, size),
        ),
        Column(FOR_TASKS, WAITING_IS, lambda run: or_nothing(run.waited_for_tasks, percent)),
        Column(
            FOR_DATA,
            "fraction of the workers' time until the next batch was read",
            lambda run: or_nothing(run.waited_for_data, percent),
        ),
        Column(
            "peak memory",
            "of the task that took the most",
            lambda run: or_nothing(run.peak_memory, size),
        ),
        Column("staleness", "updates by which a gradient came late: mean / most", _staleness),
    ]


NOISE_IS = (
    "How far a curve jumps from epoch to epoch: the standard deviation of its values from the "
    "middle of their two neighbours, from five epochs on."
)
REPEATS = "The line at the end of a bar goes from the slowest repeat to the fastest."


def bars(found: Comparison) -> list[Bars]:
    """Throughput, noise of the curves, and how late updates came."""
    paint = {name: page_colour(colour) for name, colour in strategy_colours(found).items()}
    groups = [_throughput(found, paint)]
    for name in sorted({name for run in found.runs for name in run.noise}):
        values = {r.title: r.noise[name] for r in found.runs if name in r.noise}
        longest = max(values.values()) or 1.0
        rows = [
            Bar(strategy, value / longest, points(name, value), paint[strategy])
            for strategy, value in values.items()
        ]
        note = NOISE_IS if len(groups) == 1 else ""  # once is enough
        groups.append(Bars(f"Noise of the {label(name)}", rows, note))
    groups += [
        staleness_bars(f"Staleness of {run.title}", run.staleness, paint[run.title])
        for run in found.runs
    ]
    return [group for group in groups if group.rows]


def _throughput(found: Comparison, paint: Mapping[str, str]) -> Bars:
    """The speeds, and how far those of repeats lie apart."""
    rates = {run.title: run.rate for run in found.done if run.rate is not None}
    longest = max(
        (rate for run in found.done for rate in (run.rate, *run.rates) if rate), default=1.0
    )
    rows = [
        Bar(
            run.title,
            rates[run.title] / longest,
            figure("examples_per_second", run.rate),
            paint[run.title],
            (min(run.rates) / longest, max(run.rates) / longest) if len(run.rates) > 1 else None,
        )
        for run in found.done
    ]
    return Bars(f"Throughput, {RATE}", rows, REPEATS if any(row.span for row in rows) else "")


def _with_range(name: str, value: float | None, repeats: Sequence[float]) -> str:
    """The figure, and from where to where its repeats reach: ``95.1% (94.9% to 95.3%)``."""
    written = figure(name, value)
    if len(repeats) < 2:
        return written
    return f"{written} ({figure(name, min(repeats))} to {figure(name, max(repeats))})"


def _best(runs: Sequence[Figures], what: str, higher: bool) -> set[int]:
    """The rows whose figure ``what`` is the best of those that ended well; none if all are equal.

    Two are equal when a reader would see the same: to four digits. No figure, no best.
    """
    if not what:
        return set()
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
