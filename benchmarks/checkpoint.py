"""Checkpoints of 1 GB: what a task holds beside its part, how long training is held by a write."""

from __future__ import annotations

import tempfile
from statistics import median

from benchmarks.common import Figure, announce, conclude, parser
from benchmarks.launching import run_job

JOB = ("-m", "benchmarks.jobs.saving")
PARTS = 4


def main() -> None:
    """Print bytes and seconds with their targets."""
    assert __doc__ is not None
    options = parser(__doc__, rounds=4)
    options.add_argument("--folder", help="where they are written; a disk, not a memory")
    given = options.parse_args()
    here = announce(__doc__)
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        held = run_job([*JOB, "memory", folder], workers=PARTS)
        held |= run_job([*JOB, "memory", folder], workers=PARTS)  # processes that go on from it
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        words = [*JOB, "time", folder, f"--saves={given.rounds}"]
        seconds = run_job(words, workers=1)
    tensor = held["tensor"]
    print(
        f"{held['bytes'] / 1e9:.2f} GB in {held['files']} files, tensors of {tensor / 1e6:.0f} MB"
    )
    for name, windows in seconds.items():
        print(f"{name}: first {windows[0]:.2f} s, then {median(windows[1:]):.2f} s (median)")
    write, later = median(seconds["write"][1:]), seconds["held"]
    figures = [
        Figure(
            f"sharded on {PARTS} tasks, {what}: bytes beside the own part / a tensor",
            max(held[what]) / tensor, 1.0, "<=",
        )
        for what in ("saving", "loading")
    ]  # fmt: skip
    figures += [
        Figure("asynchronous: time that training is held / a write", median(later[1:]) / write,
               0.1, "<="),
        Figure("the same for the first one", later[0] / write),
    ]  # fmt: skip
    conclude(here, figures, given.json, seconds=seconds, bytes=held)


if __name__ == "__main__":
    main()
