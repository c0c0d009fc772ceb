"""The report as tables of words, and those on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from spartito.doctor.findings import Report
from spartito.doctor.rules.verdict import Verdict, exit_code
from spartito.doctor.transport.messages import Facts
from spartito.doctor.words import amount, duration, rate
from spartito.errors import EXIT_TASK_LOST

WIDEST_MATRIX = 10
"""More tasks than this, and only the slowest ways are listed."""

WIDTH = 120
"""Columns where there is no terminal that says."""

STYLES = {"missing": "bold red", "wrong": "bold red", "warning": "yellow", "note": "dim"}
NOTHING = "-"


@dataclass(frozen=True, slots=True)
class Grid:
    """A title, headings, and rows of as many words; ``marked`` cells are (row, column)."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    marked: frozenset[tuple[int, int]] = frozenset()


def grids(report: Report) -> list[Grid]:
    """Who is there, on what machine, and how fast the ways between them are."""
    found = [_tasks(report), _machines(report)]
    there = list(report.facts)
    if len(there) < 2:
        return found
    if len(there) > WIDEST_MATRIX:
        return [*found, _slowest(report)]
    return [*found, _matrix(report)]


def closing(report: Report, verdicts: Sequence[Verdict]) -> str:
    """The last line: how it is, all in all."""
    there = len([task for task in report.facts if task not in report.silent])
    expected = len(report.addresses)
    code = exit_code(verdicts)
    warnings = sum(verdict.grade == "warning" for verdict in verdicts)
    but = f", but look at the {warnings} warning{'s' * (warnings > 1)}" if warnings else ""
    tasks = f"{there} of {expected} task{'s' * (expected > 1)} {'is' if there == 1 else 'are'} here"
    how = {0: "all is well", EXIT_TASK_LOST: "not all answer: see above"}.get(
        code, "something is wrong: see above"
    )
    return f"{tasks}; {how}{but if code == 0 else ''} ({report.seconds:.1f} s)"


def show(report: Report, verdicts: Sequence[Verdict]) -> None:
    """Print tables, verdicts and the last line on stdout."""
    from rich.console import Console  # takes 60 ms to import
    from rich.table import Table
    from rich.text import Text

    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
    for grid in grids(report):
        table = Table(title=grid.title, title_justify="left", title_style="bold")
        for head in grid.heads:
            table.add_column(head, overflow="fold")
        for y, row in enumerate(grid.rows):
            cells = (
                Text(words, style="bold red" if (y, x) in grid.marked else "")
                for x, words in enumerate(row)
            )
            table.add_row(*cells)
        console.print(table)
    for verdict in verdicts:
        words = Text(f"{verdict.grade}: {verdict.what}", STYLES[verdict.grade])
        console.print(words, soft_wrap=True)
        if verdict.do:
            console.print(Text(f"  {verdict.do}"), soft_wrap=True)
    facts = report.facts.get(report.leader)
    if facts is not None:
        console.print(Text(facts.would), soft_wrap=True)
    console.print(Text(closing(report, verdicts), "bold"), soft_wrap=True)


def _tasks(report: Report) -> Grid:
    rows: list[list[str]] = []
    marked = set()
    for task in report.expected:
        facts = report.facts.get(task)
        address = report.addresses.get(task) or "not told"
        if facts is None:
            marked.add((len(rows), 2))
            rows.append([task, address, "did not come", *[NOTHING] * 4])
            continue
        came = "stopped answering" if task in report.silent else "is here"
        if task in report.silent:
            marked.add((len(rows), 2))
        rows.append(
            [task, address, came, facts.host, _port(facts), _way(facts), _clock(report, task)]
        )
    heads = ["task", "address", "came", "host", "its port", "goes out by", "clock"]
    return Grid(f"Tasks, by {_source(report)}", heads, rows, frozenset(marked))


def _machines(report: Report) -> Grid:
    rows = [
        [
            task,
            facts.versions.get("spartito", NOTHING),
            facts.versions.get("torch", NOTHING),
            facts.python,
            f"{facts.cores}" + (f" (quota {facts.quota:g})" if facts.quota is not None else ""),
            facts.omp or "not set",
            _memory(facts),
            f"{amount(facts.shm.free)} of {amount(facts.shm.size)}" if facts.shm else NOTHING,
            ", ".join(amount(disk.free) for disk in facts.disks),
            _gpus(facts.gpus),
        ]
        for task, facts in report.facts.items()
    ]
    heads = [
        "task",
        "Spartito",
        "torch",
        "Python",
        "cores",
        "OMP threads",
        "memory free",
        "/dev/shm free",
        "disk free: here, tmp",
        "GPUs",
    ]
    return Grid("Machines", heads, rows)


def _matrix(report: Report) -> Grid:
    there = list(report.facts)
    slow, rows, marked = report.slow, [], set()
    speeds = {(speed.source, speed.target): speed for speed in report.speeds}
    for y, source in enumerate(there):
        row = [f"from {source}"]
        for x, target in enumerate(there, start=1):
            speed = speeds.get((source, target))
            knocked = report.found(source, target)
            if speed is not None:
                words = f"{duration(speed.latency)}\n{rate(speed.bandwidth)}"
            else:
                words = knocked.how if knocked is not None and knocked.how != "ok" else NOTHING
            if (source, target) in slow:
                words += "\nslow"
            bad = knocked is not None and knocked.how != "ok"
            if bad or (source, target) in slow:
                marked.add((y, x))
            row.append("" if source == target else words)
        rows.append(row)
    heads = ["there and back, speed", *(f"to {task}" for task in there)]
    return Grid("Ways", heads, rows, frozenset(marked))


def _slowest(report: Report) -> Grid:
    slow = report.slow
    ways = sorted(report.speeds, key=lambda speed: speed.bandwidth)[:WIDEST_MATRIX]
    rows = [
        [
            f"{speed.source} to {speed.target}",
            duration(speed.latency),
            rate(speed.bandwidth),
            "slow" if (speed.source, speed.target) in slow else "",
        ]
        for speed in ways
    ]
    title = f"The slowest {len(rows)} of {len(report.speeds)} ways"
    return Grid(title, ["way", "there and back", "speed", ""], rows)


def _source(report: Report) -> str:
    facts = report.facts.get(report.leader)
    return facts.source if facts is not None else NOTHING


def _port(facts: Facts) -> str:
    if facts.port is None:
        return NOTHING
    if facts.port.agent:
        return f"{facts.port.number}: torchrun's"
    if facts.port.drawn:
        return f"{facts.port.drawn}: {facts.port.number} is taken"
    return f"{facts.port.number}: {'free' if facts.port.free else 'taken'}"


def _way(facts: Facts) -> str:
    """The interfaces, each once, with the addresses that we have on them."""
    ways = dict.fromkeys(f"{route.interface or 'unknown'} {route.source}" for route in facts.routes)
    return ", ".join(ways) or NOTHING


def _clock(report: Report, task: str) -> str:
    ahead = report.clock(task)
    if ahead is None:
        return NOTHING
    return f"{'+' if ahead >= 0 else '-'}{duration(abs(ahead))}"


def _memory(facts: Facts) -> str:
    bound = min(facts.memory.total, facts.memory.limit or facts.memory.total)
    return f"{amount(facts.memory.available)} of {amount(bound)}"


def _gpus(cards: Sequence[str]) -> str:
    kinds = {name: cards.count(name) for name in dict.fromkeys(cards)}
    return ", ".join(f"{count} x {name}" for name, count in kinds.items()) or "none"
