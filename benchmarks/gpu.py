"""Training on this machine's GPUs, as independent checks with a time limit each, and a page."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date
from html import escape
from pathlib import Path
from typing import Any

from benchmarks.common import show
from benchmarks.jobs import device as checks
from benchmarks.launching import ROOT

RACES = ("sharded_speed", "mesh_speed", "pipeline_speed")
LIMITS = {"contracts": 400.0, "fit_speed": 120.0, "strategies": 200.0, "compiled": 120.0}
LIMITS |= dict.fromkeys(RACES, 170.0)
"""Seconds that a check may take, where it is not `LIMIT`."""

LIMIT = 60.0
ALONE = ("fit_speed", "memory", *RACES)
"""Checks that measure: nothing runs beside them."""
WRAPPED = "th, td { text-align: left; white-space: normal; vertical-align: top }"
MARKS = {"ok": "ok", "failed": "FAILED", "skipped": "skipped"}


@dataclass(frozen=True)
class Outcome:
    """How a check ended: ``status`` is one of `MARKS`, ``reason`` why it is not "ok"."""

    name: str
    status: str
    seconds: float
    reason: str = ""
    found: dict[str, Any] = field(default_factory=dict)

    @property
    def about(self) -> str:
        """What the check shows: the first sentence about it."""
        return (checks.CHECKS[self.name].__doc__ or "").strip()

    @property
    def figures(self) -> str:
        """What it measured, in a line."""
        values = [
            f"{name} {value if isinstance(value, str) else show(value)}"
            for name, value in self.found.items()
        ]
        return "; ".join(values)


def main() -> int:
    """Run the checks in turn and write the page; 1 if one of them failed."""
    assert __doc__ is not None
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options.add_argument("--out", type=Path, default=Path("build/gpu"), help="where the page goes")
    options.add_argument("--minutes", type=float, default=9.5, help="of all checks together")
    options.add_argument("--only", action="append", choices=list(checks.CHECKS), metavar="CHECK")
    given = options.parse_args()
    end = time.monotonic() + 60 * given.minutes
    names = given.only or list(checks.CHECKS)
    outcomes: dict[str, Outcome] = {}

    def make(name: str) -> None:
        print(f"{name} ...", flush=True)
        left = end - time.monotonic()
        outcome = run(name, given.device, min(left, LIMITS.get(name, LIMIT)))
        outcomes[name] = outcome
        said = outcome.reason or outcome.figures
        print(f"{name}: {MARKS[outcome.status]}, {outcome.seconds:.1f} s. {said}", flush=True)
        made = [outcomes[each] for each in names if each in outcomes]
        write(given.out, given.device, made)  # also if we do not come to the end

    for name in filter(ALONE.__contains__, names):
        make(name)
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 4)) as several:
        list(several.map(make, [name for name in names if name not in ALONE]))
    counts = {mark: sum(one.status == mark for one in outcomes.values()) for mark in MARKS}
    print(", ".join(f"{count} {mark}" for mark, count in counts.items()))
    print(f"{given.out}/gpu.html, {given.out}/gpu.md")
    return 1 if counts["failed"] else 0


def run(name: str, device: str, limit: float) -> Outcome:
    """One check in a process of its own, which is ended with all its children at the limit."""
    if limit <= 1:
        return Outcome(name, "skipped", 0.0, "no time was left")
    began = time.monotonic()
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks.jobs.device", name, f"--device={device}"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            text, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            text = ""
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    seconds = time.monotonic() - began
    if not text and seconds >= limit:
        return Outcome(name, "failed", seconds, f"took more than {limit:.0f} s")
    return outcome_of(name, seconds, text, process.returncode)


def outcome_of(name: str, seconds: float, text: str, code: int) -> Outcome:
    """What a check that ended with ``code`` says in its last line."""
    lines = text.strip().splitlines() or [""]
    with suppress(ValueError):
        told = json.loads(lines[-1])
        if code == 0 and isinstance(told, dict):
            return Outcome(name, seconds=seconds, **told)
    return Outcome(name, "failed", seconds, f"ended with {code}: {' / '.join(lines[-6:])[-1500:]}")


def write(folder: Path, device: str, outcomes: Sequence[Outcome]) -> None:
    """The table as Markdown and as a page."""
    folder.mkdir(parents=True, exist_ok=True)
    head = ("check", "result", "seconds", "what it shows", "found")
    rows = [
        (one.name, MARKS[one.status], f"{one.seconds:.0f}", one.about, one.reason or one.figures)
        for one in outcomes
    ]
    where = "GPU" if device == "cuda" else "CPU: nothing here was run on a GPU"
    title = f"Spartito on a {where}, {date.today().isoformat()}"
    lines = [f"## {title}", "", _line(head), _line(["---"] * len(head)), *map(_line, rows), ""]
    (folder / "gpu.md").write_text("\n".join(lines))
    cells = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    style = (ROOT / "src/spartito/report/templates/style.css.j2").read_text()
    (folder / "gpu.html").write_text(
        f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}'
        f"</title><style>{style} {WRAPPED}</style></head><body><main>"
        f"<h1>{escape(title)}</h1><table><tr>"
        + "".join(f"<th>{name}</th>" for name in head)
        + f"</tr>{cells}</table></main></body></html>"
    )


def _line(cells: Sequence[str]) -> str:
    """A row of a table in Markdown."""
    safe = (cell.replace("|", "\\|").replace("\n", " ") for cell in cells)
    return f"| {' | '.join(safe)} |"


if __name__ == "__main__":
    sys.exit(main())
