"""SIGSTOP of each task of a running job: seconds until it is named; what heartbeats cost."""

from __future__ import annotations

import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import timeit

import torch
from torch import nn

import spartito as sp
from benchmarks.common import Figure, announce, conclude, parser, progress
from benchmarks.launching import ROOT
from spartito import heartbeat
from spartito.names import ENV_HEARTBEAT

TARGET, MICROSECOND = 5.0, 1.0
LIMIT = 60.0
JOBS = {
    "mirrored": ("--workers", "2"),
    "parameter_server": ("--workers", "2", "--ps", "1", "--chief"),
}
JOB = "JOB"
"""In the environment of the tasks: this module is what they run."""


class Tells(sp.Callback):
    """Says that all train."""

    said = False

    def on_train_batch_end(self, batch: int, logs: object) -> None:
        """At the twentieth step."""
        if self.trainer.step >= 20 and self.trainer.is_chief and not self.said:
            self.said = True
            print("all train", flush=True)


def train() -> None:
    """Be a task of the job, which trains a small model for ever."""
    strategy = sp.strategy()
    print(f"pid of {strategy.task}: {os.getpid()}", flush=True)
    net = nn.Linear(8, 1)
    trainer = sp.Trainer(
        net,
        optimizer=torch.optim.SGD(net.parameters(), 0.01),
        loss=nn.MSELoss(),
        strategy=strategy,
    )
    torch.manual_seed(0)
    data = torch.randn(4096, 8), torch.randn(4096, 1)
    trainer.fit(data, epochs=10**6, verbose=False, callbacks=Tells())


def named(strategy: str) -> dict[str, float]:
    """Seconds until each task of a job is named, one after the other."""
    command = [
        *(sys.executable, "-m", "spartito", "run", "--strategy", strategy, *JOBS[strategy]),
        *("-m", "benchmarks.standing_still"),
    ]
    job = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, JOB: "1", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert job.stdout is not None
    lines = job.stdout

    def until(words: str) -> str:
        end, before = time.monotonic() + LIMIT, ""
        while time.monotonic() < end and (line := lines.readline()):
            before += line
            if words in line:
                return before
        sys.exit(f"{strategy}: {words!r} never came\n{before[-4000:]}")

    try:
        said = until("all train")
        pids = {name: int(pid) for name, pid in re.findall(r"pid of (\w+ \d+): (\d+)", said)}
        seconds = {}
        for name, pid in sorted(pids.items()):
            os.kill(pid, signal.SIGSTOP)
            began = time.monotonic()
            until(f"spartito: {name} is stopped by a signal")
            seconds[f"{strategy}, {name}"] = time.monotonic() - began
            os.kill(pid, signal.SIGCONT)
            until(f"spartito: {name} goes on")
        return seconds
    finally:
        job.terminate()
        job.communicate()


def beat_microseconds() -> float:
    """Of one beat, the least of five loops; a step has two, and two more where it waits."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(bytes(heartbeat.SIZE))
        file.flush()
        os.environ[ENV_HEARTBEAT] = file.name
        heartbeat.begin()
        count = 200_000
        loops = timeit.repeat(lambda: heartbeat.beat(7, heartbeat.STEP), number=count, repeat=5)
        os.unlink(f"{file.name}.stacks")
    return min(loops) / count * 1e6


def main() -> None:
    """Print the seconds of each task, the most of all, and what a beat costs."""
    assert __doc__ is not None
    given = parser(__doc__, rounds=2).parse_args()
    here = announce(__doc__)
    cost = beat_microseconds()
    found: dict[str, list[float]] = {}
    for number in range(given.rounds):
        now = {name: value for strategy in JOBS for name, value in named(strategy).items()}
        for name, value in now.items():
            found.setdefault(name, []).append(value)
        progress(number, given.rounds, now, "seconds")
    figures = [
        Figure("until any task is named", max(map(max, found.values())), TARGET, "<=", "s"),
        *(Figure(name, statistics.median(each), measure="s") for name, each in found.items()),
        Figure("one heartbeat", cost, MICROSECOND, "<=", "us"),
    ]
    conclude(here, figures, given.json, seconds=found)


if __name__ == "__main__":
    train() if JOB in os.environ else main()
