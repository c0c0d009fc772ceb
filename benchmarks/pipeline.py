"""A pipeline of two stages against its schedule's own bound, and torch's own pipelining.

The bound is that of the textbook, of one process's time. Beside it stands that of the step's own
actions, each as long as it took: what is missing there is waits and messages, and what is between
the two is stages that differ and backward passes in halves, which read activations twice.
"""

from __future__ import annotations

import statistics

from benchmarks.common import Figure, announce, conclude, parser, progress
from benchmarks.launching import run_job
from spartito.wire.ports import free_port

STAGES, MICROBATCHES, WINDOWS = 2, 8, 4


def main() -> None:
    """Print the efficiency of each schedule: one process / stages / (1 - bubble) / measured."""
    assert __doc__ is not None
    options = parser(__doc__, rounds=2)
    options.add_argument("--schedules", nargs="+", default=["1f1b", "zero_bubble"], metavar="NAME")
    given = options.parse_args()
    here = announce(__doc__)
    found: dict[str, dict[str, list[float]]] = {}
    for number in range(given.rounds):
        for name in given.schedules:
            told = run_job(
                [
                    *("-m", "benchmarks.jobs.pipelines", name, f"--port={free_port()}"),
                    *(f"--windows={WINDOWS}", f"--microbatches={MICROBATCHES}"),
                ],
                workers=STAGES,
            )
            kept = found.setdefault(name, {"bound": [told.pop("bound")], "actions": [], "busy": []})
            kept["actions"].append(told.pop("actions"))
            kept["busy"].append(told.pop("busy"))
            for side, seconds in told.items():
                kept.setdefault(side, []).extend(seconds)
        progress(
            number, given.rounds, {n: _efficiency(f) for n, f in found.items()}, "of the bound"
        )
    figures = []
    for name, sides in found.items():
        for side in sides:
            if side not in ("bound", "actions", "busy"):
                milliseconds = statistics.median(sides[side]) * 1e3
                figures.append(Figure(f"{name}: {side}", milliseconds, measure="ms"))
        figures.append(Figure(f"{name}: efficiency against its bound", _efficiency(sides), 0.9))
        ours, alone, actions, busy = (
            statistics.median(sides[side])
            for side in ("pipeline", "one process", "actions", "busy")
        )
        figures.append(Figure(f"{name}: against the bound of its actions", actions / ours, 0.9))
        figures.append(Figure(f"{name}: computing / half of one process", busy * STAGES / alone))
        if "torch" in sides:
            times = statistics.median(sides["torch"]) / statistics.median(sides["pipeline"])
            figures.append(Figure(f"{name}: torch's own pipelining / pipeline", times, 1.0))
    conclude(here, figures, given.json, seconds=found)


def _efficiency(sides: dict[str, list[float]]) -> float:
    alone, ours = (statistics.median(sides[side]) for side in ("one process", "pipeline"))
    return alone / STAGES / (1 - sides["bound"][0]) / ours


if __name__ == "__main__":
    main()
