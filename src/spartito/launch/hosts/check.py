"""Find the machines of a job and ask them, all at once and before anything starts."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version

from spartito.errors import UserError
from spartito.launch.hosts.facts import Facts, Question, ask, facts, parse
from spartito.launch.hosts.names import Host, check_names, check_reachable, parse_hosts
from spartito.launch.hosts.ssh import Ssh, address_of, ask_all, refusal
from spartito.wire.addresses import canonical, is_loopback
from spartito.wire.interfaces import is_here


def find_hosts(text: str, ssh: Ssh) -> tuple[Host, ...]:
    """The machines of a list: where ssh's config says they are, and whether that is here."""
    names = parse_hosts(text)
    hosts: list[Host] = []
    for name in names:
        where = address_of(ssh.words, name)
        check_reachable(text, where, len(names))
        # Another user, or an own name for a port of localhost (a virtual machine), means ssh.
        meant = "@" not in name and (where == name or not is_loopback(where))
        hosts.append(Host(name, where, here=meant and is_here(where)))
        twin = next(host for host in hosts if canonical(host.address) == canonical(where))
        if twin.name != name:
            raise UserError(
                f"--hosts {text}: {twin.name} and {name} are both {where}",
                "Name each machine once.",
            )
    return tuple(hosts)


def ask_hosts(hosts: Sequence[Host], ssh: Ssh, question: Question) -> list[Facts]:
    """What each machine says about itself; one `UserError` for all that cannot take part."""
    commands = {
        host.name: ssh.python_command(host.name, [ssh.python, *ask(question)])
        for host in hosts
        if not host.here
    }
    replies = dict(zip(commands, ask_all(commands), strict=True))
    troubles: list[tuple[str, str]] = []
    found: list[Facts] = []
    for host in hosts:
        if host.here:
            its: Facts | None = facts(question)
        else:
            reply = replies[host.name]
            its = parse(reply.out) if reply.code == 0 else None
            if wrong := refusal(host.name, ssh, reply):
                troubles.append(wrong)
                continue
        if its is None:
            troubles.append((f"{host.name} printed what cannot be read", ""))
        elif wrong := _unfit(host, its):
            troubles.append(wrong)
        else:
            found.append(its)
    if len(troubles) == 1:
        raise UserError(*troubles[0])
    if troubles:
        listed = "\n".join(f"  {what}\n    {do}".rstrip() for what, do in troubles)
        raise UserError(f"{len(troubles)} of {len(hosts)} machines cannot take part:\n{listed}")
    check_names(hosts, [one.names for one in found])
    return found


def _unfit(host: Host, its: Facts) -> tuple[str, str] | None:
    if its.spartito != (own := version("spartito")):
        return (
            f"{host.name} has Spartito {its.spartito}, here is {own}",
            "Install the same version on all machines.",
        )
    if its.missing:
        what, _, do = its.missing.partition("\n")
        return f"on {host.name} {what}", do.strip()
    return None


def notes(hosts: Sequence[Host], found: Sequence[Facts], workers: int) -> list[str]:
    """What may be so, but is worth a line: versions that differ, more workers than cores."""
    first, pairs = found[0], list(zip(hosts, found, strict=True))
    crowded = [
        f"{workers} workers share {its.cores} cores of {host.name}"
        for host, its in pairs
        if workers > its.cores
    ]
    return crowded + [
        f"{host.name} has {what} {theirs}, {hosts[0].name} has {ours}"
        for what, ours in (("Python", first.python), ("torch", first.torch))
        for host, its in pairs
        if (theirs := its.python if what == "Python" else its.torch) != ours
    ]
