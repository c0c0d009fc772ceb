"""All rules, and what they say of some findings."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

from spartito.doctor.findings import Findings
from spartito.doctor.rules import lines, machine, network
from spartito.doctor.rules.verdict import Severity, Verdict, Verdicts

RULES: tuple[Callable[[Findings], Verdicts], ...] = (
    network.missing_tasks,
    network.unresponsive_tasks,
    network.secrets,
    network.other_tasks,
    network.refused_tasks,
    network.loopback_addresses,
    network.names,
    network.ports,
    network.port_refusals,
    network.connections,
    machine.versions,
    machine.clocks,
    network.stuck_pairs,
    network.slow_pairs,
    network.unmeasured_pairs,
    lines.thin_lines,
    machine.shared_memory,
    machine.threads,
    machine.memory,
    machine.disks,
    machine.gpus,
    machine.sources,
    network.unknown_peers,
)
"""Each looks at one thing."""


def judge(findings: Findings) -> list[Verdict]:
    """All that is worth saying about ``findings``, the worst first."""
    found = [verdict for rule in RULES for verdict in rule(findings)]
    return sorted(found, key=lambda verdict: get_args(Severity).index(verdict.severity))
