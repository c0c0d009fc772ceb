"""The findings as tables and verdicts on a terminal, or as one line of JSON."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from spartito.doctor.findings import Facts, Findings
from spartito.doctor.rules.judge import judge
from spartito.doctor.rules.verdict import Verdict, exit_code
from spartito.doctor.wording import amount
from spartito.errors import EXIT_TASK_LOST
from spartito.names import duration, plural, size

WIDEST_MATRIX = 10
"""More tasks than this, and only the slowest connections are listed."""

WIDTH = 120
"""Columns where there is no terminal that says."""

STYLES = {"missing": "bold red", "error": "bold red", "warning": "yellow", "note": "dim"}
NOTHING = "-"


@dataclass(frozen=True, slots=True)
class Grid:
    """A title, headings, and rows of as many words; ``marked`` cells are (row, column)."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    marked: frozenset[tuple[int, int]] = frozenset()


def show(findings: Findings, as_json: bool) -> int:
    """Print all of it on stdout.

    Returns:
        The exit code that it comes to.
    """
    verdicts = judge(findings)
    if as_json:
        print(msgspec.json.encode(as_object(findings, verdicts)).decode())
    else:
        _print(findings, verdicts)
    sys.stdout.flush()
    return exit_code(verdicts)


def as_object(findings: Findings, verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """The findings and their verdicts, for JSON."""
    return {
        **msgspec.to_builtins(findings),
        "missing": findings.missing,
        "slow": sorted(list(pair) for pair in findings.slow),
        "verdicts": msgspec.to_builtins(verdicts),
        "exit_code": exit_code(verdicts),
    }


def closing(findings: Findings, verdicts: Sequence[Verdict]) -> str:
    """The last line: how it is, all in all."""
    there, expected = len(findings.responsive), len(findings.addresses)
    code = exit_code(verdicts)
    warnings = sum(verdict.severity == "warning" for verdict in verdicts)
    but = f", but look at the {plural(warnings, 'warning')}" if warnings else ""
    tasks = f"{there} of {plural(expected, 'task')} {'is' if there == 1 else 'are'} here"
    part = any(v.kind == "not measured" and v.severity == "warning" for v in verdicts)
    well = "nothing that was measured is wrong" if part else "all is well"
    how = {0: f"{well}{but}", EXIT_TASK_LOST: "not all respond: see above"}
    return f"{tasks}; {how.get(code, 'something is wrong: see above')} ({findings.seconds:.1f} s)"


def grids(findings: Findings) -> list[Grid]:
    """Who is there, on what machine, and how fast the connections between them are."""
    found = [_tasks(findings), _machines(findings)]
    if len(findings.facts) > WIDEST_MATRIX:
        found.append(_slowest(findings))
    elif len(findings.facts) > 1:
        found.append(_matrix(findings))
    return found


def _print(findings: Findings, verdicts: Sequence[Verdict]) -> None:
    from rich.console import Console  # takes 60 ms to import
    from rich.table import Table
    from rich.text import Text

    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
    for grid in grids(findings):
        table = Table(title=grid.title, title_justify="left", title_style="bold")
        for head in grid.heads:
            table.add_column(head, overflow="fold")
        for y, row in enumerate(grid.rows):
            styles = ("bold red" if (y, x) in grid.marked else "" for x in range(len(row)))
            table.add_row(*map(Text, row, styles))
        console.print(table)
    lines: list[tuple[str, str]] = []
    for verdict in verdicts:
        lines.append((f"{verdict.severity}: {verdict.message}", STYLES[verdict.severity]))
        lines += [(f"  {verdict.advice}", "")] if verdict.advice else []
    facts = findings.facts.get(findings.coordinator)
    lines += [(facts.plan, "")] if facts is not None else []
    for words, style in [*lines, (closing(findings, verdicts), "bold")]:
        console.print(Text(words, style), soft_wrap=True)


def _tasks(findings: Findings) -> Grid:
    rows: list[list[str]] = []
    marked = set()
    for y, task in enumerate(findings.expected):
        facts = findings.facts.get(task)
        state = "is here" if task in findings.responsive else "stopped responding"
        row = [task, findings.addresses.get(task) or "unknown"]
        if facts is None:
            row += ["did not come", *[NOTHING] * 4]
        else:
            row += [state, facts.host, _port(facts), _routes(facts), _clock(findings, task)]
        if task not in findings.responsive:
            marked.add((y, 2))
        rows.append(row)
    heads = ["task", "address", "state", "host", "port", "route", "clock"]
    facts = findings.facts.get(findings.coordinator)
    source = facts.source if facts is not None else NOTHING
    return Grid(f"Tasks, by {source}", heads, rows, frozenset(marked))


MACHINE: dict[str, Callable[[Facts], str]] = {
    "task": lambda facts: facts.task,
    "Spartito": lambda facts: facts.versions.get("spartito", NOTHING),
    "torch": lambda facts: facts.versions.get("torch", NOTHING),
    "Python": lambda facts: facts.python,
    "cores": lambda facts: (
        f"{facts.cores}" + ("" if facts.quota is None else f" (quota {facts.quota:g})")
    ),
    "OMP threads": lambda facts: facts.omp_num_threads or "not set",
    "memory free": lambda facts: _memory(facts),
    "/dev/shm free": lambda facts: (
        f"{amount(facts.shm.free)} of {amount(facts.shm.size)}" if facts.shm else NOTHING
    ),
    "disk free: here, tmp": lambda facts: ", ".join(amount(disk.free) for disk in facts.disks),
    "GPUs": lambda facts: _gpus(facts.gpus),
}
"""The columns of the table of machines."""


def _machines(findings: Findings) -> Grid:
    rows = [[write(facts) for write in MACHINE.values()] for facts in findings.facts.values()]
    return Grid("Machines", list(MACHINE), rows)


def _matrix(findings: Findings) -> Grid:
    there = list(findings.facts)
    speeds = {speed.pair: speed for speed in findings.speeds}
    stuck = {one.pair for one in findings.stuck}
    rows, marked = [], set()
    for y, source in enumerate(there):
        row = [f"from {source}"]
        for x, target in enumerate(there, start=1):
            speed, probe = speeds.get((source, target)), findings.probe(source, target)
            failed, is_slow = probe is not None and not probe.ok, (source, target) in findings.slow
            words = NOTHING if probe is None or not failed else probe.outcome.value
            if (source, target) in stuck:
                words, failed = "small only", True
            elif speed is not None:
                words = f"{duration(speed.latency)}\n{size(speed.bandwidth)}/s"
            row.append("" if source == target else words + "\nslow" * is_slow)
            if failed or is_slow:
                marked.add((y, x))
        rows.append(row)
    heads = ["round trip, speed", *(f"to {task}" for task in there)]
    return Grid("Connections", heads, rows, frozenset(marked))


def _slowest(findings: Findings) -> Grid:
    slow = findings.slow
    slowest = sorted(findings.speeds, key=lambda speed: speed.bandwidth)[:WIDEST_MATRIX]
    rows = [
        [
            f"{speed.source} to {speed.target}",
            duration(speed.latency),
            f"{size(speed.bandwidth)}/s",
            "slow" if speed.pair in slow else "",
        ]
        for speed in slowest
    ]
    title = f"The slowest {len(rows)} of {len(findings.speeds)} connections"
    return Grid(title, ["connection", "round trip", "speed", ""], rows)


def _port(facts: Facts) -> str:
    port = facts.port
    if port is None:
        return NOTHING
    if port.agent:
        return f"{port.number}: torchrun's"
    if port.drawn:
        return f"{port.drawn}: {port.number} is taken"
    return f"{port.number}: {'free' if port.free else 'taken'}"


def _routes(facts: Facts) -> str:
    """The interfaces, each once, with the addresses that we have on them."""
    found = (f"{route.interface or 'unknown'} {route.source}" for route in facts.routes)
    return ", ".join(dict.fromkeys(found)) or NOTHING


def _clock(findings: Findings, task: str) -> str:
    ahead = findings.clock(task)
    return NOTHING if ahead is None else f"{'+' if ahead >= 0 else '-'}{duration(abs(ahead))}"


def _memory(facts: Facts) -> str:
    bound = min(facts.memory.total, facts.memory.limit or facts.memory.total)
    return f"{amount(facts.memory.available)} of {amount(bound)}"


def _gpus(cards: Sequence[str]) -> str:
    kinds = {name: cards.count(name) for name in dict.fromkeys(cards)}
    return ", ".join(f"{count} x {name}" for name, count in kinds.items()) or "none"
