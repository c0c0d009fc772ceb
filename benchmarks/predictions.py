"""What `spartito plan` says of ten trainings, beside what `spartito compare` measures of them.

    python -m benchmarks.predictions [--models mlp deep] [--workers 2 4] [--out DIR]
    python -m benchmarks.predictions --links 10gbit 1gbit 100mbit --slow 0.25

Each model is profiled once. Then it is trained under each strategy with so many workers, one run
after the other, and every run is predicted. With ``--links`` each task is on a machine of its own
at such a line, a network namespace; with ``--slow`` the last worker runs a part of the time there.
Five models were looked at while the plan was written, five were not. Profiles and comparisons stay
in DIR, and are not made again if they are there.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.common import Figure, Others, announce, conclude, parser, positive
from benchmarks.jobs import predicted
from spartito.comparison.report.results import COMPARISON
from spartito.declared import parse
from spartito.launch.job import Program
from spartito.launch.lines.line import Link
from spartito.planning.check import Checked, Row, check
from spartito.planning.cluster import Cluster, Kind
from spartito.planning.costs.parts import Situation
from spartito.planning.measure import crowds_of, take_profile
from spartito.planning.profile import Profile
from spartito.planning.search import predict
from spartito.system.capacity import available_cores

SCRIPT = Path(predicted.__file__)
ONE = "one_device, mirrored, parameter_server"
"""What one worker is trained under, ..."""
ON_LINES = (
    "multi_worker_mirrored, sharded(zero=1), sharded(zero=3), mesh, pipeline, "
    "local_sgd(every=20), parameter_server"
)
"""... several at lines, ..."""
STRATEGIES = f"mirrored, central_storage, {ON_LINES}"
"""... and several on one machine."""
NOISE = 0.05
"""A choice that loses less than this is as good as the best."""
EPOCH, LEAST = 2.5, 4
"""Seconds of an epoch on a line, about, and its steps at least."""


@dataclass(frozen=True, slots=True)
class Setting:
    """With how many workers a model is trained, and where."""

    workers: int
    link: str = ""
    slow: float = 1.0

    @property
    def name(self) -> str:
        """As its folder is called, behind the model's name."""
        last = f"slow{self.slow:g}" if self.slow < 1 else ""
        return "-".join(filter(None, [str(self.workers), self.link, last]))

    @property
    def words(self) -> list[str]:
        """For `spartito compare`."""
        strategies = ON_LINES if self.link else STRATEGIES if self.workers > 1 else ONE
        if self.workers % 2:
            strategies = strategies.replace("every=20", f"every=20, groups={self.workers}")
        found = ["--strategies", strategies, "--workers", str(self.workers), "--ps", "1"]
        found += ["--link", self.link] if self.link else []
        return found + ([f"--slow=worker:{self.workers - 1}={self.slow}"] if self.slow < 1 else [])

    @property
    def spoken(self) -> str:
        """As a table says it."""
        where = f" at {Link.read(self.link).spoken}" if self.link else ""
        late = f", one at {self.slow:.0%}" if self.slow < 1 else ""
        return f"{self.workers}{where}{late}"


@dataclass(frozen=True, slots=True)
class Case:
    """A model in a setting."""

    model: str
    setting: Setting
    checked: Checked


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and say by how much the predictions are off."""
    made = parser(__doc__ or "", rounds=1)
    every = [*predicted.BUILT, *predicted.NEW]
    made.add_argument("--models", nargs="+", choices=every, default=every, metavar="NAME")
    made.add_argument("--workers", nargs="+", type=positive, default=[2], metavar="N")
    made.add_argument("--links", nargs="+", default=[""], metavar="RATE", help="lines, not memory")
    made.add_argument("--slow", type=float, default=1.0, metavar="PART", help="of the last worker")
    made.add_argument("--out", type=Path, help="keep profiles and comparisons here")
    asked = made.parse_args(arguments)
    here = announce("Predictions of a plan beside a comparison")
    others, cases = Others(), []
    with tempfile.TemporaryDirectory() as scratch:
        folder = asked.out or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        for model in asked.models:
            profile = _profile(folder, model)
            for setting in _settings(asked.workers, asked.links, asked.slow):
                _compare(folder, model, setting, profile, asked.rounds)
                cases.append(Case(model, setting, _checked(folder, model, setting, profile)))
                print(f"{model}, workers: {setting.spoken}\n{cases[-1].checked}\n", flush=True)
    print(f"others kept {others.cores:.2f} cores busy\n")
    print(_table(cases))
    conclude(here, _figures(cases), asked.json, cases=_record(cases))


def _settings(workers: Sequence[int], links: Sequence[str], slow: float) -> Iterator[Setting]:
    for count in workers:
        for link in links:
            yield Setting(count, link, slow if link else 1.0)


def _profile(folder: Path, model: str) -> Profile:
    file = folder / f"{model}.json"
    if not file.exists():
        file.write_text(_taken(model).text())
    return Profile.read(file)


def _taken(model: str) -> Profile:
    cores = available_cores()
    crowds = crowds_of(2 * cores, cores)
    return take_profile(Program(str(SCRIPT), (model,)), crowds=crowds)


def _compare(folder: Path, model: str, setting: Setting, profile: Profile, repeat: int) -> None:
    out = folder / f"{model}-{setting.name}"
    if (out / COMPARISON).exists():
        return
    words = [*setting.words, "--repeat", str(repeat), "--out", str(out)]
    command = [sys.executable, "-m", "spartito", "compare", str(SCRIPT), *words, "--", model]
    command += [str(_examples(setting, profile))] if setting.link else []
    ended = subprocess.run(command, stdout=subprocess.DEVNULL)
    # A strategy that cannot train it, as three stages of two layers, ends it with 1.
    if not (out / COMPARISON).exists():
        sys.exit(ended.returncode)


def _examples(setting: Setting, profile: Profile) -> int:
    """So many that an epoch does not take minutes: most of a step may be the line's."""
    kinds = (_kind(profile, setting.workers),)
    slow = Cluster(kinds, 1, Link.read(setting.link), shared=True)
    situation = Situation(profile, slow, profile.batch_size)
    step = predict(parse("multi_worker_mirrored"), situation).cost.step / setting.slow
    return max(LEAST, round(EPOCH / step)) * profile.batch_size


def _checked(folder: Path, model: str, setting: Setting, profile: Profile) -> Checked:
    out = folder / f"{model}-{setting.name}"
    _, *examples = json.loads((out / COMPARISON).read_text())["arguments"]
    if examples and profile.steps_per_epoch:
        steps = -(-int(examples[0]) // profile.batch_size)
        profile = replace(profile, steps_per_epoch=min(steps, profile.steps_per_epoch))
    return check(out, profile, Cluster((_kind(profile, 1),), setting.workers))


def _kind(profile: Profile, count: int) -> Kind:
    return Kind("this machine", count, profile.machine.cores, profile.machine.memory)


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
            f"| {case.model} | {case.setting.spoken} | {found.error:.0%} "
            f"| {found.error_beside_it:.0%} (of {found.factor:.2f}) | {loses} |"
        )
    return "\n".join(lines)


def _record(cases: Sequence[Case]) -> dict[str, Any]:
    return {f"{case.model}-{case.setting.name}": case.checked.record() for case in cases}


if __name__ == "__main__":
    main()
