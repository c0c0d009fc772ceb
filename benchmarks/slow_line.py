"""Two machines on a line of 100 Mbit/s: groups that meet now and then, torch DDP on gloo, alone."""

from __future__ import annotations

import statistics

from benchmarks.common import Figure, announce, conclude, parser, positive, progress
from benchmarks.jobs.lines import EVERY
from benchmarks.thin_lines import measure_all

RATE = "100mbit"
BESIDE = ("overlap", "overlap 4bit", "overlap long")
"""Their meetings are exchanged while training goes on."""
MEETING = ("local", "local 8bit", "local 4bit", *BESIDE)
"""A window of these is from one meeting to the next."""
SIDES = (*MEETING, "no meetings", "ddp")
FEW = 5
"""Steps of a window of the others."""
MODELS = {"mlp": "mlp", "cats": "xception"}
TARGETS = {
    ("mlp", "local", "ddp"): 15.0,
    ("mlp", "local 8bit", "ddp"): 15.0,
    ("mlp", "local 4bit", "ddp"): 15.0,
    ("cats", "local", "ddp"): 2.0,
    ("cats", "local 8bit", "ddp"): 2.0,
    ("cats", "local 4bit", "ddp"): 2.0,
    ("cats", "local 8bit", "no meetings"): 0.97,
    ("cats", "local 4bit", "no meetings"): 0.97,
    ("cats", "overlap", "ddp"): 2.0,
    ("cats", "overlap", "no meetings"): 0.97,
    ("cats", "overlap 4bit", "ddp"): 2.0,
    ("cats", "overlap 4bit", "no meetings"): 0.97,
}
"""How many times the examples per second of the second side."""
MOST_HELD = 2.0
"""Percent of the time by which meetings in the background hold up the training."""
HIDDEN = (("mlp", "overlap long"), ("cats", "overlap"), ("cats", "overlap 4bit"))
"""Where the exchange takes less time than the updates beside it."""


def main() -> None:
    """Print milliseconds of a step, and how much more groups do."""
    assert __doc__ is not None
    options = parser(__doc__, rounds=1)
    options.add_argument("--model", choices=tuple(MODELS), default="mlp", help="what is trained")
    options.add_argument("--side", choices=SIDES, action="append", help="of these only")
    options.add_argument("--windows", type=positive, default=1, help="windows of a turn")
    given = options.parse_args()
    here, sides = announce(__doc__), tuple(given.side or SIDES)
    found: dict[str, list[float]] = {side: [] for side in sides}
    held: dict[str, list[float]] = {side: [] for side in sides}
    waited: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(given.rounds):
        for side in sides if number % 2 == 0 else reversed(sides):
            steps = EVERY if side in MEETING else FEW
            one = measure_all(side, MODELS[given.model], RATE, given.windows, steps)
            found[side] += one["seconds"]
            held[side].append(one["held"] * 100)
            waited[side].append(one["waited"] * 100)
        now = {side: statistics.median(values) * 1e3 for side, values in found.items()}
        progress(number, given.rounds, now, f"ms a step, {given.model}")
    median = {side: statistics.median(values) for side, values in found.items()}
    figures = [Figure(side, median[side] * 1e3, measure="ms a step") for side in sides]
    figures += [
        Figure(
            f"{side}, at meetings",
            statistics.median(held[side]),
            MOST_HELD if (given.model, side) in HIDDEN else None,
            "<=",
            "% of the time",
        )
        for side in sides
        if side in MEETING
    ]
    figures += [
        Figure(f"{side}, of it for the exchange", statistics.median(values), measure="%")
        for side, values in waited.items()
        if side in MEETING
    ]
    figures += [
        Figure(f"{ours} / {theirs}, examples/s", median[theirs] / median[ours], target)
        for (model, ours, theirs), target in TARGETS.items()
        if model == given.model and {ours, theirs} <= set(sides)
    ]
    conclude(here, figures, given.json, seconds=found)


if __name__ == "__main__":
    main()
