"""Three groups, decoupled over a parameter server: one at a quarter of the speed, and one killed.

``slow``: examples per second against a synchronous meeting, local_sgd. ``killed``: a group ends by
SIGKILL and is started again: when it trains again, the longest step of another one (not of the
chief, which evaluates), and the final accuracy on the digits.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from itertools import pairwise
from pathlib import Path
from statistics import mean, median, pstdev

from benchmarks.common import Figure, Windows, announce, conclude, parser, positive, progress, rates
from benchmarks.killing import run_killing
from benchmarks.launching import run_quietly

GROUPS, LOCAL_BATCH = 3, 32
DECOUPLED = json.dumps({"groups": GROUPS, "every": 20})
SIDES = {
    "decoupled": ("--strategy", "parameter_server", "--ps", "1", "--strategy-options", DECOUPLED),
    "synchronous": (
        *("--strategy", "local_sgd", "--strategy-options"),
        json.dumps({"groups": GROUPS, "every": 20}),
    ),
}
SLOW = ("--slow", f"worker:{GROUPS - 1}=0.25")
TARGET = 2.0
VICTIM = f"worker-{GROUPS - 1}"


def main() -> None:
    """Print the ratio of examples per second; the others' pauses and the accuracies."""
    assert __doc__ is not None
    options = parser(__doc__, rounds=2)
    options.add_argument("--parts", nargs="+", choices=["slow", "killed"])
    options.add_argument("--windows", type=positive, default=2, help="windows of a turn")
    options.add_argument("--steps", type=positive, default=200, help="steps of a window")
    # Some 20 s, of which the new process needs a few to start.
    options.add_argument("--epochs", type=positive, default=100, help="of each training of digits")
    given = options.parse_args()
    here, parts = announce(__doc__), given.parts or ["slow", "killed"]
    figures = [*(slow(given) if "slow" in parts else ())]
    figures += killed(given) if "killed" in parts else ()
    conclude(here, figures, given.json)


def slow(given: argparse.Namespace) -> list[Figure]:
    """One of three groups runs a quarter of the time."""
    windows: Windows = {side: [] for side in SIDES}
    for number in range(given.rounds):
        now: Windows = {}
        for side in SIDES if number % 2 == 0 else reversed(SIDES):
            now[side] = turn(side, given)
            windows[side] += now[side]
        progress(number, given.rounds, rates(now, LOCAL_BATCH * GROUPS), "examples/s")
    speed = rates(windows, LOCAL_BATCH * GROUPS)
    ratio = speed["decoupled"] / speed["synchronous"]
    return [
        Figure("one of 3 slow: decoupled / synchronous", ratio, TARGET),
        *(Figure(f"one of 3 slow: {side}", speed[side], measure="examples/s") for side in SIDES),
    ]


def turn(side: str, given: argparse.Namespace) -> list[float]:
    """Seconds per global batch of every window."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *("-m", "spartito", "run", "--workers", str(GROUPS), *SIDES[side], *SLOW),
            *("-m", "benchmarks.jobs.asynchronous", f"--workers={GROUPS}"),
            *(f"--windows={given.windows}", f"--steps={given.steps}"),
        ]
        run_quietly(command, env={"BENCHMARK_FOLDER": folder})
        found: list[float] = json.loads(Path(folder, "windows.json").read_text())
    return found


def killed(given: argparse.Namespace) -> list[Figure]:
    """One of three groups ends by SIGKILL, and is started again."""
    accuracy: dict[bool, list[float]] = {True: [], False: []}
    waits: dict[bool, list[float]] = {True: [], False: []}
    came, back = [], []
    for number in range(given.rounds):
        for kills in (True, False) if number % 2 == 0 else (False, True):
            found, pause, merges, away = training(number, given.epochs, kills)
            accuracy[kills].append(100 * found)
            waits[kills].append(pause)
            came += [merges] * kills
            back += [away] * kills
            print(
                f"round {number + 1}, {'killed' if kills else 'whole'}: {found:.1%}, the others' "
                f"longest step {pause * 1e3:.0f} ms, merges of the group in the last half of the "
                f"epochs {merges}" + f", its next step after {away:.1f} s" * kills,
                flush=True,
            )
    epochs = given.epochs
    less = mean(accuracy[False]) - mean(accuracy[True])
    noise = max(pstdev(accuracy[False]), 0.5)
    return [
        Figure("points of accuracy that a kill costs", less, noise, "<="),
        Figure("accuracy, killed (%)", mean(accuracy[True])),
        Figure("accuracy, whole (%)", mean(accuracy[False])),
        Figure("the others' longest step, killed", median(waits[True]), 1.0, "<=", "s"),
        Figure("the others' longest step, whole", median(waits[False]), measure="s"),
        Figure("until the killed group trains again", median(back), measure="s"),
        Figure(
            "fewest merges of that group in the last half of the epochs", min(came), epochs // 2
        ),
    ]


def training(seed: int, epochs: int, kills: bool) -> tuple[float, float, int, float]:
    """Validation accuracy, the longest step of another, and of the last group two figures.

    Its merges in the last half of the epochs, and the seconds from its end to its next step.
    """
    with tempfile.TemporaryDirectory() as folder:
        words = [
            *("--workers", str(GROUPS), *SIDES["decoupled"]),
            *("-m", "benchmarks.jobs.decoupled", str(epochs), str(seed)),
        ]
        killed_at = run_killing(words, Path(folder), VICTIM if kills else None, [VICTIM], 1.0)
        others = [Path(folder, f"worker-{index}.json") for index in range(1, GROUPS - 1)]
        steps = [pairwise(json.loads(path.read_text())) for path in others]
        history = json.loads(Path(folder, "history.json").read_text())
        began = [float(path.read_text()) for path in Path(folder).glob(f"{VICTIM}.*.first")]
    pause = max(after - before for each in steps for before, after in each)
    merges = history[f"merges_of_group_{GROUPS - 1}"][epochs // 2 :]
    return history["val_accuracy"][-1], pause, int(sum(merges)), max(began) - killed_at


if __name__ == "__main__":
    main()
