"""Every benchmark of the table, one after the other: JSON, the table of the docs, and a page."""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from benchmarks.common import Others, announce, interpreter, positive
from benchmarks.launching import ROOT, end_by_exception
from benchmarks.page import render
from benchmarks.plan import FURTHER, LONGER, PLAN, Planned
from benchmarks.results import Result, from_line, markdown, put_between, read, write

NAMED = ("tensorflow", "grain", "keras", "data")
GRACE = 10.0
"""Seconds that a command has to end what it started."""


def main() -> None:
    """Run what is asked for, and keep what other runs have found of the rest."""
    given = _options().parse_args()
    end_by_exception()  # the command that runs is in a session of its own
    here = announce(__doc__ or "")
    named = {name: getattr(given, name) for name in NAMED if getattr(given, name)}
    wanted = given.only or _names(PLAN + FURTHER if given.all else PLAN)
    chosen = [planned for planned in PLAN + FURTHER if planned.name in wanted]
    kept = read(given.out / "benchmarks.json")
    began = time.monotonic()
    found = []
    for number, planned in enumerate(chosen, 1):
        minutes = (time.monotonic() - began) / 60
        print(f"\n[{number}/{len(chosen)}, {minutes:.1f} min] {planned.title}", flush=True)
        result = measure(planned, given, named)
        found.append(result)
        kept[result.name] = result
        publish(given.out, kept)  # what is there counts, however the rest ends
    minutes = (time.monotonic() - began) / 60
    print(f"\n{minutes:.1f} minutes")
    for result in found:
        reached, targets = result.targets
        print(f"{result.title}: {result.error or f'{reached} of {targets} targets reached'}")
    print(f"{given.out / 'benchmarks.html'}")
    if given.json:
        figures = [figure for result in found for figure in _named(result)]
        print(json.dumps({"machine": here, "figures": figures}))
    if any(result.error for result in found):
        sys.exit(1)


def measure(planned: Planned, given: argparse.Namespace, named: dict[str, str]) -> Result:
    """Run one command to its end or its limit; its lines are shown as they come."""
    rounds = given.rounds or (None if given.long else planned.rounds)
    words = planned.words(rounds, named)
    slower = given.long or bool(set(planned.takes) & set(named))
    limit = planned.limit * (LONGER if slower else 1.0)
    others, began = Others(), time.monotonic()
    lines, code = run([sys.executable, *words, "--json"], limit)
    seconds, used = time.monotonic() - began, others.cores
    measured: dict[str, object] = {}
    error = ""
    if code == 0 and lines and lines[-1].startswith("{"):
        measured = from_line(json.loads(lines[-1]))
    else:
        ended = f"ended after {limit:g} s" if seconds >= limit else f"exit code {code}"
        error = "\n".join([*lines[-3:], ended])
    return Result(
        name=planned.name,
        title=planned.title,
        command=shlex.join(["python", *planned.words(rounds, dict.fromkeys(named, "PATH"))]),
        when=datetime.now().isoformat(" ", "minutes"),
        seconds=seconds,
        others=None if math.isnan(used) else used,
        error=error,
        **measured,  # type: ignore[arg-type]
    )


def run(command: Sequence[str], limit: float) -> tuple[list[str], int]:
    """The lines that ``command`` said and its exit code; all but JSON is passed on."""
    lines = []
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    ) as process:  # fmt: skip
        timer = threading.Timer(limit, _end, [process])
        timer.start()
        try:
            for line in process.stdout or ():
                lines.append(line.rstrip("\n"))
                if not line.startswith("{"):
                    print(f"    {lines[-1]}", flush=True)
        finally:
            timer.cancel()
            _end(process)
    return lines, process.wait()


def _end(process: subprocess.Popen[str]) -> None:
    """End a command and what it started, if it still runs."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def publish(folder: Path, results: dict[str, Result]) -> None:
    """Write the JSON, the page, and the table where ``folder`` has a page of the docs."""
    ordered = [results[name] for name in _names(PLAN + FURTHER) if name in results]
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / "benchmarks.json", ordered)
    (folder / "benchmarks.html").write_text(render(ordered))
    docs = folder / "benchmarks.md"
    if docs.exists():
        docs.write_text(put_between(docs.read_text(), markdown(ordered)))


def _named(result: Result) -> list[dict[str, object]]:
    return [
        {"name": f"{result.name}: {one.name}", "value": one.value, "target": one.target,
         "relation": one.relation, "measure": one.measure, "reached": one.reached}
        for one in result.figures
    ]  # fmt: skip


def _names(plan: Sequence[Planned]) -> list[str]:
    return [planned.name for planned in plan]


def _options() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("--only", nargs="+", choices=_names(PLAN + FURTHER), metavar="NAME",
                      help=f"of {', '.join(_names(PLAN))}; "
                      f"and of those that take hours: {', '.join(_names(FURTHER))}")  # fmt: skip
    made.add_argument("--all", action="store_true", help="also those that take hours")
    made.add_argument("--rounds", type=positive, help="turns of each side, in every command")
    made.add_argument("--long", action="store_true", help="each command's own number of rounds")
    made.add_argument(
        "--tensorflow",
        metavar="PYTHON",
        type=interpreter,
        help="an interpreter that has TensorFlow",
    )
    made.add_argument(
        "--grain",
        metavar="PYTHON",
        type=interpreter,
        help="an interpreter that has grain and Pillow",
    )
    made.add_argument(
        "--keras", metavar="PYTHON", type=interpreter, help="an interpreter that has Keras"
    )
    made.add_argument("--data", metavar="PHOTOS", help="photos, one folder per class")
    made.add_argument("--out", type=Path, default=ROOT / "docs", help="where results are written")
    made.add_argument("--json", action="store_true", help="print one last line of JSON")
    return made


if __name__ == "__main__":
    main()
