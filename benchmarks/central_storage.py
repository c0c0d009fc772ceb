"""central_storage against mirrored, 2 replicas: memory of each, speed, and one device's numbers."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from benchmarks.common import Figure, Windows, announce, conclude, parser, positive, progress, rates
from benchmarks.equality import TARGET, largest
from benchmarks.launching import run_job
from benchmarks.race import WORKERS

SIDES = ("mirrored", "central_storage")
ROWS = 32
JOB = ("-m", "benchmarks.jobs.storage")


def main() -> None:
    """Print the ratios of memory and of examples per second, and the largest difference."""
    assert __doc__ is not None
    options = parser(__doc__, rounds=3)
    options.add_argument("--steps", type=positive, default=300, help="steps of a window")
    given = options.parse_args()
    here = announce(__doc__)
    figures = [*memory(), *numbers()]
    windows: Windows = {side: [] for side in SIDES}
    for number in range(given.rounds):
        for side in SIDES if number % 2 == 0 else reversed(SIDES):
            windows[side] += run_job([*JOB, "speed", side, f"--steps={given.steps}"],
                                     workers=WORKERS)  # fmt: skip
        progress(number, given.rounds, rates(windows, ROWS * WORKERS), "examples/s")
    speed = rates(windows, ROWS * WORKERS)
    ratio = speed["central_storage"] / speed["mirrored"]
    figures.append(Figure("MLP, examples per second: central_storage / mirrored", ratio))
    conclude(here, figures, given.json, examples_per_second=speed, seconds_per_step=windows)


def memory() -> list[Figure]:
    """What training adds to a replica, in proportional bytes, and what is kept once."""
    found = {}
    for side in SIDES:
        result = run_job([*JOB, "memory", side], workers=WORKERS)
        found[side] = sum(result["added"]) / WORKERS
        each = " and ".join(f"{size / 1e6:.0f}" for size in result["added"])
        print(f"{side}: {each} MB (parameters {result['parameters'] / 1e6:.0f}, "
              f"Adam's state {result['state'] / 1e6:.0f})", flush=True)  # fmt: skip
    central, mirrored = found["central_storage"], found["mirrored"]
    copies = (mirrored - central) / (result["parameters"] + result["state"])
    return [
        Figure("memory per replica: central_storage / mirrored", central / mirrored, 0.8, "<="),
        Figure("copies of parameters and state saved per replica, of 1/2", copies, 0.45),
    ]


def numbers() -> list[Figure]:
    """Losses and weights after 30 steps in float64, against one device."""
    with tempfile.TemporaryDirectory() as folder:
        env = {"BENCHMARK_FOLDER": folder}
        one = run_job([*JOB, "numbers", "one_device"], workers=1, env=env)
        two = run_job([*JOB, "numbers", "central_storage"], workers=WORKERS, env=env)
        left, right = (torch.load(Path(folder, f"{name}.pt")) for name in ("one_device", SIDES[1]))
    weights = max((left[name] - right[name]).abs().max().item() for name in left)
    return [
        Figure("fp64 against one device: losses", largest(one, two), TARGET, "<=", "difference"),
        Figure("fp64 against one device: weights", weights, TARGET, "<=", "difference"),
    ]


if __name__ == "__main__":
    main()
