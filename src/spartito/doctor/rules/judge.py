"""From facts to judgements: what is wrong with the cluster, in plain words, and what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from spartito.doctor.findings import Report
from spartito.doctor.rules.machine import (
    clocks,
    gpus,
    shared_memory,
    sources,
    space,
    threads,
    versions,
)
from spartito.doctor.rules.network import (
    absent_tasks,
    loopbacks,
    names,
    others,
    port_refusals,
    ports,
    refusals,
    silent_tasks,
    slow_pairs,
    strangers,
    ways,
)
from spartito.doctor.rules.verdict import Verdict


def judge(report: Report) -> list[Verdict]:
    """All that is worth saying about ``report``, the worst first."""
    found = [verdict for rule in RULES for verdict in rule(report)]
    order = ["missing", "wrong", "warning", "note"]
    return sorted(found, key=lambda verdict: order.index(verdict.grade))


RULES: tuple[Callable[[Report], Iterator[Verdict]], ...] = (
    absent_tasks,
    silent_tasks,
    others,
    refusals,
    loopbacks,
    names,
    ports,
    port_refusals,
    ways,
    versions,
    clocks,
    slow_pairs,
    shared_memory,
    threads,
    space,
    gpus,
    sources,
    strangers,
)
"""Each looks at one thing."""
