"""From process start to the first finished step: `spartito run` against `torchrun`.

Workers of `spartito run` are forked from a process that has imported torch, those of the second
row are not (`SPARTITO_FORK=0`). A program that starts several jobs, as `spartito compare`, has that
process from the first one on: the third row is a later job.
"""

from __future__ import annotations

import os
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

from benchmarks.common import Figure, Windows, announce, conclude, parser, positive, progress
from benchmarks.launching import ROOT
from spartito.launch.processes.fork_server import ForkServer, new_server
from spartito.launch.processes.local import replica_environment
from spartito.launch.processes.process import Child
from spartito.names import ENV_FORK
from spartito.wire.ports import free_port

TARGET = 1.3
LIMIT = 120.0
JOBS = Path(__file__).parent / "jobs"
RUN, NOT_FORKED, TORCHRUN = "spartito run", "spartito run, not forked", "torchrun"
LATER = "spartito run, a later job of a program"
WAYS = (RUN, NOT_FORKED, LATER, TORCHRUN)


def command(name: str, workers: int, folder: str) -> tuple[str, ...]:
    """What is started after ``python``; its tasks write into the folder."""
    if name == TORCHRUN:
        return (
            *("-m", "torch.distributed.run", "--nproc-per-node", str(workers)),
            *("--master-addr", "127.0.0.1", "--master-port", str(free_port())),
            str(JOBS / "first_step_ddp.py"),
            folder,
        )
    return (
        *("-m", "spartito", "run", "--strategy", "mirrored", "--workers", str(workers)),
        str(JOBS / "first_step_spartito.py"),
        folder,
    )


def main() -> None:
    """Print the ratios of the seconds that it takes."""
    assert __doc__ is not None
    made = parser(__doc__, rounds=5)
    made.add_argument("--workers", nargs="+", type=positive, default=[2, 8], metavar="N")
    given = made.parse_args()
    here = announce(__doc__.partition("\n")[0])
    ways = [(name, count) for count in given.workers for name in WAYS]
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
        own = {name: median[f"{name}, {count} workers"] for name in WAYS}
        figures += [
            Figure(f"{count} workers: {RUN} / {TORCHRUN}", own[RUN] / own[TORCHRUN], TARGET, "<="),
            Figure(f"{count} workers: forked / not forked", own[RUN] / own[NOT_FORKED]),
            Figure(f"{count} workers: a later job / {TORCHRUN}", own[LATER] / own[TORCHRUN]),
        ]
    figures += [Figure(way, value, measure="s") for way, value in median.items()]
    conclude(here, figures, given.json, seconds=seconds)


def first_step(name: str, workers: int) -> float:
    """Seconds until the last of the workers has finished its first step."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as held:
        env = {**os.environ, "OMP_NUM_THREADS": "1", ENV_FORK: str(int(name != NOT_FORKED))}
        words = [sys.executable, *command(name, workers, folder)]
        server = held.enter_context(closing(_server(env, workers))) if name == LATER else None
        with open(f"{folder}/said", "w+") as said:
            began = time.time()
            process = _started(words, env, said.fileno(), server)
            watch = os.pidfd_open(process.pid)
            try:
                select.select([watch], [], [], LIMIT)
            finally:
                os.close(watch)
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
            if code := process.wait():
                said.seek(0)
                sys.exit(f"{name} ended with {code}\n{said.read()[-4000:]}")
        ends = [float(Path(folder, str(rank)).read_text()) for rank in range(workers)]
    return max(ends) - began


def _server(env: Mapping[str, str], workers: int) -> ForkServer:
    server = new_server(replica_environment(env, workers))
    if server is None or not server.wait():
        sys.exit("no process can be forked here: run this on Linux, without accelerators")
    return server


def _started(
    words: Sequence[str], env: Mapping[str, str], said: int, server: ForkServer | None
) -> Child:
    if server is None:
        return subprocess.Popen(
            words, cwd=ROOT, env=env, stdout=said, stderr=said, start_new_session=True
        )
    with open(os.devnull, "r+b") as nothing:
        streams = nothing.fileno(), said, said
        forked = server.start(words, env, nothing.fileno(), streams, ROOT, launches=True)
    assert forked is not None
    return forked


if __name__ == "__main__":
    main()
