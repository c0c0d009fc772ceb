"""Ray, two nodes on this machine: against `spartito run`, and its start against Ray Train.

The nodes are started with ``RAY_worker_niceness=0``: by default Ray gives its workers niceness 15,
so that its own processes, and any other program, go before them, which no task of `spartito run`
has to bear. Both sides run while the cluster does, on the same cores; how many of them Ray's own
processes keep busy meanwhile is a figure too.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks.busy import Busy
from benchmarks.common import Figure, Windows, announce, conclude, parser, progress
from benchmarks.launching import end_by_exception, run_quietly
from spartito.wire.ports import free_port

WORKERS, STEPS, WINDOWS = 2, 2000, 4
JOBS = Path(__file__).parent / "jobs"
RATE, START, STARTS = 0.95, 0.5, 3
LIMIT = 90.0

TASK, STANDS, ACTOR, OWN = "tasks", "what stands for them", "actors", "Ray's own processes"
KINDS = {
    "spartito.launch.hosts.agent": STANDS,
    "spartito run": STANDS,
    "relay.py": STANDS,
    "in_containers.py": TASK,
    "ray::TaskActor": ACTOR,
    "ray::": OWN,
    "/ray/": OWN,
    "ray.scripts": OWN,
}
"""What a process is, by the first of these that its command line has."""

Cores = dict[str, list[dict[str, float]]]
"""Of each side and round: the cores that each kind of process kept busy."""


def main() -> None:
    """Print both ratios."""
    assert __doc__ is not None
    options = parser(__doc__, rounds=5)
    options.add_argument("--only", choices=("rate", "start"), help="one of the two races")
    given = options.parse_args()
    here = announce(__doc__)
    figures: list[Figure] = []
    seconds: Windows = {}
    cores: Cores = {}
    if given.only != "rate":
        check_train()
    with two_nodes() as address:
        if given.only != "start":
            seconds, cores = rates(address, given.rounds)
            ours, alone = (statistics.median(seconds[side]) for side in ("ray", "local"))
            pairs = zip(seconds["local"], seconds["ray"], strict=True)
            ratio = statistics.median(there / here for there, here in pairs)
            figures += [
                Figure("MLP, spartito run --ray / spartito run", ratio, RATE),
                Figure("spartito run --ray", ours * 1e6, measure="us a step"),
                Figure("spartito run", alone * 1e6, measure="us a step"),
                *(
                    Figure(f"cores of {kind}, {name}", statistics.median(busy), measure="cores")
                    for kind in (TASK, ACTOR, STANDS, OWN)
                    for side, name in (("ray", "with --ray"), ("local", "without"))
                    if (busy := [one[kind] for one in cores[side] if kind in one])
                ),
            ]
        if given.only != "rate":
            found = starts(address, min(given.rounds, STARTS))
            ours, theirs = (statistics.median(found[side]) for side in ("ours", "theirs"))
            seconds |= found
            figures += [
                Figure("start, sp.launch.ray / TorchTrainer", ours / theirs, START, "<="),
                Figure("sp.launch.ray", ours, measure="s"),
                Figure("TorchTrainer", theirs, measure="s"),
            ]
    conclude(here, figures, given.json, seconds=seconds, cores=cores)


def check_train() -> None:
    """End the program before anything runs where Ray Train is not there."""
    import ray

    try:
        import ray.train.torch
    except ImportError as error:
        sys.exit(
            f"Ray Train cannot be imported, against which the start is measured: {error}\n"
            f"pip install 'ray[train]=={ray.__version__}', or leave it out: --only rate"
        )


def kind_of(words: str) -> str:
    """What a process with this command line is; "" where it has nothing to do with either side."""
    return next((kind for part, kind in KINDS.items() if part in words), "")


def rates(address: str, rounds: int) -> tuple[Windows, Cores]:
    """Seconds per step of the MLP on the cluster and in local processes: one figure a round."""
    words = ["fit", f"--windows={WINDOWS}", f"--steps={STEPS}"]
    job = [str(JOBS / "in_containers.py"), *words]
    usual = ["-m", "spartito", "run", "--strategy=mirrored", f"--workers={WORKERS}"]
    commands = {
        "ray": [*usual, f"--ray={address}", "--placement=spread", *job],
        "local": [*usual, *job],
    }
    seconds: Windows = {side: [] for side in commands}
    cores: Cores = {side: [] for side in commands}
    for number in range(rounds):
        now = {}
        for side in commands if number % 2 else reversed(commands):
            with Busy(kind_of) as busy:
                found = _figures(run_quietly(commands[side], limit=LIMIT))
            windows, first = found["windows"], found["first"]
            cores[side].append(busy.cores(first, first + STEPS * sum(windows)))
            seconds[side].append(statistics.median(windows))
            now[side] = seconds[side][-1] * 1e6
        progress(number, rounds, now, "us a step")
    return seconds, cores


def starts(address: str, rounds: int) -> Windows:
    """Seconds from the call to the first step, Ray warm."""
    words = [str(JOBS / "ray_start.py"), address, f"--rounds={rounds}"]
    env = {"RAY_TRAIN_V2_ENABLED": "1", "PYTHONPATH": str(JOBS)}
    found: Windows = json.loads(run_quietly(words, env=env, limit=300.0).splitlines()[-1])
    return found


def _figures(printed: str) -> Any:
    """The JSON that worker 0 prints."""
    line = next(line for line in printed.splitlines() if '{"windows"' in line)
    return json.loads(line[line.index("{") :])


@contextmanager
def two_nodes() -> Iterator[str]:
    """A cluster of two nodes with two CPUs each; its address."""
    import ray

    end_by_exception()
    address = f"{ray.util.get_node_ip_address()}:{free_port()}"
    port = address.rpartition(":")[2]
    nodes: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="r", ignore_cleanup_errors=True) as folder:
        roles = (
            ["--head", f"--port={port}", f"--temp-dir={folder}", "--include-dashboard=false"],
            [f"--address={address}"],
        )
        try:
            for role in roles:
                nodes.append(_node(role, folder))
                _until(address, len(nodes))
            yield address
        finally:
            for node in reversed(nodes):
                with suppress(ProcessLookupError):
                    os.killpg(node.pid, signal.SIGKILL)
                node.wait()


def _node(role: list[str], folder: str) -> subprocess.Popen[bytes]:
    usual = ["--block", "--num-cpus=2", "--object-store-memory=100000000", "--disable-usage-stats"]
    with open(f"{folder}/said", "ab") as said:
        return subprocess.Popen(
            [sys.executable, "-m", "ray.scripts.scripts", "start", *usual, *role],
            stdout=said, stderr=said, start_new_session=True,
            env={**os.environ, "RAY_worker_niceness": "0"},
        )  # fmt: skip


def _until(address: str, nodes: int) -> None:
    """Wait until the cluster has so many nodes."""
    code = (
        "import sys, ray; ray.init(sys.argv[1], logging_level=50, log_to_driver=False); "
        "sys.exit(sum(n['Alive'] for n in ray.nodes()) != int(sys.argv[2]))"
    )
    end = time.monotonic() + LIMIT
    while subprocess.run(
        [sys.executable, "-c", code, address, str(nodes)], capture_output=True
    ).returncode:
        if time.monotonic() > end:
            sys.exit("Ray did not start")
        time.sleep(0.2)


if __name__ == "__main__":
    main()
