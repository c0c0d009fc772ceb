"""Who is not there, and who does not reach whom: what is wrong with the network."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import combinations

from spartito.cluster.spec import is_loopback, split_address
from spartito.doctor.findings import Report
from spartito.doctor.rules.verdict import Verdict
from spartito.doctor.transport.messages import FAILURES, OK, Knocked
from spartito.doctor.words import duration, joined, rate


def absent_tasks(report: Report) -> Iterator[Verdict]:
    """Those that did not come, and how the others find them."""
    for task in report.absent:
        if task in report.silent:
            continue
        seen = [knocked for knocked in report.knocks if knocked.target == task]
        answered = [knocked.source for knocked in seen if knocked.how == OK]
        where = f" ({report.addresses[task]})" if report.addresses.get(task) else ""
        what = f"{task}{where} did not come within {report.limit:g} s"
        if answered:
            leader = report.addresses.get(report.leader) or "its address"
            yield Verdict(
                "absent",
                "missing",
                f"{what}; {joined(answered)} reached it there, "
                f"so it runs but does not reach {report.leader}",
                f"Open the way from {task} to {report.leader} at {leader}.",
                [task, report.leader],
            )
        else:
            yield Verdict(
                "absent",
                "missing",
                what + "".join(f"; {how}" for how in _ways(seen)),
                f"Start 'spartito doctor' there too, or mend the address of {task}; "
                "--timeout SECONDS waits longer.",
                [task],
            )


def others(report: Report) -> Iterator[Verdict]:
    """Of a task that is alone, without the one that leads: who else answers it."""
    for knocked in report.knocks:
        if knocked.target not in report.expected:
            if knocked.how == OK:
                what = f"{knocked.target} is at {knocked.address} and answers {knocked.source}"
            else:
                what = f"{knocked.target} is not there; {joined(_ways([knocked]))}"
            yield Verdict("other", "note", what, tasks=[knocked.target])


def silent_tasks(report: Report) -> Iterator[Verdict]:
    """Those that came and then stopped answering."""
    for task in dict.fromkeys(report.silent):
        seen = [k for k in report.knocks if k.target == task and k.how != OK]
        yield Verdict(
            "silent",
            "missing",
            f"{task} came, then stopped answering" + "".join(f"; {how}" for how in _ways(seen)),
            "Look whether its process is frozen, was killed, or its machine has lost the network.",
            [task],
        )


def refusals(report: Report) -> Iterator[Verdict]:
    """Tasks that came with another cluster, or a name that somebody has."""
    for why in report.refused:
        yield Verdict(
            "refused", "wrong", why, "Give every process the same cluster and a task of its own."
        )


def loopbacks(report: Report) -> Iterator[Verdict]:
    """Addresses that mean each machine itself, though there are several."""
    own = [t for t, a in report.addresses.items() if a and is_loopback(split_address(a)[0])]
    networks = {facts.network for facts in report.facts.values()}
    if own and (len(networks) > 1 or len(report.hosts) > 1):
        yield Verdict(
            "loopback",
            "wrong",
            f"the address of {joined(own)} is a loopback address ({report.addresses[own[0]]}), "
            "but the tasks run on several hosts: there it means each host itself",
            "Give each task the name or address by which the other hosts reach it.",
            own,
        )
    elif own and report.absent:
        yield Verdict(
            "loopback",
            "warning",
            f"the address of {joined(own)} is a loopback address ({report.addresses[own[0]]}): "
            "only tasks on that same machine can come",
            "If there are several machines, give addresses that the others reach.",
            own,
        )
    for task, facts in report.facts.items():
        address = report.addresses.get(task)
        host = split_address(address)[0] if address else ""
        means = [a for name in facts.names if name.host == host for a in name.addresses]
        several = len(report.hosts) > 1 or len(networks) > 1 or bool(report.absent)
        if several and host and not is_loopback(host) and means and is_loopback(means[0]):
            yield Verdict(
                "loopback",
                "warning",
                f"on {task} its own name {host} means {means[0]}, a loopback address, as Debian "
                "has it: so that others reach it, it listens on all interfaces",
                f"Take {host} off the line of {means[0]} in its /etc/hosts.",
                [task],
            )


def names(report: Report) -> Iterator[Verdict]:
    """Hosts whose name does not resolve, and on which tasks."""
    unknown: dict[tuple[str, str], list[str]] = {}
    for task, facts in report.facts.items():
        for name in facts.names:
            if name.error:
                unknown.setdefault((name.host, name.error), []).append(task)
    for (host, error), tasks in unknown.items():
        yield Verdict(
            "name",
            "wrong",
            f"the name {host} does not resolve on {joined(tasks)}: {error}",
            "Mend the name, add it to DNS or /etc/hosts there, or use an address.",
            tasks,
        )


def ports(report: Report) -> Iterator[Verdict]:
    """Ports that another program has, and addresses that no interface has."""
    called = {target for _, target in report.needed}
    for task, facts in report.facts.items():
        port = facts.port
        if port is None or task not in called:
            continue
        who = port.holder or "another program (only root may see which)"
        if not port.free and not port.agent:
            which = f"port {port.number} of {task} on {facts.host} is taken by {who}"
            if port.last:
                which = f"ports {port.number}-{port.last} on {facts.host} are all taken: {task}"
                which += " would not listen"
            yield Verdict(
                "port", "wrong", which, "End that program, or choose a free port.", [task]
            )
        elif port.drawn:
            yield Verdict(
                "port",
                "warning",
                f"port {port.number} of {task} on {facts.host} is taken by {who}: training listens "
                f"on one that the system draws, now {port.drawn}",
                "End that program, or give the task another port, if a firewall stands between.",
                [task],
            )
        unresolved = any(name.error for name in facts.names if name.host == _host(report, task))
        if port.foreign and not unresolved:
            yield Verdict(
                "foreign address",
                "note",
                f"{_host(report, task)} is no address of an interface of {task} (a service name "
                "or translated address): it listens on all of them",
                tasks=[task],
            )


def port_refusals(report: Report) -> Iterator[Verdict]:
    """Tasks that would not begin to listen."""
    for task, facts in report.facts.items():
        if facts.refusal:
            what, _, do = facts.refusal.partition("\n")
            yield Verdict("port", "wrong", f"{task}: {what}", do.strip(), [task])


def ways(report: Report) -> Iterator[Verdict]:
    """Pairs of tasks that are there and do not reach each other, told from both sides.

    A way that training does not go is worth a note only.
    """
    needed = report.needed
    there = [t for t in report.expected if t in report.facts and t not in report.silent]
    for a, b in combinations(there, 2):
        here, back = report.found(a, b), report.found(b, a)
        failed = [knocked for knocked in (here, back) if knocked and knocked.how != OK]
        told = "; ".join(_ways(failed))
        if failed and not any((k.source, k.target) in needed for k in failed):
            yield Verdict("unused way", "note", f"{told}; training does not go this way")
        elif len(failed) == 2:
            yield Verdict(
                "unreachable",
                "wrong",
                f"{a} and {b} do not reach each other: {told}",
                "Open the ports between their hosts, or give addresses of a common network.",
                [a, b],
            )
        elif failed:
            source, target = failed[0].source, failed[0].target
            yield Verdict(
                "one way",
                "wrong",
                f"{target} reaches {source}, but {source} does not reach {target}: {told}",
                f"Open the way from the host of {source} to {failed[0].address}.",
                [source, target],
            )


def slow_pairs(report: Report) -> Iterator[Verdict]:
    """Ways that are far slower than the others, and ways that have no figures."""
    slow = report.slow
    for speed in report.speeds:
        if (speed.source, speed.target) in slow:
            yield Verdict(
                "slow",
                "warning",
                f"the way from {speed.source} to {speed.target} is far slower than the others: "
                f"{duration(speed.latency)} there and back, {rate(speed.bandwidth)}",
                "Look at the cable, the interface and the load of these two.",
                [speed.source, speed.target],
            )
    measured = {(speed.source, speed.target) for speed in report.speeds}
    there = [t for t in report.facts if t not in report.silent]
    left = [
        (a, b)
        for a in there
        for b in there
        if a != b and report.reaches(a, b) and (a, b) not in measured
    ]
    if left and report.leader != "" and len(there) > 1:
        yield Verdict(
            "not measured",
            "note",
            f"{len(left)} ways between tasks were not measured: the time was over, or a task "
            "stopped answering",
            "--timeout SECONDS gives more time.",
        )


def strangers(report: Report) -> Iterator[Verdict]:
    """Programs that knocked at the leader and are no doctors."""
    if report.strangers:
        yield Verdict(
            "stranger",
            "note",
            f"something at {joined(sorted(set(report.strangers)))} sent {report.leader} what is "
            "no doctor's message; it was hung up on",
        )


def _ways(knocks: Iterable[Knocked]) -> list[str]:
    """``worker 0 finds at b:29501: refused: nobody listens there``, equal ones once."""
    alike: dict[tuple[str, str], list[str]] = {}
    for knocked in knocks:
        how = FAILURES.get(knocked.how, knocked.how)
        if knocked.how == "wrong task":
            how = f"{knocked.detail} answers there"
        alike.setdefault((knocked.address, how), []).append(knocked.source)
    return [
        f"{joined(tasks)} {'finds' if len(tasks) == 1 else 'find'} at {address}: {how}"
        for (address, how), tasks in alike.items()
    ]


def _host(report: Report, task: str) -> str:
    address = report.addresses.get(task)
    return split_address(address)[0] if address else ""
