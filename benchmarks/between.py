"""Operations of the backend "spartito" between machines: two layers, one, and gloo."""

from __future__ import annotations

import statistics

from benchmarks.common import Figure, announce, conclude, parser, positive, progress
from benchmarks.machines import run_on_machines

SIDES = ("one layer", "gloo")


def main() -> None:
    """Print the milliseconds of each side, and how many times faster two layers are."""
    assert __doc__ is not None
    options = parser(__doc__, rounds=1)
    options.add_argument("--rate", default="1gbit", help="of each machine's line, as 100mbit")
    options.add_argument("--machines", type=positive, default=2, help="2 ranks on each")
    options.add_argument("--windows", type=positive, default=3, help="windows of a turn")
    given = options.parse_args()
    here = announce(__doc__)
    seconds: dict[str, dict[str, list[float]]] = {}
    for number in range(given.rounds):
        job = ["-m", "benchmarks.jobs.between", f"--windows={given.windows}"]
        found = run_on_machines(job, machines=given.machines, workers=2, rate=given.rate)
        for name, sides in found.items():
            kept = seconds.setdefault(name, {})
            for side, values in sides.items():
                kept.setdefault(side, []).extend(values)
        progress(number, given.rounds, {name: _times(s, "gloo") for name, s in seconds.items()},
                 "times gloo")  # fmt: skip
    figures = []
    for name, sides in seconds.items():
        figures += [
            Figure(f"{name}: {side}", statistics.median(values) * 1e3, measure="ms")
            for side, values in sides.items()
        ]
        figures += [
            Figure(f"{name}: {side} / two layers", _times(sides, side), 1.0) for side in SIDES
        ]
    conclude(here, figures, given.json, seconds=seconds)


def _times(sides: dict[str, list[float]], side: str) -> float:
    """How many times as long as two layers the side takes."""
    return statistics.median(sides[side]) / statistics.median(sides["two layers"])


if __name__ == "__main__":
    main()
