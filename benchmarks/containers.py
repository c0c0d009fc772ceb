"""MLP in two containers of one CPU each: shared memory, bridge, torch DDP; start-up; image size."""

from __future__ import annotations

import argparse
import json
import re
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import Figure, announce, conclude, parser, positive, progress
from benchmarks.launching import ROOT, run_quietly
from spartito.launch.containers.plan import IMAGE

JOB = Path(__file__).parent / "jobs" / "in_containers.py"
WORKERS, LOCAL_BATCH = 2, 32
SPARTITO = ("-m", "spartito")
SIDES = {
    "local processes": ("fit", None),
    "shared IPC": ("fit", ("--share-ipc",)),
    "bridge": ("fit", ()),
    "DDP on the bridge": ("ddp", ()),
}
"""What each side computes with, and its options of `cluster compose`; None: no container."""

TORCH_SIZE = """
import pathlib, torch
files = pathlib.Path(torch.__file__).parent.rglob("*")
print(sum(one.lstat().st_size for one in files if one.is_file()))
"""


def main() -> None:
    """Print the ratios, the seconds to the first step, and the size without torch."""
    assert __doc__ is not None
    options = parser(__doc__, rounds=3)
    options.add_argument("--windows", type=positive, default=4, help="windows of a turn")
    options.add_argument("--steps", type=positive, default=500, help="steps of a window")
    options.add_argument("--image", default=IMAGE, help="what the containers run")
    given = options.parse_args()
    here = announce(__doc__)
    speed: dict[str, list[float]] = {side: [] for side in SIDES}
    starts: dict[str, list[float]] = {side: [] for side in SIDES}
    for number in range(given.rounds):
        for side in SIDES if number % 2 == 0 else reversed(SIDES):
            began = time.time()
            print(f"{side} ...", flush=True)
            seen = turn(side, given)
            rate = WORKERS * LOCAL_BATCH / statistics.median(seen["windows"])
            speed[side].append(rate)
            starts[side].append(seen["first"] - seen.get("began", began))
        progress(number, given.rounds, {side: speed[side][-1] for side in SIDES}, "examples/s")
        progress(number, given.rounds, {side: starts[side][-1] for side in SIDES}, "s to a step")
    rate_of = {side: statistics.median(found) for side, found in speed.items()}
    size = int(docker("image", "inspect", "--format", "{{.Size}}", given.image))
    torch = int(docker("run", "--rm", given.image, "python", "-c", TORCH_SIZE))
    figures = [
        Figure(
            "shared IPC / local processes", rate_of["shared IPC"] / rate_of["local processes"], 0.9
        ),
        Figure("bridge / DDP on the bridge", rate_of["bridge"] / rate_of["DDP on the bridge"], 1.0),
        Figure("cluster up to the first step", statistics.median(starts["bridge"]), 6.0, "<=", "s"),
        Figure("image without torch", (size - torch) / 1e6, 450, "<=", "MB"),
        Figure("image", size / 1e6, measure="MB"),
    ]
    conclude(here, figures, given.json, examples_per_second=speed, seconds_to_first_step=starts)


def turn(side: str, given: argparse.Namespace) -> dict[str, Any]:
    """What worker 0 of one job printed."""
    job, options = SIDES[side]
    words = [job, f"--windows={given.windows}", f"--steps={given.steps}"]
    if options is None:
        ours = ["run", "--strategy", "mirrored", "--workers", str(WORKERS)]
        return result(run_quietly([*SPARTITO, *ours, str(JOB), *words]))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "compose.yaml")  # paths in it begin where it was written
        made = ["cluster", "compose", str(JOB), "--name", f"benchmark-{secrets.token_hex(3)}"]
        made += ["--workers", str(WORKERS), "--cpus", "1", "--image", given.image]
        made += ["--out", f"{folder}/out", *options, "--", *words]
        file.write_text(run_quietly([*SPARTITO, *made], folder=file.parent))
        began = time.time()
        return result(run_quietly([*SPARTITO, "cluster", "up", str(file)])) | {"began": began}


def result(text: str) -> dict[str, Any]:
    """The line of JSON in what a job printed."""
    found = re.findall(r"\{\"windows.*\}", text)
    if not found:
        sys.exit(f"the job printed no result:\n{text[-2000:]}")
    result: dict[str, Any] = json.loads(found[-1])
    return result


def docker(*words: str) -> str:
    """What the engine prints."""
    return subprocess.run(
        ["docker", *words], capture_output=True, text=True, check=True, timeout=60, cwd=ROOT
    ).stdout


if __name__ == "__main__":
    main()
