"""The comparison of a job's strategies as one HTML file, and its record as JSON."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from spartito.comparison.report.choose import sentences
from spartito.comparison.report.drawings import curve_charts, strategy_colours, sweep_charts
from spartito.comparison.report.results import (
    COMPARISON,
    Comparison,
    Figures,
    Record,
    comparison,
    read_comparison,
)
from spartito.comparison.report.table import bars, last_line, table
from spartito.names import plural, size
from spartito.report.charts import drawn, page_colour
from spartito.report.figures import NOTHING, label, or_nothing, percent
from spartito.report.lines import as_json
from spartito.report.page import OF_A_PAGE
from spartito.report.templating import page_template
from spartito.storage.atomic import write_file_atomically
from spartito.storage.own_files import check_own

PAGE = "compare.html"


def write_comparison(folder: Path, record: Record) -> Comparison:
    """Write ``compare.json`` into ``folder``: ``record``, and the sentences drawn from it.

    It can be written again with every run that ends. Returns the record as figures.
    """
    found = comparison(record)
    whole = {**record, "sentences": sentences(found)}
    write_file_atomically(
        folder / COMPARISON, json.dumps(as_json(whole), indent=1, allow_nan=False) + "\n"
    )
    return found


def write_comparison_page(folder: Path) -> Path:
    """Write ``compare.html`` from the ``compare.json`` of ``folder``, and return its path.

    It stands alone, as the report of a run does. Raises `UserError` when there is no comparison.
    """
    path = folder / PAGE
    check_own(folder, {PAGE: OF_A_PAGE})
    write_file_atomically(path, render_comparison(read_comparison(folder)))
    return path


def render_comparison(record: Record) -> str:
    """The page for the ``record`` of a comparison, as text."""
    found = comparison(record)
    colours = strategy_colours(found)
    paint = {strategy: page_colour(colour) for strategy, colour in colours.items()}
    return page_template("compare.html.j2", last_line=last_line).render(
        title=found.target,
        subtitle=_subtitle(found, record),
        sentences=sentences(found),
        table=table(found),
        failed=[failure for run in found.all_runs for failure in run.failures],
        strategies=paint,
        drawn={name: paint[name] for name in paint if _is_drawn(name, found)},
        curves=drawn(curve_charts(found, colours)),
        bars=bars(found),
        sweeps={name: drawn(charts) for name, charts in sweep_charts(found, colours).items()},
        tasks=_tasks(record, found),
        settings=_settings(found, record),
    )


def run_name(run: Figures) -> str:
    """What a run is called: its strategy, and what a sweep changed."""
    if run.sweep is None:
        return run.title
    return f"{run.title}, {label(run.sweep)} {getattr(run, run.sweep):,}"


def _is_drawn(strategy: str, found: Comparison) -> bool:
    """Whether a curve of ``strategy`` can be seen."""
    return any(run.title == strategy and run.epochs for run in found.runs)


def _subtitle(found: Comparison, record: Record) -> str:
    cores = found.machine.get("cores")
    workers = max((run.workers for run in found.runs), default=0)
    servers = max((run.ps for run in found.runs), default=0)
    return " · ".join(
        part
        for part in (
            "comparison",
            plural(len({run.strategy for run in found.runs}), "strategy", "strategies"),
            plural(workers, "worker") if workers else "",
            plural(servers, "parameter server") if servers else "",
            plural(int(cores), "core") if cores else "",
            found.link,
        )
        if part
    )


def _tasks(record: Record, found: Comparison) -> list[tuple[str, list[list[str]]]]:
    """What every task of every run took: memory, time, bytes, waiting."""
    tasks = {str(run.get("run", "")): run.get("tasks") or [] for run in record["runs"]}
    rows = [(run.title, [_task_row(task) for task in tasks[run.run]]) for run in found.runs]
    return [(strategy, its_rows) for strategy, its_rows in rows if its_rows]


def _task_row(task: Record) -> list[str]:
    seconds = task.get("seconds")

    def fraction(key: str) -> str:
        waited = task.get(key)
        return percent(waited / seconds) if waited is not None and seconds else NOTHING

    return [
        str(task.get("task", NOTHING)),
        or_nothing(task.get("peak_memory_bytes"), size),
        or_nothing(task.get("examples"), "{:,.0f}".format),
        or_nothing(task.get("pushes"), "{:,.0f}".format),
        or_nothing(task.get("bytes_sent"), size),
        or_nothing(task.get("bytes_received"), size),
        fraction("waited_for_tasks_seconds"),
        fraction("waited_for_data_seconds"),
    ]


def _settings(found: Comparison, record: Record) -> list[tuple[str, list[tuple[str, str]]]]:
    fits = ((run.get("config") or {}).get("fit") for run in record["runs"])
    fit: Record = next((part for part in fits if part), {})
    names = ("epochs", "batch_size", "steps_per_epoch", "examples", "precision", "seed")
    arguments = shlex.join(record.get("arguments") or [])
    repeats = max((run.get("repeat") or 1 for run in record["runs"]), default=1)
    job = [("arguments", arguments)] if arguments else []
    job += [(label(name), str(fit[name])) for name in names if fit.get(name) is not None]
    job += [("repeats", str(repeats))] if repeats > 1 else []
    if found.link:
        job.append(("line of each task", found.link))
    if found.goal:
        job.append(("goal", str(found.goal)))
    slow = {task: share for run in found.all_runs for task, share in run.slow.items()}
    under = {
        task: ", ".join(dict.fromkeys(r.title for r in found.all_runs if task in r.slow))
        for task in slow
    }
    job += [
        (f"slow {task}", f"{share:.0%} of its speed, under {under[task]}")
        for task, share in slow.items()
    ]
    threads = [(r.title, f"{r.workers} × {r.threads}") for r in found.runs if r.threads]
    machine = [(str(k).replace("_", " "), _fact(k, v)) for k, v in found.machine.items()]
    folders = [(run_name(run), run.run) for run in found.all_runs if run.run]
    parts = [
        ("Job", job),
        ("Machine", machine),
        ("Workers × threads", threads),
        ("Machine during each run", _loads(found)),
        ("Run folders", folders),
    ]
    return [(name, facts) for name, facts in parts if facts]


def _loads(found: Comparison) -> list[tuple[str, str]]:
    """What other programs took of the machine, and how often something waited for a core."""
    return [
        (
            run_name(run),
            f"{percent(run.others)} of the cores taken by other programs"
            + (
                ""
                if run.pressure is None
                else f"; something waited for a core {percent(run.pressure)} of the time"
            ),
        )
        for run in found.all_runs
        if run.others is not None
    ]


def _fact(key: str, value: Any) -> str:
    return size(value) if key == "memory" and isinstance(value, int | float) else str(value)
