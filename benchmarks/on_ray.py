"""Ray, two nodes on this machine: against `spartito run`, and its start against Ray Train.

The nodes are started with ``RAY_worker_niceness=0``: by default Ray gives its workers niceness 15,
so that its own processes, and any other program, go before them, which no task of `spartito run`
has to bear. Both sides run while the cluster does.
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

from benchmarks.common import Figure, Windows, announce, conclude, parser, progress
from benchmarks.launching import end_by_exception, run_quietly
from spartito.cluster.ports import free_port

WORKERS, STEPS, WINDOWS = 2, 2000, 4
JOBS = Path(__file__).parent / "jobs"
RATE, START, STARTS = 0.95, 0.5, 3
LIMIT = 90.0


def main() -> None:
    """Print both ratios."""
    assert __doc__ is not None
    options = parser(__doc__, rounds=5)
    options.add_argument("--only", choices=("rate", "start"), help="one of the two races")
    given = options.parse_args()
    here = announce(__doc__)
    figures: list[Figure] = []
    seconds: Windows = {}
    with two_nodes() as address:
        if given.only != "start":
            seconds |= rates(address, given.rounds)
            ours, alone = (statistics.median(seconds[side]) for side in ("ray", "local"))
            pairs = zip(seconds["local"], seconds["ray"], strict=True)
            ratio = statistics.median(there / here for there, here in pairs)
            figures += [
                Figure("MLP, spartito run --ray / spartito run", ratio, RATE),
                Figure("spartito run --ray", ours * 1e6, measure="us a step"),
                Figure("spartito run", alone * 1e6, measure="us a step"),
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
    conclude(here, figures, given.json, seconds=seconds)


def rates(address: str, rounds: int) -> Windows:
    """Seconds per step of the MLP on the cluster and in local processes: one figure a round."""
    words = ["fit", f"--windows={WINDOWS}", f"--steps={STEPS}"]
    job = [str(JOBS / "in_containers.py"), *words]
    usual = ["-m", "spartito", "run", "--strategy=mirrored", f"--workers={WORKERS}"]
    commands = {
        "ray": [*usual, f"--ray={address}", "--placement=spread", *job],
        "local": [*usual, *job],
    }
    seconds: Windows = {side: [] for side in commands}
    for number in range(rounds):
        now = {}
        for side in commands if number % 2 else reversed(commands):
            windows = _figures(run_quietly(commands[side], limit=LIMIT))["windows"]
            seconds[side].append(statistics.median(windows))
            now[side] = seconds[side][-1] * 1e6
        progress(number, rounds, now, "us a step")
    return seconds


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
