"""MLP, 2 workers and 1 parameter server on one host, local batch 32: shared memory, TCP, others."""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from benchmarks.common import Figure, Windows, announce, conclude, progress, rates
from benchmarks.launching import run_job, run_roles
from benchmarks.race import WORKERS, race_parser
from spartito.launch.processes.roles import Roles
from spartito.names import ENV_STRATEGY, ENV_STRATEGY_OPTIONS

LOCAL_BATCH = 32
OPTIONS = {"shared memory": {}, "TCP": {"servers": {"shared_memory": False}}}
"""Our sides, and their strategy's options."""
ALONE = "no communication"
BARE = {f"bare {way}": way for way in OPTIONS}
"""The same with nothing but what any design needs: the bound of what can be reached."""
TENSORFLOW = {"TensorFlow fit": "fit", "TensorFlow schedule": "schedule"}
LIMIT = 240.0


def main() -> None:
    """Print the ratios of examples that all workers train on per second."""
    assert __doc__ is not None
    options = race_parser(__doc__, rounds=4, windows=3, steps=400)
    options.add_argument("--parts", action="store_true", help="where the time of a push goes")
    options.add_argument("--bare", action="store_true", help="bare prototypes too: the bound")
    given = options.parse_args()
    here = announce(__doc__)
    if given.parts:
        show_parts(given.windows * given.steps)
        return
    sides = [*OPTIONS, ALONE, *(BARE if given.bare else ()), *_tensorflow(given.tensorflow)]
    windows: Windows = {side: [] for side in sides}
    for number in range(given.rounds):
        now: Windows = {}
        others: list[str] = []
        # Every second round runs backwards, so that no side always follows the same one.
        for side in sides if number % 2 == 0 else reversed(sides):
            began, before = time.perf_counter(), foreign_seconds()
            now[side] = turn(side, given)
            taken = (foreign_seconds() - before) / (time.perf_counter() - began)
            others.append(f"{side} {taken:.2f}")
            windows[side] += now[side]
        values = rates({side: now[side] for side in sides}, LOCAL_BATCH * WORKERS)
        progress(number, given.rounds, values, "examples/s")
        print(f"  cores that other processes took meanwhile: {', '.join(others)}")
    speed = rates(windows, LOCAL_BATCH * WORKERS)
    figures = [
        Figure("shared memory / no communication", speed["shared memory"] / speed[ALONE], 0.75),
        Figure("TCP / no communication", speed["TCP"] / speed[ALONE], 0.5),
    ]
    if given.bare:
        figures += [
            Figure(f"{side} / no communication", speed[side] / speed[ALONE]) for side in BARE
        ]
    if given.tensorflow:
        name = max(TENSORFLOW, key=lambda side: speed[side])
        figures += [
            Figure(f"shared memory / {name}", speed["shared memory"] / speed[name], 8.0),
            Figure(f"TCP / {name}", speed["TCP"] / speed[name], 5.0),
        ]
    conclude(here, figures, given.json, examples_per_second=speed, seconds_per_step=windows)


def foreign_seconds() -> float:
    """CPU seconds that all but this process and its children have taken since the start.

    Three processes share the cores here, two where they do not communicate: what else runs slows
    the sides by different amounts, and a ratio measured beside it is of no use.
    """
    with open("/proc/stat") as lines:
        user, nice, system, _, _, irq, soft, steal = map(int, lines.readline().split()[1:9])
    whole = (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return whole - sum(one.ru_utime + one.ru_stime for one in used)


def turn(side: str, given: argparse.Namespace) -> list[float]:
    """Seconds per batch of each of the two workers, in every window."""
    amount = [f"--windows={given.windows}", f"--steps={given.steps}"]
    malloc = given.peer_malloc == "same"
    found: list[float]
    if side == ALONE:
        program = ["-m", "benchmarks.jobs.steps", "alone", "mlp", *amount]
        found = run_job(program, workers=WORKERS, malloc=malloc, limit=LIMIT)
    elif side in BARE:
        program = ["-m", "benchmarks.jobs.bare_training", BARE[side], *amount]
        found = run_job(program, workers=WORKERS + 1, limit=LIMIT)
    elif side in TENSORFLOW:
        script = Path(__file__).parent / "jobs" / "tensorflow_parameter_server.py"
        found = run_roles(
            [str(script), TENSORFLOW[side], *amount],
            roles=Roles(WORKERS, ps=1, chief=True),
            python=given.tensorflow,
            malloc=malloc,
            limit=LIMIT,
            ends_alone=True,
        )
    else:
        with tempfile.TemporaryDirectory() as folder:
            env = {
                "BENCHMARK_FOLDER": folder,
                ENV_STRATEGY: "parameter_server",
                ENV_STRATEGY_OPTIONS: json.dumps(OPTIONS[side]),
            }
            program = ["-m", "benchmarks.jobs.asynchronous", f"--workers={WORKERS}", *amount]
            found = run_roles(program, roles=Roles(WORKERS, ps=1), limit=LIMIT, env=env)
    return found


def show_parts(steps: int) -> None:
    """Print a table of the own CPU time of each part of a push, in microseconds."""
    columns = {name: parts(options, steps) for name, options in OPTIONS.items()}
    alone = {f"plain: {part}": spent for part, spent in plain_parts(steps).items()}
    rows = dict.fromkeys(part for found in columns.values() for part in found)
    print(f"\n{'us of a core, per push':<58}" + "".join(f"{name:>16}" for name in columns))
    for part in rows:
        print(
            f"{part:<58}" + "".join(f"{found.get(part, 0.0):16.0f}" for found in columns.values())
        )
    print(f"{'sum':<58}" + "".join(f"{sum(found.values()):16.0f}" for found in columns.values()))
    for part, spent in {**alone, "plain: sum": sum(alone.values())}.items():
        print(f"{part:<58}{spent:16.0f}")


def parts(options: Mapping[str, object], steps: int) -> dict[str, float]:
    """Microseconds per push of each part of a worker (their mean) and of the server."""
    with tempfile.TemporaryDirectory() as folder:
        env = {
            "BENCHMARK_FOLDER": folder,
            ENV_STRATEGY: "parameter_server",
            ENV_STRATEGY_OPTIONS: json.dumps(options),
        }
        program = ["-m", "benchmarks.jobs.push_parts", f"--workers={WORKERS}", f"--steps={steps}"]
        run_roles(program, roles=Roles(WORKERS, ps=1), limit=LIMIT, env=env)
        found = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.parts"))]
    pushes = [one.pop("pushes") for one in found]
    server, *workers = found if "serve: locks, checks, staleness" in found[0] else found[::-1]
    share = [count / sum(pushes[-len(workers) :]) for count in pushes[-len(workers) :]]
    mean = {
        f"worker: {part}": sum(one[part] * much for one, much in zip(workers, share, strict=True))
        for part in workers[0]
    }
    return mean | {f"server: {part}": spent for part, spent in server.items()}


def plain_parts(steps: int) -> dict[str, float]:
    """The same of two processes that do not communicate, at the same time."""
    program = ["-m", "benchmarks.jobs.push_parts", "--plain", "--workers=2", f"--steps={steps}"]
    found: dict[str, float] = run_job(
        program, workers=WORKERS, limit=LIMIT, env={"BENCHMARK_FOLDER": "."}
    )
    del found["pushes"]
    return found


def _tensorflow(python: str | None) -> list[str]:
    """Its sides, where an interpreter was named."""
    if python is None:
        print("TensorFlow skipped: name an interpreter that has it with --tensorflow PYTHON")
        return []
    if shutil.which(python) is None:
        sys.exit(f"--tensorflow {python}: there is no such interpreter")
    return list(TENSORFLOW)


if __name__ == "__main__":
    main()
