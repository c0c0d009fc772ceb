"""From process start to the first finished step, 2 workers: `spartito run` against `torchrun`."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.common import Figure, Windows, announce, conclude, parser, progress
from benchmarks.launching import ROOT
from spartito.wire.ports import free_port

WORKERS = 2
TARGET = 1.3
LIMIT = 120.0
JOBS = Path(__file__).parent / "jobs"
COMMANDS = {
    "spartito run": (
        *("-m", "spartito", "run", "--strategy", "mirrored", "--workers", str(WORKERS)),
        str(JOBS / "first_step_spartito.py"),
    ),
    "torchrun": (
        *("-m", "torch.distributed.run", "--nproc-per-node", str(WORKERS)),
        *("--master-addr", "127.0.0.1", "--master-port", str(free_port())),
        str(JOBS / "first_step_ddp.py"),
    ),
}


def main() -> None:
    """Print the ratio of the seconds that it takes."""
    assert __doc__ is not None
    given = parser(__doc__, rounds=5).parse_args()
    here = announce(__doc__)
    for command in COMMANDS:  # so that the files of both lie in the page cache
        first_step(command)
    seconds: Windows = {command: [] for command in COMMANDS}
    for number in range(given.rounds):
        now = {command: first_step(command) for command in COMMANDS}
        for command, value in now.items():
            seconds[command].append(value)
        progress(number, given.rounds, now, "seconds")
    ours, theirs = (statistics.median(values) for values in seconds.values())
    figures = [
        Figure("spartito run / torchrun", ours / theirs, TARGET, "<="),
        Figure("spartito run", ours, measure="s"),
        Figure("torchrun", theirs, measure="s"),
    ]
    conclude(here, figures, given.json, seconds=seconds)


def first_step(name: str) -> float:
    """Seconds until the last of the workers has finished its first step."""
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "BENCHMARK_FOLDER": folder, "OMP_NUM_THREADS": "1"}
        with open(f"{folder}/said", "w+") as said:
            began = time.time()
            process = subprocess.Popen(
                [sys.executable, *COMMANDS[name]],
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
        ends = [float(Path(folder, str(rank)).read_text()) for rank in range(WORKERS)]
    return max(ends) - began


if __name__ == "__main__":
    main()
