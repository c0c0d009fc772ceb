"""Where the time of a step goes: own CPU time of each part of `fit`, beside plain torch."""

from __future__ import annotations

from benchmarks.common import announce, parser, positive
from benchmarks.jobs.step_parts import SIDES
from benchmarks.launching import run_job
from benchmarks.race import WORKERS


def main() -> None:
    """Print a table of microseconds per step: of rank 0, where there are two."""
    assert __doc__ is not None
    options = parser(__doc__, rounds=1)
    options.add_argument("--steps", type=positive, default=1000)
    given = options.parse_args()
    announce(__doc__)
    columns: dict[str, dict[str, float]] = {}
    for side in SIDES:
        program = ["-m", "benchmarks.jobs.step_parts", side, f"--steps={given.steps}"]
        columns[side] = run_job(program, workers=1 if side == "one device" else WORKERS)
        del columns[side]["pushes"]
    rows = dict.fromkeys(part for found in columns.values() for part in found)
    print(f"\n{'us of a core, per step':<40}" + "".join(f"{side:>17}" for side in columns))
    for part in rows:
        shown = "".join(f"{found.get(part, 0.0):17.0f}" for found in columns.values())
        print(f"{part:<40}{shown}")
    print(f"{'sum':<40}" + "".join(f"{sum(found.values()):17.0f}" for found in columns.values()))


if __name__ == "__main__":
    main()
