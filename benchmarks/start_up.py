"""From process start to the first finished step: `spartito run` against `torchrun`.

Workers of `spartito run` are forked from a process that has imported torch, those of the second
row are not (`SPARTITO_FORK=0`).
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.common import Figure, Windows, announce, conclude, parser, positive, progress
from benchmarks.launching import ROOT
from spartito.names import ENV_FORK
from spartito.wire.ports import free_port

TARGET = 1.3
LIMIT = 120.0
JOBS = Path(__file__).parent / "jobs"
RUN, NOT_FORKED, TORCHRUN = "spartito run", "spartito run, not forked", "torchrun"


def command(name: str, workers: int) -> tuple[str, ...]:
    """What is started after ``python``."""
    if name == TORCHRUN:
        return (
            *("-m", "torch.distributed.run", "--nproc-per-node", str(workers)),
            *("--master-addr", "127.0.0.1", "--master-port", str(free_port())),
            str(JOBS / "first_step_ddp.py"),
        )
    return (
        *("-m", "spartito", "run", "--strategy", "mirrored", "--workers", str(workers)),
        str(JOBS / "first_step_spartito.py"),
    )


def main() -> None:
    """Print the ratios of the seconds that it takes."""
    assert __doc__ is not None
    made = parser(__doc__, rounds=5)
    made.add_argument("--workers", nargs="+", type=positive, default=[2, 8], metavar="N")
    given = made.parse_args()
    here = announce(__doc__.partition("\n")[0])
    ways = [(name, count) for count in given.workers for name in (RUN, NOT_FORKED, TORCHRUN)]
    for name in (RUN, TORCHRUN):  # so that the files of both lie in the page cache
        first_step(name, given.workers[0])
    seconds: Windows = {f"{name}, {count} workers": [] for name, count in ways}
    for number in range(given.rounds):
        now = {f"{name}, {count} workers": first_step(name, count) for name, count in ways}
        for way, value in now.items():
            seconds[way].append(value)
        progress(number, given.rounds, now, "seconds")
    median = {way: statistics.median(values) for way, values in seconds.items()}
    figures = []
    for count in given.workers:
        own = {name: median[f"{name}, {count} workers"] for name in (RUN, NOT_FORKED, TORCHRUN)}
        figures += [
            Figure(f"{count} workers: {RUN} / {TORCHRUN}", own[RUN] / own[TORCHRUN], TARGET, "<="),
            Figure(f"{count} workers: forked / not forked", own[RUN] / own[NOT_FORKED]),
        ]
    figures += [Figure(way, value, measure="s") for way, value in median.items()]
    conclude(here, figures, given.json, seconds=seconds)


def first_step(name: str, workers: int) -> float:
    """Seconds until the last of the workers has finished its first step."""
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "BENCHMARK_FOLDER": folder, "OMP_NUM_THREADS": "1"}
        env[ENV_FORK] = "0" if name == NOT_FORKED else "1"
        with open(f"{folder}/said", "w+") as said:
            began = time.time()
            process = subprocess.Popen(
                [sys.executable, *command(name, workers)],
                cwd=ROOT,
                env=env,
                stdout=said,
                stderr=said,
                start_new_session=True,
            )
            try:
                code = process.wait(LIMIT)
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
            if code:
                said.seek(0)
                sys.exit(f"{name} ended with {code}\n{said.read()[-4000:]}")
        ends = [float(Path(folder, str(rank)).read_text()) for rank in range(workers)]
    return max(ends) - began


if __name__ == "__main__":
    main()
