"""Milliseconds of a step whose sums leave beside backward, at its end, or as its updates find out.

    python -m benchmarks.beside_backward [--only deep-loopback] [--rounds 3]

Two machines of one worker each, which are namespaces on this one: what sockets compute is taken
from the cores that compute the model, unless a line is so slow that they wait for it.
"""

from __future__ import annotations

import statistics

from benchmarks.common import Figure, announce, conclude, parser, positive
from benchmarks.thin_lines import in_turns

CASES = {
    "deep-loopback": ("deep", "", 60),
    "deep-1gbit": ("deep", "1gbit", 40),
    "deep-100mbit": ("deep", "100mbit", 20),
    "wide-loopback": ("wide", "", 20),
}
"""Model, rate of the line or none, steps of a window: the first one sees the trial."""

SIDES = ("at the end", "beside", "exact", "ddp")
"""Two ways of ours, what is taken of them unless an option says which, and torch's."""


def main() -> None:
    """Print the milliseconds, and how far what was found out is from the better way."""
    assert __doc__ is not None
    options = parser(__doc__, rounds=2)
    options.add_argument("--only", choices=tuple(CASES), action="append", help="of these only")
    options.add_argument("--side", choices=SIDES, action="append", help="of these only")
    options.add_argument("--windows", type=positive, default=4, help="windows of a turn")
    given = options.parse_args()
    here = announce(__doc__)
    figures: list[Figure] = []
    seconds: dict[str, dict[str, list[float]]] = {}
    for case in given.only or CASES:
        sides = tuple(given.side or SIDES)
        found = seconds[case] = in_turns(given, case, sides, CASES[case])
        median = {side: statistics.median(values) for side, values in found.items()}
        figures += [Figure(f"{case}: {s}", median[s] * 1e3, measure="ms") for s in sides]
        if set(SIDES) <= set(sides):
            better = min(median["at the end"], median["beside"])
            figures.append(Figure(f"{case}: the better way / found out", better / median["exact"]))
            figures.append(Figure(f"{case}: found out / ddp", median["ddp"] / median["exact"], 1.0))
    conclude(here, figures, given.json, seconds=seconds)


if __name__ == "__main__":
    main()
