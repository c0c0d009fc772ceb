"""Starts the processes of a benchmark, all in one environment, and brings back what they found."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spartito.launch.local import MALLOC, Place, environments
from spartito.launch.machine import free_port
from spartito.names import ENV_RUN_DIR, ENV_STRATEGY, ENV_STRATEGY_OPTIONS

ROOT = Path(__file__).parents[1]
NOT_OURS = (ENV_RUN_DIR, ENV_STRATEGY, ENV_STRATEGY_OPTIONS, "TF_CONFIG", *MALLOC)


def run_job(
    program: Sequence[str],
    *,
    workers: int,
    python: str = sys.executable,
    malloc: bool = True,
    limit: float = 300.0,
    env: Mapping[str, str] | None = None,
) -> Any:
    """Run ``python *program`` as ``workers`` processes; answers the JSON of rank 0's last line.

    Each gets what `spartito run` gives: torchrun's variables, one thread, the malloc settings
    (without ``malloc`` glibc's own). Whoever is not ours gets the same. Ends the program with
    what a process said if it fails or outlives ``limit`` seconds.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the job too
    base = {name: value for name, value in os.environ.items() if name not in NOT_OURS}
    base |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **(env or {})}
    place = Place(0, 1, "127.0.0.1", free_port())
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank, variables in enumerate(environments(base, place, workers)):
            if not malloc:
                variables = {k: v for k, v in variables.items() if k not in MALLOC}
            with (
                open(f"{folder}/{rank}.out", "wb") as out,
                open(f"{folder}/{rank}.err", "wb") as err,
            ):
                processes.append(
                    subprocess.Popen(
                        [python, *program], cwd=ROOT, env=variables, stdout=out, stderr=err
                    )
                )
        failed = _wait(processes, limit)
        if failed is not None:
            said = Path(folder, f"{failed}.err").read_text(errors="replace")
            sys.exit(
                f"{' '.join(program)}: rank {failed} failed or took {limit:g} s\n{said[-4000:]}"
            )
        lines = Path(folder, "0.out").read_text().splitlines()
    return json.loads(lines[-1])


def _wait(processes: Sequence[subprocess.Popen[bytes]], limit: float) -> int | None:
    """Wait for all; answers the first that failed, when none is left running."""
    end = time.monotonic() + limit
    try:
        while True:
            codes = [process.poll() for process in processes]
            for rank, code in enumerate(codes):
                if code or (code is None and time.monotonic() > end):
                    return rank
            if None not in codes:
                return None
            time.sleep(0.05)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
