"""Machines of a benchmark, which are network namespaces: one job of `spartito run` on all."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.launching import ROOT
from spartito.launch.lines.line import Link
from spartito.launch.lines.network import Machine, NoNamespacesError, network

LIMIT = 300.0
PORT = 29700


def run_on_machines(job: Sequence[str], *, machines: int, workers: int, rate: str = "") -> Any:
    """What rank 0 of ``python *job --out=FILE`` wrote, as JSON.

    Each machine has so many ``workers``, of one thread, and sends at ``rate`` (as "100mbit").
    Ends the program with what a machine said if it fails there or takes too long.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "found.json")
        try:
            with network(*(f"bench{number}" for number in range(machines))) as made:
                for machine in made if rate else ():
                    machine.slow_down(Link.read(rate))
                _run(made, workers, [*job, f"--out={out}"], Path(folder))
        except NoNamespacesError as error:
            sys.exit(str(error))
        return json.loads(out.read_text())


def _run(machines: Sequence[Machine], workers: int, job: Sequence[str], folder: Path) -> None:
    launch = [sys.executable, "-m", "spartito", "run", "--workers", str(workers)]
    launch += ["--nnodes", str(len(machines)), "--master-addr", f"{machines[0].address}:{PORT}"]
    started = []
    end = time.monotonic() + LIMIT
    try:
        for number, machine in enumerate(machines):
            words = [*machine.enters, "env", "OMP_NUM_THREADS=1", "GLOO_SOCKET_IFNAME=eth0"]
            words += [*launch, "--node-rank", str(number), *job]
            log = folder / f"{number}.log"
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
