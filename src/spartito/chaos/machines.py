"""A machine for each task of a job: network namespaces, and the commands that run there."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from spartito.chaos.sandbox import Sandbox
from spartito.chaos.trial import Start
from spartito.launch.lines.network import network
from spartito.launch.processes.roles import Roles, task_environment
from spartito.names import ENV_SECRET

PORT = 29500


@contextmanager
def machines_for(tasks: Sequence[str], folder: Path) -> Iterator[dict[str, Sandbox]]:
    """A machine for each task, gone after the block.

    Args:
        tasks: as ``worker:1``.
        folder: for their temporary files.

    Raises:
        NoNamespacesError: this machine, or our rights on it, do not allow it.
    """
    names = [task.replace(":", "-") for task in tasks]
    with network(*names) as machines:
        found = {}
        for task, machine in zip(tasks, machines, strict=True):
            temporary = folder / machine.name
            temporary.mkdir(parents=True, exist_ok=True)
            found[task] = Sandbox(machine.enters, machine.memory, temporary, machine)
        yield found


def on_machines(
    words: Sequence[str], env: Mapping[str, str], roles: Roles, machines: Mapping[str, Sandbox]
) -> dict[str, Start]:
    """The commands that start a job, one on each machine.

    Args:
        words: ``spartito run``, its options, and the program.
        env: of all of them.
        roles: the tasks of the job.
        machines: by task.

    Returns:
        The commands by task; the environment of each says who it is.
    """
    addresses = []
    for task in roles.tasks:
        machine = machines[f"{task.type}:{task.index}"].machine
        assert machine is not None
        addresses.append(f"{machine.address}:{PORT}")
    threads = {"OMP_NUM_THREADS": "1"}  # each takes the cores for its own
    secret = {ENV_SECRET: secrets.token_hex(16)}
    return {
        f"{task.type}:{task.index}": Start(
            words,
            task_environment({**threads, **env, **secret}, roles, addresses, task),
            machines[f"{task.type}:{task.index}"],
        )
        for task in roles.tasks
    }
