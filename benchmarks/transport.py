"""Push + fused Adam + pull of 1, 11 and 100 MB, 1 and 2 workers: ours against bare prototypes."""

from __future__ import annotations

import statistics

from benchmarks.common import Figure, Windows, announce, conclude, parser, positive
from benchmarks.launching import run_job

REPEATS = {1: 200, 11: 30, 100: 4}
"""MB of float32 parameters, and how many exchanges make a window."""
WORKERS = (1, 2)
WAYS = ("shared memory", "TCP")
TARGETED = (11, 1)
TARGET = 1.3
LIMIT = 300.0


def main() -> None:
    """Print milliseconds of each side, and how many times the prototype's ours takes."""
    assert __doc__ is not None
    options = parser(__doc__, rounds=2)
    options.add_argument("--windows", type=positive, default=5, help="windows of a turn")
    options.add_argument("--size", type=int, choices=tuple(REPEATS), help="MB, instead of all")
    given = options.parse_args()
    here = announce(__doc__)
    sizes = (given.size,) if given.size else tuple(REPEATS)
    cases = [(size, workers) for size in sizes for workers in WORKERS]
    windows: dict[tuple[int, int], Windows] = {case: {} for case in cases}
    for number in range(given.rounds):
        for case in cases:
            for side, seconds in turn(*case, given.windows).items():
                windows[case].setdefault(side, []).extend(seconds)
        print(f"round {number + 1}/{given.rounds} is done", flush=True)
    medians = {
        case: {side: 1000 * statistics.median(seconds) for side, seconds in found.items()}
        for case, found in windows.items()
    }
    table(medians)
    figures = [figure for case in cases for figure in compare(case, medians[case])]
    conclude(
        here,
        figures,
        given.json,
        seconds={name(*case): found for case, found in windows.items()},
    )


def turn(size: int, workers: int, windows: int) -> Windows:
    """Seconds per exchange of every side; a process more serves."""
    amount = [f"--floats={size << 18}", f"--repeats={REPEATS[size]}", f"--windows={windows}"]
    found: Windows = run_job(
        ["-m", "benchmarks.jobs.exchanges", *amount], workers=workers + 1, limit=LIMIT
    )
    return found


def compare(case: tuple[int, int], milliseconds: dict[str, float]) -> list[Figure]:
    """Ours over the prototype: the exchange alone, and with a model's tensors in and out."""
    figures = []
    for way in WAYS:
        target = TARGET if case == TARGETED else None
        bare, copied, link, model = (
            milliseconds[f"{side}, {way}"] for side in ("prototype", "copied", "link", "model")
        )
        figures += [
            Figure(f"{name(*case)}, {way}: ours / prototype", link / bare, target, "<="),
            Figure(f"{name(*case)}, {way}: with a model's tensors, both", model / copied),
        ]
    return figures


def name(size: int, workers: int) -> str:
    """What a case is called."""
    return f"{size} MB, {workers} worker{'s' if workers > 1 else ''}"


def table(milliseconds: dict[tuple[int, int], dict[str, float]]) -> None:
    """Milliseconds per exchange: a row per side, a column per case."""
    print(f"\n{'ms':<26}" + "".join(f"{name(*case):>20}" for case in milliseconds))
    for side in next(iter(milliseconds.values())):
        row = "".join(f"{found[side]:>20.2f}" for found in milliseconds.values())
        print(f"{side:<26}{row}")


if __name__ == "__main__":
    main()
