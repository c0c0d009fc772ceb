"""Seconds from SIGKILL of a worker until all step again, steps repeated, and what it costs."""

from __future__ import annotations

import argparse
import os
import random
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from benchmarks.common import Figure, announce, conclude, parser, positive, progress
from benchmarks.launching import ROOT
from spartito.launch.lines.network import NoNamespacesError, network

JOB = Path(__file__).parent / "jobs" / "recovering.py"
LIMIT = 60.0
STEPPING = 0.5
"""Seconds that all have stepped before one of them is killed."""
WAIT = 0.5
"""Seconds for a replacement of a machine."""
WINDOW = 4.0
"""Seconds of a window of steps without failures."""


@dataclass(frozen=True, slots=True)
class Event:
    """A step of a worker: which process, whether it begins or ends, its number, and when."""

    process: int
    ends: bool
    step: int
    at: float


class Job:
    """A training that runs, and what its workers note in ``folder``."""

    def __init__(self, folder: Path, workers: int) -> None:
        self.folder, self.workers = folder, workers

    def events(self, rank: int) -> list[Event]:
        """The steps of a worker so far, those of its processes one after the other."""
        path = self.folder / f"worker-{rank}"
        lines = path.read_text().splitlines() if path.exists() else []
        fields = [line.split() for line in lines]
        return [
            Event(int(f[0]), f[1] == "end", int(f[2]), float(f[3])) for f in fields if len(f) == 4
        ]

    def steps_since(self, at: float) -> list[float | None]:
        """When each worker first ended a step after ``at``."""
        return [
            next((event.at for event in self.events(rank) if event.ends and event.at > at), None)
            for rank in range(self.workers)
        ]

    def wait(self, done: Callable[[], bool], what: str) -> None:
        """Return when ``done``; ends the benchmark where that takes too long."""
        end = time.monotonic() + LIMIT
        while not done():
            if time.monotonic() > end:
                sys.exit(f"{what} took more than {LIMIT:g} s\n{(self.folder / 'said').read_text()}")
            time.sleep(0.02)

    def all_step(self, since: float) -> None:
        """Return when all workers have stepped after ``since``, and some time more."""
        self.wait(lambda: None not in self.steps_since(since), "a first step of all")

    def kill(self, rank: int) -> float:
        """SIGKILL a worker; returns when."""
        process = int((self.folder / f"pid-{rank}").read_text())
        at = time.monotonic()
        os.kill(process, signal.SIGKILL)
        return at


@contextmanager
def running(strategy: str, workers: int, recover: bool) -> Iterator[Job]:
    """A job, until the block ends."""
    with tempfile.TemporaryDirectory() as folder, open(f"{folder}/said", "w+") as said:
        flags = ["--recover", "--restarts", "1000"] if recover else []
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "spartito", "run", "--strategy", strategy, *flags),
                *("--workers", str(workers), str(JOB), folder),
            ],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=said,
            stderr=said,
            start_new_session=True,
        )
        try:
            yield Job(Path(folder), workers)
            Path(folder, "stop").touch()
            if code := process.wait(LIMIT):
                sys.exit(f"the job ended with {code}\n{Path(folder, 'said').read_text()[-4000:]}")
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def repeated(job: Job, killed: int) -> int:
    """The most steps that a worker which lived began more than once."""
    most = 0
    for rank in range(job.workers):
        if rank != killed:
            begun = [event.step for event in job.events(rank) if not event.ends]
            most = max(most, sum(later <= step for step, later in pairwise(begun)))
    return most


def recovery(strategy: str, rank: int) -> tuple[float, int]:
    """Seconds from the end of one of two workers until both step again, and steps repeated."""
    with running(strategy, 2, recover=True) as job:
        job.all_step(0.0)
        time.sleep(STEPPING)
        at = job.kill(rank)
        job.all_step(at + 0.02)  # what was under way may still end
        time.sleep(STEPPING)
        return _gap(job, at), repeated(job, rank)


def machine_lost() -> float | None:
    """Seconds from the cut of one of two machines of two workers until the others step again.

    The machines are network namespaces, the store is on a third. None where there cannot be any.
    """
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        said = stack.enter_context(open(f"{folder}/said", "w+"))
        try:
            near, *machines = stack.enter_context(network("near", "node1", "node2"))
        except NoNamespacesError as error:
            print(f"no machine can be lost here: {error}", flush=True)
            return None
        store = f"{near.address}:{29400}"
        env = {**os.environ, "OMP_NUM_THREADS": "1", "SPARTITO_STORE": store}
        env["SPARTITO_SECRET"] = secrets.token_hex(16)
        python = [sys.executable, "-m"]
        words = [[*near.enters, *python, "spartito.cluster.store", store, f"{folder}/journal"]]
        flags = ["--strategy", "multi_worker_mirrored", "--recover", "--min-workers", "2"]
        flags += ["--wait", str(WAIT), "--workers", "2", "--nnodes", "2"]
        flags += ["--master-addr", f"{machines[0].address}:29500"]
        words += [
            [*each.enters, *python, "spartito", "run", *flags, "--node-rank", str(rank)]
            for rank, each in enumerate(machines)
        ]
        for number, one in enumerate(words):
            job = [str(JOB), folder] if number else []
            process = subprocess.Popen(
                [*one, *job], cwd=ROOT, env=env, stdout=said, stderr=said, start_new_session=True
            )
            stack.callback(_end, process)
        noted = Job(Path(folder), 4)
        noted.all_step(0.0)
        time.sleep(STEPPING)
        at = time.monotonic()
        machines[0].cut()

        def left() -> list[float | None]:
            return noted.steps_since(at + 0.5)[2:]

        noted.wait(lambda: None not in left(), "a step of those who are left")
        return max(found for found in left() if found is not None) - at


def _end(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(LIMIT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def rate(strategy: str, recover: bool) -> float:
    """Steps per second of two workers, without failures."""
    with running(strategy, 2, recover) as job:
        job.all_step(0.0)
        time.sleep(STEPPING + WINDOW)
        ends = [event.at for event in job.events(0) if event.ends]
    inside = [at for at in ends if at > ends[-1] - WINDOW]
    return (len(inside) - 1) / (inside[-1] - inside[0])


def progress_made(
    strategy: str, workers: int, every: float, minutes: float, seed: int
) -> tuple[float, int]:
    """The fraction of the time in which steps are made, at a failure ``every`` so many seconds."""
    draws, gaps = random.Random(seed), 0.0
    with running(strategy, workers, recover=True) as job:
        job.all_step(0.0)
        began, failures = time.monotonic(), 0
        while time.monotonic() < began + 60 * minutes:
            time.sleep(max(0.0, began + (failures + 1) * every - time.monotonic()))
            at = job.kill(draws.randrange(workers))
            job.all_step(at + 0.02)
            failures += 1
            print(f"failure {failures}: all step again after {_gap(job, at):.2f} s", flush=True)
            gaps += _gap(job, at)
        total = time.monotonic() - began
    return 1 - gaps / total, failures


def _gap(job: Job, at: float) -> float:
    """Seconds without a step of all around ``at``."""
    first = [found for found in job.steps_since(at + 0.02) if found is not None]
    return max(first) - at


def main() -> None:
    """Print the figures of the parts that are asked for."""
    assert __doc__ is not None
    made = parser(__doc__, rounds=3)
    made.add_argument("--every", type=float, help="a failure every so many seconds, and no more")
    made.add_argument("--minutes", type=float, default=20.0, help="so long, with --every")
    made.add_argument("--workers", type=positive, default=4, help="with --every")
    made.add_argument("--seed", type=int, default=0, help="of who is killed, with --every")
    made.add_argument("--strategy", default="mirrored", choices=["mirrored", "sharded"])
    given = made.parse_args()
    here = announce(__doc__)
    conclude(here, _with_failures(given) if given.every else _without(given), given.json)


def _with_failures(given: argparse.Namespace) -> list[Figure]:
    found, failures = progress_made(
        given.strategy, given.workers, given.every, given.minutes, given.seed
    )
    return [
        Figure("fraction of the time that makes progress", found, 0.95, measure="fraction"),
        Figure("failures", failures, measure="failures"),
    ]


def _without(given: argparse.Namespace) -> list[Figure]:
    found: dict[str, list[float]] = {"worker": [], "chief": [], "off": [], "on": []}
    most, machines = 0, []
    for number in range(given.rounds):
        if given.strategy == "mirrored" and (machine := machine_lost()) is not None:
            machines.append(machine)
            print(f"a machine of two is lost: {machine:.2f} s", flush=True)
        (worker, once), (chief, twice) = recovery(given.strategy, 1), recovery(given.strategy, 0)
        most = max(most, once, twice)
        off, on = rate(given.strategy, False), rate(given.strategy, True)
        now = {"worker": worker, "chief": chief, "off": off, "on": on}
        for name, value in now.items():
            found[name].append(value)
        progress(number, given.rounds, now, "seconds; steps/s")
    worker, chief, without, with_it = (statistics.median(values) for values in found.values())
    name = f"a machine of two lost (namespaces), min_workers, wait {WAIT:g} s"
    lost = [Figure(name, statistics.median(machines), 5.0, "<=", "s")] if machines else []
    return [
        *lost,
        Figure("steps repeated, at most", most, 1, "<=", "steps"),
        Figure("SIGKILL of a worker until both step", worker, 3.0, "<=", "s"),
        Figure("SIGKILL of the chief until both step", chief, 4.0, "<=", "s"),
        Figure("steps/s with recovery / without", with_it / without),
    ]


if __name__ == "__main__":
    main()
