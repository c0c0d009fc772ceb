"""A job on ``--link``: each task is on a machine of its own, a network namespace, at that line."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from spartito.cluster.endpoints import port_range
from spartito.errors import UserError
from spartito.launch.lines.line import Link
from spartito.launch.lines.network import Machine, NoNamespacesError, network, said
from spartito.launch.processes.process import Process, process_of, with_fractions
from spartito.launch.processes.roles import Roles, task_environment

PORT = 29500
"""Free everywhere: each machine has ports of its own."""
GLOO = {"GLOO_SOCKET_IFNAME": "eth0"}
"""What names another one knows no interface in there."""


def line_of(text: str, alone: bool, recover: bool) -> Link:
    """The line that ``--link`` says.

    Args:
        text: as it is typed.
        alone: whether the job starts here as a whole.
        recover: whether a lost worker is replaced.

    Returns:
        The line.

    Raises:
        UserError: there is no such line, or such a job cannot be on it.
    """
    link = Link.read(text)
    if not alone:
        raise UserError(f"--link {text} is for a job that starts here as a whole", "Leave it out.")
    if recover:
        raise UserError(f"--recover with --link {text}", "Leave one of them out.")
    return link


@contextmanager
def machines_on(link: Link, roles: Roles) -> Iterator[list[Machine]]:
    """A machine at that line for each task, in their order, gone after the block.

    Args:
        link: the line of each.
        roles: the tasks.

    Raises:
        UserError: this machine, its kernel, or our rights do not allow them.
    """
    names = [f"{task.type}-{task.index}" for task in roles.tasks]
    try:
        with network(*names, needs=()) as machines:
            for machine in machines:
                _slow_down(machine, link)
            yield machines
    except NoNamespacesError as error:
        raise UserError(
            f"--link {link}: {error}",
            "Run it as root on Linux with iproute2 and util-linux; in a container, --privileged.",
        ) from error


def _slow_down(machine: Machine, link: Link) -> None:
    try:
        machine.slow_down(link)
    except subprocess.SubprocessError as error:
        text = str(link)
        if not link.delay:
            raise UserError(f"--link {text} cannot be made: {said(error)}") from error
        raise UserError(
            f"--link {text} cannot be made: {said(error)}",
            "A delay needs a kernel with netem (modprobe sch_netem); leave it out: "
            f"--link {text.partition(',')[0]}",
        ) from error


def at_machines(
    machines: Sequence[Machine],
    roles: Roles,
    argv: Sequence[str],
    env: Mapping[str, str],
    settings: Sequence[Mapping[str, str]],
    slow: Mapping[str, float],
) -> list[Process]:
    """What starts: a process of each task on its machine.

    Args:
        machines: in the order of the tasks.
        roles: the tasks.
        argv: what each runs.
        env: what they inherit.
        settings: what each task gets unless ``env`` says otherwise.
        slow: the fraction of the time that tasks run, as ``worker:1``; of others all.

    Returns:
        The processes; the first is the coordinator.

    Raises:
        UserError: a slow task is not among them.
    """
    allowed = port_range(env)
    port = allowed[0] if allowed else PORT
    addresses = [f"{machine.address}:{port}" for machine in machines]
    started = []
    for machine, task, own in zip(machines, roles.tasks, settings, strict=True):
        told = {**own, **task_environment(env, roles, addresses, task), **GLOO}
        started.append(process_of(task, roles, [*machine.enters, *argv], told))
    return with_fractions(started, slow)
