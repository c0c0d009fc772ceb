"""Predictions beside what a comparison has measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from spartito.errors import UserError
from spartito.launch.lines.line import Link
from spartito.names import aligned, size
from spartito.planning.cluster import Cluster
from spartito.planning.costs.parts import Situation
from spartito.planning.profile import Profile
from spartito.planning.search import predict

if TYPE_CHECKING:
    from spartito.comparison.report.results import Figures

HEADS = (
    "strategy", "workers", "batch", "predicted/s", "measured/s", "error", "predicted memory",
    "measured",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Row:
    """One run of a comparison.

    Attributes:
        strategy: As the comparison calls it.
        workers: That trained.
        batch: The global batch size.
        predicted: Examples a second.
        measured: The same.
        memory: Bytes that were predicted for the largest task.
        peak: Bytes that it had; None where nobody looked.
    """

    strategy: str
    workers: int
    batch: int
    predicted: float
    measured: float
    memory: float
    peak: int | None

    @property
    def error(self) -> float:
        """By what part the prediction is more than what was measured."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True, slots=True)
class Checked:
    """All runs that were predicted, and why others were not."""

    rows: Sequence[Row]
    left_out: Sequence[str]

    @property
    def error(self) -> float:
        """The median of the errors' sizes."""
        return median(abs(row.error) for row in self.rows)

    @property
    def factor(self) -> float:
        """How many times as fast the machine was in the comparison as predicted, in the median."""
        return median(row.measured / row.predicted for row in self.rows)

    @property
    def error_beside_it(self) -> float:
        """The median error of how strategies compare: without what they all have in common."""
        return median(abs(row.predicted * self.factor / row.measured - 1) for row in self.rows)

    @property
    def chose(self) -> tuple[str, str, float]:
        """The fastest by prediction, the fastest by measurement, and what the first one loses."""
        by_plan = max(self.rows, key=lambda row: row.predicted)
        best = max(self.rows, key=lambda row: row.measured)
        return by_plan.strategy, best.strategy, 1 - by_plan.measured / best.measured

    def record(self) -> dict[str, Any]:
        """As JSON has it."""
        chosen, best, lost = self.chose
        return {
            "median_error": self.error,
            "common_factor": self.factor,
            "median_error_beside_it": self.error_beside_it,
            "predicted_best": chosen,
            "measured_best": best,
            "lost_by_choice": lost,
            "runs": [
                {
                    "strategy": row.strategy,
                    "workers": row.workers,
                    "batch_size": row.batch,
                    "predicted": row.predicted,
                    "measured": row.measured,
                    "error": row.error,
                    "memory_predicted": row.memory,
                    "memory_measured": row.peak,
                }
                for row in self.rows
            ],
            "left_out": list(self.left_out),
        }

    def __str__(self) -> str:
        """Lines for a terminal."""
        cells = [
            (
                row.strategy, str(row.workers), str(row.batch), f"{row.predicted:,.0f}",
                f"{row.measured:,.0f}", f"{row.error:+.0%}", size(row.memory),
                "-" if row.peak is None else size(row.peak),
            )
            for row in sorted(self.rows, key=lambda row: -row.measured)
        ]  # fmt: skip
        lines = aligned([HEADS, *cells], right=range(1, len(HEADS)))
        chosen, best, lost = self.chose
        lines += [f"left out: {why}" for why in self.left_out]
        lines.append(f"median error {self.error:.0%} of {len(self.rows)} runs")
        lines.append(
            f"all runs had {self.factor:.2f} times the predicted speed in the median; beside "
            f"that the median error is {self.error_beside_it:.0%}"
        )
        lines.append(
            f"{chosen} is the fastest by prediction and by measurement"
            if chosen == best
            else f"{chosen} is the fastest by prediction, {best} by measurement: "
            f"the choice loses {lost:.0%}"
        )
        return "\n".join(lines)


def check(folder: Path, profile: Profile, cluster: Cluster) -> Checked:
    """Predict every run of a comparison that ended well.

    Args:
        folder: With its ``compare.json``, or that file.
        profile: Of what it trained.
        cluster: The machine, as for a plan.

    Returns:
        Predictions beside measurements.

    Raises:
        UserError: It compared something else, or nothing of it can be predicted.
    """
    from spartito.comparison.report.results import comparison, read_comparison

    record = read_comparison(folder.parent if folder.is_file() else folder)
    try:
        found = comparison(record)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"--check {folder} is no comparison: {error!r}",
            "Name the folder that --out of spartito compare named.",
        ) from error
    if found.target != profile.target:
        raise UserError(
            f"--check {folder} compared {found.target}, and the profile is of {profile.target}",
            "Compare what was profiled.",
        )
    line = Link.read(record["line"]) if record.get("line") else None
    if found.link and line is None:
        raise UserError(
            f"--check {folder}: an earlier version compared it on a line of {found.link}",
            "Compare again.",
        )
    rows, left_out = [], []
    for run in found.all_runs:
        if not run.is_done or run.rate is None:
            left_out.append(f"{run.title}: it did not end well")
            continue
        if run.asked_threads is not None:
            left_out.append(f"{run.title}: its tasks had another number of threads")
            continue
        try:
            own = _machines_of(run, line, cluster)
            situation = Situation(profile, own, run.batch_size or profile.batch_size)
            choice = predict(run.strategy, situation)
        except UserError as error:
            left_out.append(str(error).split("\n")[0])
            continue
        cost = choice.cost
        rows.append(
            Row(
                run.title, run.workers, situation.batch, cost.rate, run.rate, cost.bytes,
                run.peak_memory,
            )
        )  # fmt: skip
    if not rows:
        why = "; ".join(left_out) or "it has no runs"
        raise UserError(f"--check {folder}: nothing of it can be predicted ({why})", "")
    return Checked(rows, left_out)


def _machines_of(run: Figures, link: Link | None, here: Cluster) -> Cluster:
    """What a run had of this machine: all of it, or a namespace for each task at such a line.

    A task that runs a part of the time is on a machine of that speed. Of several kinds of machines
    the first one is this.
    """
    if link is None:
        if run.slow:
            raise UserError(
                f"{run.title}: a plan knows tasks of different speed on machines of their own",
                "Compare with --link.",
            )
        return replace(here, workers=run.workers, ps=max(1, run.ps))
    kind = here.kinds[0]
    speeds = [run.slow.get(f"worker {index}", 1.0) for index in range(run.workers)]
    if len(run.slow) > sum(speed < 1 for speed in speeds):
        raise UserError(f"{run.title}: a plan knows no servers that are slow", "")
    kinds = [replace(kind, count=speeds.count(speed), speed=speed) for speed in sorted({*speeds})]
    return Cluster(tuple(kinds), 1, link, max(1, run.ps), shared=True)
