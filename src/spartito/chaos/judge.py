"""What a job must do after a fault, and whether it did: pure functions of what was seen."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from spartito.chaos.schedule import Fault, Schedule
from spartito.chaos.traces import Step, curve, pause_after, repeated
from spartito.chaos.trial import Outcome
from spartito.errors import EXIT_TASK_LOST

GOES_ON = frozenset({"pause", "slow", "clock", "disk", "corrupt", "nan", "loss", "partition"})
"""Faults after which a job ends as if nothing had been."""

KILLS = frozenset({"kill", "term", "torn"})
CLOSE = 0.2
"""How far the last loss may be from the one without the fault, where the order of updates differs:
as a fraction of it."""
REPLACED = 30.0
"""Seconds in which a replacement of a task takes part, on a machine without other work."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What of a job decides about its promises.

    Args:
        strategy: its name.
        asynchronous: whether its curve depends on time.
        served: whether parameter servers hold the values, so that tasks are started again.
        recovers: whether the others wait for a replacement of a worker, or of the chief.
        limit: seconds in which a task that stands still is named.
        slack: seconds that it may take longer than promised, as on a machine with other work.
    """

    strategy: str
    asynchronous: bool = False
    served: bool = False
    recovers: bool = False
    limit: float = 10.0
    slack: float = 0.0


@dataclass(frozen=True, slots=True)
class Promise:
    """How a job must end after a fault.

    Args:
        codes: the exit codes that are right; after one that is not 0 the job is started again,
            and must then end with 0.
        named: whether it must say which task it was.
        within: seconds from the fault until all step again, or until it has ended.
        exact: whether every step has the loss that it has without the fault.
        figures: whether the figures of the last epoch are compared at all.
    """

    codes: frozenset[int]
    named: bool = True
    within: float = 10.0
    exact: bool = True
    figures: bool = True


def promise_of(fault: Fault, setup: Setup) -> Promise:
    """What the job promises for this fault.

    Args:
        fault: what happened.
        setup: to which job.

    Returns:
        It.
    """
    kind, exact = fault.kind, not setup.asynchronous
    slow = 3 * setup.limit + 10 + (REPLACED if setup.recovers else 0.0)
    if fault.task == "launcher":
        codes = {"kill": {-9}, "term": {143, 75}, "pause": {0}}[kind]
        return Promise(frozenset(codes), named=False, exact=exact)
    if kind in GOES_ON:
        same = kind not in ("corrupt", "nan")
        return Promise(frozenset({0}), named=False, within=slow, exact=exact and same, figures=same)
    chief = fault.task == "chief:0"
    goes_on = fault.role == "evaluator" or setup.recovers or (setup.served and not chief)
    if kind in KILLS:
        if goes_on:
            return Promise(frozenset({0, 75} if kind == "term" else {0}), within=15.0, exact=exact)
        lost = {EXIT_TASK_LOST, 75} if kind == "term" else {EXIT_TASK_LOST}
        return Promise(frozenset(lost), exact=exact)
    if kind == "exception":
        return Promise(frozenset({1}), exact=exact)
    if kind == "memory":  # it may have all that it needs already
        return Promise(frozenset({0, 1, EXIT_TASK_LOST}), named=False, within=slow, exact=exact)
    if setup.recovers and not setup.served:  # it is replaced
        return Promise(frozenset({0}), within=slow, exact=exact)
    if goes_on:  # its work is done by others, in the end without it
        return Promise(frozenset({0, EXIT_TASK_LOST}), within=slow, exact=exact)
    return Promise(frozenset({EXIT_TASK_LOST}), within=setup.limit + 10, exact=exact)


@dataclass(frozen=True, slots=True)
class Record:
    """What the runs of one cell left.

    Args:
        outcomes: how they ended, the one with the faults first.
        history: the lines of the run folder's history.
        applied: how many pushes each server applied, by its own count.
    """

    outcomes: Sequence[Outcome]
    history: Sequence[Mapping[str, Any]]
    applied: Mapping[str, int] = field(default_factory=dict)

    @property
    def code(self) -> int | None:
        """The exit code of the first run, which had the faults."""
        return self.outcomes[0].code

    def steps(self) -> list[Step]:
        """The steps of the task that decides, over all runs in turn."""
        found: list[Step] = []
        for outcome in self.outcomes:
            told = (outcome.traces.get(task, []) for task in ("chief:0", "worker:0"))
            found += next((steps for steps in told if steps), [])  # a chief may make no steps
        return found

    def curve(self) -> dict[int, str]:
        """The loss of each step; of one that the deciding task did not live to end, another's."""
        others = (steps for outcome in self.outcomes for steps in outcome.traces.values())
        return {n: loss for steps in others for n, loss in curve(steps).items()} | curve(
            self.steps()
        )


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of one cell.

    Args:
        broken: what was promised and not kept, each as a sentence; empty when all is well.
        code: how the run with the faults ended.
        seconds: from the fault until all stepped again, or until it had ended.
        restarts: how often it had to be started again by hand.
        repeated: steps that were done again.
        lost: steps that nobody did; with servers, updates that one of them lacks in the end.
        doubled: updates that a server has applied twice.
        difference: of the last loss to that of the run without the fault; NaN if unknown.
    """

    broken: tuple[str, ...]
    code: int | None
    seconds: float
    restarts: int
    repeated: int
    lost: int
    doubled: int
    difference: float


@dataclass
class _Findings:
    broken: list[str] = field(default_factory=list)

    def must(self, holds: bool, otherwise: str) -> None:
        """Note what is wrong."""
        if not holds:
            self.broken.append(otherwise)


def judge(schedule: Schedule, setup: Setup, reference: Record, record: Record) -> Verdict:
    """Whether a job kept what it promises.

    Args:
        schedule: what happened to it.
        setup: what it is.
        reference: a run without faults.
        record: the run with them, and those that went on from it.

    Returns:
        What came of it.
    """
    first, found = record.outcomes[0], _Findings()
    promises = [promise_of(fault, setup) for fault in schedule]
    found.must(
        len(first.fired) == len(schedule), "the fault did not happen: the job ended before it"
    )
    codes = frozenset[int]().union(*(promise.codes for promise in promises))
    if first.code is None:
        found.must(False, f"it hung: no end within {first.seconds:.0f} s")
    else:
        wanted = " or ".join(map(str, sorted(codes)))
        found.must(first.code in codes, f"exit code {first.code} instead of {wanted}")
    for fault, promise in zip(schedule, promises, strict=True):
        named = fault.title in _said(first.text)
        found.must(not promise.named or first.code in (0, None) or named, f"{fault.title} unnamed")
    for number, outcome in enumerate(record.outcomes):
        which = "it" if number == 0 else "the run that goes on"
        found.must(not outcome.left, f"{which} left {', '.join(outcome.left)}")
    found.must(record.outcomes[-1].code == 0, f"started again: {_last_words(record.outcomes[-1])}")
    seconds = _seconds(first)
    within = max(promise.within for promise in promises) + setup.slack
    found.must(
        not seconds > within or first.code is None,
        f"{seconds:.1f} s until it was over, {within:g} are promised",
    )
    exact = all(promise.exact for promise in promises)
    figures = all(promise.figures for promise in promises)
    found.broken += _curve(reference, record) if exact else []
    found.broken += _history(reference.history, record.history, exact, figures)
    steps = record.steps()
    missing = set(reference.curve()) - set(record.curve())
    lacks, doubled = _updates(reference, record)
    found.must(not lacks, f"{lacks} updates were lost")
    found.must(not doubled, f"{doubled} updates were applied twice")
    return Verdict(
        tuple(found.broken),
        first.code,
        seconds,
        len(record.outcomes) - 1,
        repeated(steps),
        lacks if setup.asynchronous else len(missing),
        doubled,
        _difference(reference.history, record.history),
    )


def _said(text: str) -> str:
    """The lines of ours in what a job printed."""
    return "\n".join(line for line in text.splitlines() if "spartito: " in line)


def _last_words(outcome: Outcome) -> str:
    lines = [line for line in outcome.text.splitlines() if line.strip()]
    return f"exit code {outcome.code}, {' | '.join(lines[-2:])[-300:]}"


def _seconds(first: Outcome) -> float:
    """From the last fault until all stepped again, or until the job had ended."""
    if not first.fired:
        return math.nan
    at = first.fired[-1]
    again = pause_after(first.traces, at) if first.code == 0 else None
    return again if again is not None else first.ended - at


def _curve(reference: Record, record: Record) -> list[str]:
    """Where the losses of steps differ from those without the fault."""
    wanted, found = reference.curve(), record.curve()
    wrong = [n for n, loss in wanted.items() if found.get(n, loss) != loss]
    missing = sorted(set(wanted) - set(found))
    said = []
    if wrong:
        first = min(wrong)
        was, should = float.fromhex(found[first]), float.fromhex(wanted[first])
        said.append(f"{len(wrong)} losses differ, first of step {first}: {was!r}, not {should!r}")
    if missing:
        said.append(f"{len(missing)} steps were never done, first {missing[0]}")
    return said


def _updates(reference: Record, record: Record) -> tuple[int, int]:
    """How many updates the servers lack, and have twice; 0 where the job began anew by hand."""
    if len(record.outcomes) > 1:
        return 0, 0
    found, wanted = record.applied, reference.applied
    if found.keys() != wanted.keys():  # a copy has taken over, and each has all
        found, wanted = ({"": max(counts.values(), default=0)} for counts in (found, wanted))
    more = [found.get(name, 0) - count for name, count in wanted.items()]
    return -min([0, *more]), max([0, *more])


def _history(
    reference: Sequence[Mapping[str, Any]],
    found: Sequence[Mapping[str, Any]],
    exact: bool,
    figures: bool,
) -> list[str]:
    """Whether the history has every epoch once, with the figures that it should have."""
    said = []
    wanted, epochs = ([line["epoch"] for line in lines] for lines in (reference, found))
    if epochs != wanted:
        return [f"the history has the epochs {epochs}, not {wanted}"]
    for was, should in zip(found, reference, strict=True):
        names = [name for name in should if name.endswith(("loss", "accuracy")) or name == "step"]
        wrong = [name for name in names if was.get(name) != should[name]]
        if exact and figures and wrong:
            values = json.dumps([was.get(wrong[0]), should[wrong[0]]])
            said.append(f"epoch {should['epoch']} of the history: {wrong[0]} is {values}")
    off = _difference(reference, found)
    if reference and found[-1]["loss"] is None:
        said.append("the last loss is not a number")
    elif figures and not exact and reference and abs(off) > CLOSE * abs(reference[-1]["loss"]):
        said.append(f"the last loss is off by {off:+.4f}")
    return said


def _difference(
    reference: Sequence[Mapping[str, Any]], found: Sequence[Mapping[str, Any]]
) -> float:
    if not reference or not found:
        return math.nan
    was, should = found[-1]["loss"], reference[-1]["loss"]  # NaN is written as null
    return math.nan if was is None or should is None else float(was) - float(should)
