"""A plan as one HTML file, and the steps of its best strategies as a trace."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spartito.errors import writable
from spartito.names import duration, plural, size
from spartito.planning.costs.parts import WAITS
from spartito.planning.scaling import Curve, curves
from spartito.planning.search import Choice
from spartito.planning.simulation import simulate
from spartito.planning.table import Plan, columns, command, heading, record, sentences
from spartito.registry import strategy_info
from spartito.report.bars import Bar, Bars
from spartito.report.charts import SERIES, Chart, Line, drawn, page_colour
from spartito.report.page import OF_A_PAGE
from spartito.report.templating import page_template
from spartito.storage.atomic import write_file_atomically
from spartito.storage.own_files import check_own, has_keys

PAGE, RECORD, TRACE = "plan.html", "plan.json", "steps.trace.json"
MOST = 8
"""Strategies that are drawn."""
TRACED = 3
"""Strategies whose step is in the trace."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a stack: its name, its length as a fraction of the longest stack, its colour."""

    name: str
    fraction: float
    paint: str
    words: str


@dataclass(frozen=True, slots=True)
class Stack:
    """A bar of several parts: its name, its parts, and the words at its end."""

    name: str
    parts: Sequence[Part]
    value: str


def write_plan(folder: Path, plan: Plan) -> Path:
    """Write a page, the record and a trace of a plan.

    Args:
        folder: It is made, if it is missing.
        plan: What was found.

    Returns:
        The page.

    Raises:
        UserError: A file there is none of ours, or cannot be written.
    """
    check_own(
        folder,
        {PAGE: OF_A_PAGE, RECORD: has_keys("choices", "refusals"), TRACE: has_keys("traceEvents")},
    )
    found, steps = record(plan), trace(_traced(plan.outcome.choices))
    with writable(folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_file_atomically(folder / RECORD, json.dumps(found, indent=1, allow_nan=False) + "\n")
        write_file_atomically(folder / TRACE, json.dumps(steps) + "\n")
        write_file_atomically(folder / PAGE, render(plan))
    return folder / PAGE


def render(plan: Plan) -> str:
    """The page as text."""
    outcome = plan.outcome
    shown = outcome.choices[:MOST]
    paints = {name: page_colour(SERIES[i]) for i, name in enumerate(WAITS)}
    held = sorted({name for choice in shown for name in choice.cost.memory})
    memory_paints = {name: page_colour(SERIES[i % len(SERIES)]) for i, name in enumerate(held)}
    head, *rows = columns(plan)
    found = curves(_each_kind(outcome.choices), plan.fail)
    best = _traced(outcome.choices)
    return page_template("plan.html.j2").render(
        title=outcome.situation.profile.target,
        subtitle=heading(outcome.situation),
        sentences=[*sentences(plan), *_bends(found)],
        commands=[(str(each.strategy), command(each, plan.target)) for each in shown[:TRACED]],
        head=head,
        rows=rows,
        refusals=outcome.refusals,
        speeds=[_speeds(shown)],
        steps=_steps(shown, paints),
        timelines=[(str(each.strategy), _timeline(each, paints)) for each in best],
        step_key=[(WAITS[name], paint) for name, paint in paints.items()],
        memory=_memory(shown, memory_paints),
        memory_key=list(memory_paints.items()),
        scaling=drawn([_chart(found)]) if found else [],
        trace=TRACE,
    )


def trace(choices: Sequence[Choice]) -> dict[str, Any]:
    """Some steps of each strategy as Chrome and Perfetto show them, simulated task by task."""
    events: list[dict[str, Any]] = []
    for number, choice in enumerate(choices):
        name = {"name": str(choice.strategy)}
        events.append({"name": "process_name", "ph": "M", "pid": number, "tid": 0, "args": name})
        events += [
            {
                "name": WAITS[span.name], "ph": "X", "pid": number, "tid": span.task,
                "ts": span.begin * 1e6, "dur": (span.end - span.begin) * 1e6,
            }
            for span in simulate(choice).spans
        ]  # fmt: skip
    return {"traceEvents": events, "otherData": {"made by": "spartito plan"}}


def _timeline(choice: Choice, paints: Mapping[str, str]) -> list[Stack]:
    """What each of the first tasks does in some steps."""
    spans = simulate(choice).spans
    longest = max(span.end for span in spans)
    rows: dict[int, list[Part]] = {}
    for span in spans:
        seconds = span.end - span.begin
        part = Part(WAITS[span.name], seconds / longest, paints[span.name], duration(seconds))
        rows.setdefault(span.task, []).append(part)
    return [Stack(f"task {task}", parts, "") for task, parts in sorted(rows.items())]


def _traced(choices: Sequence[Choice]) -> Sequence[Choice]:
    """Those whose steps are shown task by task: the best ones that differ."""
    return _each_kind(choices)[:TRACED] or choices[:1]


def _each_kind(choices: Sequence[Choice]) -> list[Choice]:
    """The fastest form of each strategy of several tasks, as many as are drawn."""
    found: dict[str, Choice] = {}
    for choice in choices:
        if strategy_info(choice.strategy.name).most_replicas != 1:
            found.setdefault(choice.strategy.name, choice)
    return [*found.values()][:MOST]


def _speeds(choices: Sequence[Choice]) -> Bars:
    most = max(choice.rate * (1 + choice.width) for choice in choices)
    paint = page_colour(SERIES[0])
    rows = [
        Bar(
            str(choice.strategy), choice.rate / most, f"{choice.rate:,.0f}", paint,
            (choice.rate / (1 + choice.width) / most, choice.rate * (1 + choice.width) / most),
        )
        for choice in choices
    ]  # fmt: skip
    note = "Predicted, failures counted; the line is how far it may be off by what was measured."
    return Bars("Examples a second", rows, note)


def _steps(choices: Sequence[Choice], paints: Mapping[str, str]) -> list[Stack]:
    longest = max(choice.cost.step for choice in choices)
    return [
        Stack(
            str(choice.strategy),
            [
                Part(WAITS[name], seconds / longest, paints[name], duration(seconds))
                for name, seconds in choice.cost.seconds.items()
                if seconds
            ],
            duration(choice.cost.step),
        )
        for choice in choices
    ]


def _memory(choices: Sequence[Choice], paints: Mapping[str, str]) -> list[Stack]:
    largest = max(choice.cost.bytes for choice in choices)
    return [
        Stack(
            str(choice.strategy),
            [
                Part(name, nbytes / largest, paints[name], size(nbytes))
                for name, nbytes in sorted(choice.cost.memory.items())
                if nbytes
            ],
            f"{size(choice.cost.bytes)} of {size(choice.limit)}",
        )
        for choice in choices
    ]


def _chart(found: Sequence[Curve]) -> Chart:
    lines = [
        Line(curve.strategy, [float(n) for n in curve.tasks], curve.rates, SERIES[number])
        for number, curve in enumerate(found)
    ]
    ticks = sorted({float(n) for curve in found for n in curve.tasks})
    return Chart("Examples a second", "tasks", lines, ticks=ticks, log_y=True)


def _bends(found: Sequence[Curve]) -> list[str]:
    bent = [
        f"{curve.strategy} from {plural(curve.bend, 'task')} on"
        for curve in found[:TRACED]
        if curve.bend
    ]
    if not bent:
        return []
    return [f"with this batch, twice the tasks give less than 1.2 times as much: {'; '.join(bent)}"]
