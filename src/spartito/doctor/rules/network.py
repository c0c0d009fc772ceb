"""Who is not there, and who does not reach whom: what is wrong with the network."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations, permutations

from spartito.doctor.findings import Findings, Outcome, Pair, Probe, slower_than_back
from spartito.doctor.rules.verdict import Severity, Verdict, Verdicts
from spartito.doctor.wording import amount, joined
from spartito.names import duration, plural, size
from spartito.wire.addresses import is_loopback

MEANS = {
    Outcome.UNRESOLVED: "its name does not resolve",
    Outcome.REFUSED: "refused: nobody listens there",
    Outcome.DROPPED: "no reply to the connection: a firewall drops it, or the machine is off",
    Outcome.UNROUTABLE: "no route to it",
    Outcome.SILENT: "it accepts the connection and says nothing: frozen, or another program",
    Outcome.OTHER_PROGRAM: "another program listens there",
    Outcome.OTHER_SECRET: "a task of Spartito that does not know our secret",
    Outcome.CLOSED: "it accepts the connection and closes it at once: a proxy, or another program",
}
"""What came of a connection, in words."""


def missing_tasks(findings: Findings) -> Verdicts:
    """Those that did not come, and what the others find at their addresses."""
    first = findings.coordinator
    for task in findings.missing:
        seen = [probe for probe in findings.probes if probe.target == task]
        if task in findings.unresponsive or _with_other_secret(findings, task)[0]:
            continue
        reached = [probe.source for probe in seen if probe.ok]
        where = f" ({findings.addresses[task]})" if findings.addresses.get(task) else ""
        what = f"{task}{where} did not come within {findings.waited:.2g} s"
        if reached:
            address = findings.addresses.get(first) or "its address"
            what += f"; {joined(reached)} reached it there, so it runs but does not reach {first}"
            advice, tasks = f"Open the port from {task} to {first} at {address}.", [task, first]
        else:
            what += "".join(f"; {line}" for line in _lines(seen))
            advice, tasks = (
                f"Start 'spartito doctor' there too, or fix the address of {task}; "
                "--timeout SECONDS waits longer.",
                [task],
            )
        yield Verdict("missing", "missing", what, advice, tasks)


def unresponsive_tasks(findings: Findings) -> Verdicts:
    """Those that came and then stopped responding."""
    for task in findings.unresponsive:
        seen = [p for p in findings.probes if p.target == task and not p.ok]
        what = f"{task} came, then stopped responding" + "".join(f"; {one}" for one in _lines(seen))
        advice = (
            "Check whether its process is frozen or was killed, or its machine lost the network."
        )
        yield Verdict("unresponsive", "missing", what, advice, [task])


def secrets(findings: Findings) -> Verdicts:
    """Tasks that have another secret."""
    for task in findings.missing:
        where, knows = _with_other_secret(findings, task)
        if where:
            what = (
                f"a task of Spartito at {where} has another secret than {joined(knows)}: it is "
                f"{task}, or belongs to another job"
            )
            advice = (
                "Give all tasks the same SPARTITO_SECRET or SPARTITO_SECRET_FILE, or none; two "
                "jobs need different ports."
            )
            yield Verdict("secret", "error", what, advice, [task, *knows])


def other_tasks(findings: Findings) -> Verdicts:
    """Of a task that is alone, without the coordinator: who else responds to it."""
    for probe in findings.probes:
        if probe.target not in findings.expected:
            if probe.ok:
                what = f"{probe.target} is at {probe.address} and responds to {probe.source}"
            else:
                what = f"{probe.target} is not there; {joined(_lines([probe]))}"
            yield Verdict("other", "note", what, tasks=[probe.target])


def refused_tasks(findings: Findings) -> Verdicts:
    """Tasks that came with another cluster, or a name that another one has."""
    for why in findings.refused:
        advice = "Give every process the same cluster, and a task of its own."
        yield Verdict("refused", "error", why, advice)


def loopback_addresses(findings: Findings) -> Verdicts:
    """Addresses that mean each machine itself, though there are several."""
    own = [task for task in findings.addresses if is_loopback(findings.host(task) or "-")]
    networks = {facts.network for facts in findings.facts.values()}
    several = len(networks) > 1 or len(findings.hosts) > 1
    if own:
        what = f"the address of {joined(own)} is a loopback address ({findings.addresses[own[0]]})"
        if several:
            what += ", but the tasks run on several hosts: on each of them it means that host"
            advice = "Give each task the name or address by which the other hosts reach it."
            yield Verdict("loopback", "error", what, advice, own)
        elif findings.missing:
            what += ": only tasks on the same machine can come"
            advice = "If there are several machines, give addresses that the others reach."
            yield Verdict("loopback", "warning", what, advice, own)
    if not several and not findings.missing:
        return
    for task, facts in findings.facts.items():
        host = findings.host(task)
        means = [a for name in facts.names if name.host == host for a in name.addresses]
        if host and not is_loopback(host) and means and is_loopback(means[0]):
            what = (
                f"{task} finds {means[0]}, a loopback address, for its own name {host}, which is "
                "Debian's default: it listens on all interfaces, so that others reach it"
            )
            advice = f"Take {host} off the line of {means[0]} in its /etc/hosts."
            yield Verdict("loopback", "warning", what, advice, [task])


def names(findings: Findings) -> Verdicts:
    """Hosts whose name does not resolve, and on which tasks."""
    unknown: dict[tuple[str, str], list[str]] = {}
    for task, facts in findings.facts.items():
        for name in facts.names:
            if name.error:
                unknown.setdefault((name.host, name.error), []).append(task)
    for (host, error), tasks in unknown.items():
        what = f"the name {host} does not resolve on {joined(tasks)}: {error}"
        advice = "Correct the name, add it to DNS or /etc/hosts there, or use an address."
        yield Verdict("name", "error", what, advice, tasks)


def ports(findings: Findings) -> Verdicts:
    """Ports that another program has, and addresses that no interface has."""
    called = {target for _, target in findings.needed}
    for task, facts in findings.facts.items():
        port, host = facts.port, findings.host(task)
        if port is None or task not in called:
            continue
        who = port.holder or "another program (only root may see which)"
        what = f"port {port.number} of {task} on {facts.host} is taken by {who}"
        if not port.free and not port.agent:
            if port.last:
                what = f"ports {port.number}-{port.last} on {facts.host} are all taken: {task}"
                what += " would have none to listen on"
            advice = "End that program, or choose a free port."
            yield Verdict("port", "error", what, advice, [task])
        elif port.drawn:
            what += f": training listens on one that the system draws, now {port.drawn}"
            advice = "End that program, or choose another port if a firewall is between the hosts."
            yield Verdict("port", "warning", what, advice, [task])
        if port.foreign and not any(name.error for name in facts.names if name.host == host):
            what = (
                f"no interface of {task} has the address {host} (a service name, or translated): "
                "it listens on all interfaces"
            )
            yield Verdict("foreign address", "note", what, tasks=[task])


def port_refusals(findings: Findings) -> Verdicts:
    """Tasks that would not begin to listen."""
    for task, facts in findings.facts.items():
        if facts.refusal:
            what, _, advice = facts.refusal.partition("\n")
            yield Verdict("port", "error", f"{task}: {what}", advice.strip(), [task])


def connections(findings: Findings) -> Verdicts:
    """Pairs of tasks that are there and do not reach each other, as both sides see it.

    A connection that training does not make is worth a note only.
    """
    there = [task for task in findings.expected if task in findings.responsive]
    for a, b in combinations(there, 2):
        both = findings.probe(a, b), findings.probe(b, a)
        failed = [probe for probe in both if probe is not None and not probe.ok]
        if not failed:
            continue
        seen = "; ".join(_lines(failed))
        source, target = failed[0].source, failed[0].target
        if not any((probe.source, probe.target) in findings.needed for probe in failed):
            what = f"{seen}; training does not make this connection"
            yield Verdict("unused connection", "note", what)
        elif len(failed) == 2:
            what = f"{a} and {b} do not reach each other: {seen}"
            advice = "Open the ports between their hosts, or give addresses of a common network."
            yield Verdict("unreachable", "error", what, advice, [a, b])
        else:
            what = f"{target} reaches {source}, but {source} does not reach {target}: {seen}"
            advice = f"Open the port from the host of {source} to {failed[0].address}."
            yield Verdict("one way", "error", what, advice, [source, target])


def stuck_pairs(findings: Findings) -> Verdicts:
    """Pairs between which small messages pass, and larger ones do not."""
    for stuck in findings.stuck:
        what = (
            f"from {stuck.source} to {stuck.target} small messages pass, those of "
            f"{amount(stuck.size)} do not: MTU?"
        )
        advice = (
            "An overlay network or a VPN takes 50 to 100 bytes of each packet: set the MTU of the "
            f"interface that {stuck.source} sends by to what passes ('ping -M do -s 1372 HOST' "
            "tries an MTU of 1400), or let the ICMP messages through by which routers report "
            "packets that are too large."
        )
        if findings.uses(stuck.pair):
            yield Verdict("large messages", "error", what, advice, [stuck.source, stuck.target])
        else:
            what += "; training does not make this connection"
            yield Verdict("unused connection", "note", what)


def slow_pairs(findings: Findings) -> Verdicts:
    """Pairs that are far slower than the others, or than their own reverse."""
    slow = findings.slow
    for speed in findings.speeds:
        if speed.pair in slow:
            what = f"the connection from {speed.source} to {speed.target} is far slower than "
            back = slower_than_back(speed, findings.speeds)
            if back is None:
                what += (
                    f"the others: {duration(speed.latency)} round trip, {size(speed.bandwidth)}/s"
                )
            else:
                what += f"its reverse: {size(speed.bandwidth)}/s against {size(back.bandwidth)}/s"
            advice = "Look at the cable, the interface and the load of these two."
            yield Verdict("slow", "warning", what, advice, [speed.source, speed.target])


def unmeasured_pairs(findings: Findings) -> Verdicts:
    """Pairs that reach each other and have no figures: whether they carry much is not known."""
    measured = {one.pair for one in findings.speeds} | {one.pair for one in findings.stuck}
    reached = {(probe.source, probe.target) for probe in findings.probes if probe.ok}
    left = (reached & set(permutations(findings.responsive, 2))) - measured
    used = {pair for pair in findings.needed | {p[::-1] for p in findings.needed} if pair in left}
    kinds: list[tuple[set[Pair], Severity, str]] = [
        (used, "warning", " that training uses"),
        (left - used, "note", ""),
    ]
    for pairs, severity, which in kinds:
        if pairs:
            count = f"{plural(len(pairs), 'connection')}{which}"
            what = (
                f"{count} {'were' if len(pairs) > 1 else 'was'} not measured: the time was over, "
                "or a task stopped responding"
            )
            advice = "--timeout SECONDS gives more time."
            yield Verdict("not measured", severity, what, advice)


def unknown_peers(findings: Findings) -> Verdicts:
    """Programs that connected to the coordinator and are no doctors of this job."""
    if findings.unknown_peers:
        what = (
            f"something at {joined(sorted(set(findings.unknown_peers)))} connected to "
            f"{findings.coordinator} and is no task of Spartito; the connection was closed"
        )
        yield Verdict("unknown peer", "note", what)


def _with_other_secret(findings: Findings, task: str) -> tuple[str, list[str]]:
    """Where a task with another secret stands for the missing ``task``, and who noticed."""
    seen = [p for p in findings.probes if p.target == task]
    if found := [probe for probe in seen if probe.outcome is Outcome.OTHER_SECRET]:
        return found[0].address, [probe.source for probe in found]
    facts = findings.facts.get(findings.coordinator)
    for name in facts.names if facts is not None else []:
        called = set(name.addresses) & set(findings.other_secrets)
        if name.host == findings.host(task) and called:
            return min(called), [findings.coordinator]
    return "", []


def _lines(probes: Iterable[Probe]) -> list[str]:
    """``worker 0 finds at b:29501: refused: nobody listens there``, equal ones once."""
    alike: dict[tuple[str, str], list[str]] = {}
    for probe in probes:
        other = probe.outcome is Outcome.OTHER_RELEASE
        means = MEANS.get(probe.outcome, probe.detail if other else f"{probe.detail} is there")
        alike.setdefault((probe.address, means), []).append(probe.source)
    return [
        f"{joined(tasks)} {'finds' if len(tasks) == 1 else 'find'} at {address}: {means}"
        for (address, means), tasks in alike.items()
    ]
