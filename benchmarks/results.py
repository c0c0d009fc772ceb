"""What the benchmarks found: kept as JSON, and written out as the table of the docs."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common import Figure, show

QUIET = 0.25
"""Cores that others may keep busy on a machine that is called quiet."""

BEGIN, END = "<!-- figures: python -m benchmarks.all -->", "<!-- end of figures -->"


@dataclass(frozen=True, slots=True)
class Result:
    """One command: its figures, or why there are none.

    ``others`` is how many cores other programs used meanwhile, None where that is not known.
    """

    name: str
    title: str
    command: str
    when: str
    seconds: float
    others: float | None
    machine: Mapping[str, Any] = field(default_factory=dict)
    figures: Sequence[Figure] = ()
    sides: Mapping[str, float] = field(default_factory=dict)
    sides_in: str = ""
    error: str = ""

    @property
    def conditions(self) -> str:
        """Whether the machine was quiet, as far as can be told."""
        if self.others is None:
            return "load not known"
        return "quiet" if self.others <= QUIET else f"busy: others used {self.others:.1f} cores"

    @property
    def targets(self) -> tuple[int, int]:
        """How many targets were reached, and how many there are."""
        found = [figure.reached for figure in self.figures if figure.target is not None]
        return sum(map(bool, found)), len(found)


def from_line(found: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a `Result` in the last line of a benchmark."""
    names = ("name", "value", "target", "relation", "measure")
    figures = [Figure(**{n: one[n] for n in names if n in one}) for one in found["figures"]]
    rates = next((key for key in found if key.endswith("_per_second")), "")
    return {
        "machine": found["machine"],
        "figures": [figure for figure in figures if math.isfinite(figure.value)],
        "sides": {} if not rates else _numbers(found[rates]),
        "sides_in": rates.replace("_per_second", "/s"),
    }


def _numbers(found: Mapping[str, Any]) -> dict[str, float]:
    """One number of each side; those with a list of windows are not for the page."""
    return {side: rate for side, rate in found.items() if isinstance(rate, int | float)}


def read(path: Path) -> dict[str, Result]:
    """The results of earlier runs by name; none where there is no file."""
    if not path.exists():
        return {}
    results = {}
    for kept in json.loads(path.read_text()):
        figures = [Figure(**figure) for figure in kept["figures"]]
        results[kept["name"]] = Result(**{**kept, "figures": figures})
    return results


def write(path: Path, results: Sequence[Result]) -> None:
    """All results as JSON."""
    path.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")


def machines(results: Sequence[Result]) -> str:
    """What all was measured on, as a sentence."""
    keys = ("cpu", "cores", "instructions", "torch", "python")
    found = {
        f"{here['cores']} cores of {here['cpu']} ({here['instructions']}), torch {here['torch']}, "
        f"Python {here['python']}"
        for here in (result.machine for result in results)
        if all(key in here for key in keys)
    }
    return "; ".join(sorted(found)) or "not known"


def markdown(results: Sequence[Result]) -> str:
    """A table of the figures that are ratios or have a target; the page has all."""
    days = sorted({result.when[:10] for result in results})
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    lines = [
        f"**Machine**: {machines(results)}. Measured {when}.",
        "",
        "| what | reach | seen | machine |",
        "|---|---|---|---|",
    ]
    for result in results:
        command = f"{result.title}: `{result.command}`"
        if result.error:
            lines.append(f"| {command} | | left out: {_cell(result.error)} | |")
            continue
        lines.append(f"| **{command}** | | | {result.conditions} |")
        for figure in result.figures:
            if figure.target is None and figure.measure != "times":
                continue
            reach = "show it" if figure.target is None else f"{figure.relation} {figure.target:g}"
            value = show(figure.value) + ("" if figure.measure == "times" else f" {figure.measure}")
            mark = "" if figure.reached is None else "**"
            missed = ", missed" if figure.reached is False else ""
            lines.append(f"| {_cell(figure.name)} | {reach} | {mark}{value}{mark}{missed} | |")
    return "\n".join(lines)


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "\\|").strip()


def put_between(text: str, table: str) -> str:
    """``text`` with ``table`` between its two marks, and all else as it is."""
    first, last = text.find(BEGIN), text.find(END)
    if first < 0 or last < first:
        raise ValueError(f"no {BEGIN} with {END} behind it")
    return f"{text[: first + len(BEGIN)]}\n\n{table}\n\n{text[last:]}"
