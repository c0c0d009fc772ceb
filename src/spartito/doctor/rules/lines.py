"""When a line between machines is thin: what an exchange takes on it, and what to do about it."""

from __future__ import annotations

from spartito.doctor.findings import Findings
from spartito.doctor.rules.verdict import Verdict, Verdicts
from spartito.doctor.wording import joined
from spartito.names import duration, size

MEGABYTE = 1e6
SIZES = (1, 10, 100)
"""MB of gradients (4 bytes for each parameter) that the advice speaks of."""
THIN = 2.5e8
"""Bytes per second below which bf16 is worth it: 2 Gbit/s."""
VERY_THIN = 2.5e7
"""Bytes per second below which only far fewer bytes help: 200 Mbit/s."""


def exchange_seconds(nbytes: float, bandwidth: float, machines: int) -> float:
    """Seconds that summing gradients over machines takes, each line being busy both ways.

    Args:
        nbytes: Of the gradients.
        bandwidth: Bytes per second of the slowest line.
        machines: How many take part, 2 or more.
    """
    return 2 * nbytes * (machines - 1) / machines / bandwidth


def compress(bandwidth: float) -> str:
    """The ``compress`` to try on a line of so many bytes per second, "" where none is needed."""
    if bandwidth >= THIN:
        return ""
    return "bf16" if bandwidth >= VERY_THIN else "powersgd"


def thin_lines(findings: Findings) -> Verdicts:
    """The slowest line between machines whose replicas sum gradients over it."""
    facts = findings.facts
    if any(task.startswith("ps ") for task in findings.expected):
        return  # servers send no sums
    if any(fact.process_group for fact in facts.values()):
        return  # nor does `compress` serve those
    between = [
        speed
        for speed in findings.speeds
        if speed.pair not in findings.slow
        and {speed.source, speed.target} <= set(facts)
        and facts[speed.source].machine != facts[speed.target].machine
    ]
    slowest = min(between, key=lambda speed: speed.bandwidth, default=None)
    if slowest is None or not (way := compress(slowest.bandwidth)):
        return
    machines = len({fact.machine for fact in facts.values()})
    took = [exchange_seconds(each * MEGABYTE, slowest.bandwidth, machines) for each in SIZES]
    what = (
        f"the line from {slowest.source} to {slowest.target} carries "
        f"{size(slowest.bandwidth)}/s: to sum gradients of {joined([*map(str, SIZES)])} MB takes "
        f"{joined([duration(seconds) for seconds in took])}"
    )
    advice = (
        "Gradients are summed while backward computes. Where backward takes less time than that, "
        f"try multi_worker_mirrored with compress={way!r}."
    )
    yield Verdict("thin line", "note", what, advice, [slowest.source, slowest.target])
