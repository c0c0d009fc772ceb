"""Milliseconds of a reduction, machines (network namespaces) of 2: hierarchical and flat gloo."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import Figure, announce, conclude, parser, positive, progress
from benchmarks.launching import ROOT
from tests.netns import Machine, NoNamespacesError, network

WORKERS = 2
WINDOWS = 4
LIMIT = 300.0
PORT = 29600
NAMES = {269_322: "MLP", 2_782_649: "cats-vs-dogs"}
WAYS = {"auto": "hierarchical", "process_group": "flat gloo"}


def main() -> None:
    """Print the milliseconds of each way, and how many times faster the layers are."""
    assert __doc__ is not None
    options = parser(__doc__, rounds=3)
    options.add_argument("--machines", type=positive, default=2, help="2 replicas on each")
    given = options.parse_args()
    if given.machines < 2:
        options.error("--machines 1 has nothing between the machines")
    here = announce(__doc__)
    found: dict[str, dict[str, list[float]]] = {}
    for number in range(given.rounds):
        for floats, ways in measure(given.machines).items():
            name = f"{NAMES[int(floats)]}, {int(floats):,} floats"
            now = {WAYS[way]: statistics.median(values) * 1e3 for way, values in ways.items()}
            progress(number, given.rounds, now, f"ms, {name}")
            for way, values in ways.items():
                found.setdefault(name, {}).setdefault(WAYS[way], []).extend(values)
    figures = []
    for name, sides in found.items():
        median = {side: statistics.median(values) for side, values in sides.items()}
        figures += [Figure(f"{name}: {side}", median[side] * 1e3, measure="ms") for side in median]
        layers, flat = (median[side] for side in WAYS.values())
        figures.append(Figure(f"{name}: flat gloo / hierarchical", flat / layers))
    conclude(here, figures, given.json, seconds=found)


def measure(count: int) -> Any:
    """``{floats: {way: [seconds]}}`` of one job on so many machines."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "found.json")
        try:
            with network(*(f"bench{number}" for number in range(count))) as machines:
                run(machines, out)
        except NoNamespacesError as error:
            sys.exit(str(error))
        return json.loads(out.read_text())


def run(machines: list[Machine], out: Path) -> None:
    """The job to its end; ends the program with what a machine said if it fails there."""
    launch = [sys.executable, "-m", "spartito", "run", "--workers", str(WORKERS)]
    launch += ["--nnodes", str(len(machines)), "--master-addr", f"{machines[0].address}:{PORT}"]
    job = ["-m", "benchmarks.jobs.layers", f"--windows={WINDOWS}", f"--out={out}"]
    job += ["--floats", *map(str, NAMES), "--ways", *WAYS]
    started = []
    end = time.monotonic() + LIMIT
    try:
        for number, machine in enumerate(machines):
            words = [*machine.enters, *launch, "--node-rank", str(number), *job]
            log = out.with_name(f"{number}.log")
            with log.open("wb") as file:
                program = subprocess.Popen(words, cwd=ROOT, stdout=file, stderr=file)
            started.append((program, log))
        for program, log in started:
            if program.wait(max(0.0, end - time.monotonic())):
                sys.exit(f"a machine failed\n{log.read_text(errors='replace')[-4000:]}")
    finally:
        for program, _ in started:
            program.terminate()  # `spartito` ends what it started
            program.wait()


if __name__ == "__main__":
    main()
