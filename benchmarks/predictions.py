"""What `spartito plan` says of ten trainings, beside what `spartito compare` measures of them.

    python -m benchmarks.predictions [--models mlp deep] [--workers 2 4] [--out DIR]

Each model is profiled once. Then it is trained under each strategy with so many workers, one run
after the other, and every run is predicted. Five models were looked at while the plan was written,
five were not. Profiles and comparisons stay in DIR, and are not made again if they are there.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import Figure, Others, announce, conclude, parser, positive
from benchmarks.jobs import predicted
from spartito.launch.job import Program
from spartito.planning.check import Checked, Row, check
from spartito.planning.cluster import Cluster, Kind
from spartito.planning.measure import take_profile
from spartito.planning.profile import Profile

SCRIPT = Path(predicted.__file__)
STRATEGIES = (
    "mirrored, multi_worker_mirrored, central_storage, sharded(zero=1), sharded(zero=3), mesh, "
    "pipeline, local_sgd(every=20), parameter_server"
)
NOISE = 0.05
"""A choice that loses less than this is as good as the best."""


@dataclass(frozen=True, slots=True)
class Case:
    """A model with so many workers."""

    model: str
    workers: int
    checked: Checked


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and say by how much the predictions are off."""
    made = parser(__doc__ or "", rounds=1)
    every = [*predicted.BUILT, *predicted.NEW]
    made.add_argument("--models", nargs="+", choices=every, default=every, metavar="NAME")
    made.add_argument("--workers", nargs="+", type=positive, default=[2], metavar="N")
    made.add_argument("--out", type=Path, help="keep profiles and comparisons here")
    asked = made.parse_args(arguments)
    here = announce("Predictions of a plan beside a comparison")
    others, cases = Others(), []
    with tempfile.TemporaryDirectory() as scratch:
        folder = asked.out or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        for model in asked.models:
            profile = _profile(folder, model)
            for workers in asked.workers:
                _compare(folder, model, workers, asked.rounds)
                cases.append(_checked(folder, model, workers, profile))
                print(f"{model}, {workers} workers\n{cases[-1].checked}\n", flush=True)
    print(f"others kept {others.cores:.2f} cores busy\n")
    print(_table(cases))
    conclude(here, _figures(cases), asked.json, cases=_record(cases))


def _profile(folder: Path, model: str) -> Profile:
    file = folder / f"{model}.json"
    if not file.exists():
        file.write_text(take_profile(Program(str(SCRIPT), (model,))).text())
    return Profile.read(file)


def _compare(folder: Path, model: str, workers: int, repeat: int) -> None:
    out = folder / f"{model}-{workers}"
    if (out / "compare.json").exists():
        return
    words = ["--strategies", STRATEGIES, "--workers", str(workers), "--ps", "1"]
    words += ["--repeat", str(repeat), "--out", str(out)]
    command = [sys.executable, "-m", "spartito", "compare", str(SCRIPT), *words, "--", model]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def _checked(folder: Path, model: str, workers: int, profile: Profile) -> Case:
    machine = profile.machine
    here = Cluster((Kind("this machine", 1, machine.cores, machine.memory),), workers)
    return Case(model, workers, check(folder / f"{model}-{workers}", profile, here))


def _rows(cases: Sequence[Case]) -> list[Row]:
    return [row for case in cases for row in case.checked.rows]


def _errors(cases: Sequence[Case]) -> list[float]:
    """Of the time of a step, which is the error of its rate the other way round."""
    return [abs(row.measured / row.predicted - 1) for row in _rows(cases)]


def _figures(cases: Sequence[Case]) -> list[Figure]:
    found = []
    for title, names in (("built", predicted.BUILT), ("new", predicted.NEW)):
        own = [case for case in cases if case.model in names]
        if not own:
            continue
        errors = sorted(_errors(own))
        high = errors[min(len(errors) - 1, int(0.9 * len(errors)))]
        memory = [abs(r.memory / r.peak - 1) for r in _rows(own) if r.peak]
        right = [case.checked.chose[2] <= NOISE for case in own]
        found += [
            Figure(f"{title}: median error of a step", statistics.median(errors), 0.05, "<="),
            Figure(f"{title}: 90th percentile", high, 0.15, "<="),
            Figure(f"{title}: the choice is the best", sum(right) / len(right), 0.95),
            Figure(f"{title}: median error of memory", statistics.median(memory), 0.05, "<="),
        ]
    return found


def _table(cases: Sequence[Case]) -> str:
    lines = ["| model | workers | median error | beside one factor | predicted best loses |"]
    lines.append("|---|---|---|---|---|")
    for case in cases:
        found = case.checked
        chosen, best, lost = found.chose
        loses = "nothing" if chosen == best else f"{lost:.0%} (`{chosen}`, not `{best}`)"
        lines.append(
            f"| {case.model} | {case.workers} | {found.error:.0%} "
            f"| {found.error_beside_it:.0%} (of {found.factor:.2f}) | {loses} |"
        )
    return "\n".join(lines)


def _record(cases: Sequence[Case]) -> dict[str, Any]:
    return {f"{case.model}-{case.workers}": case.checked.record() for case in cases}


if __name__ == "__main__":
    main()
