"""A job on several machines as one checked value: which task runs where, and by which command."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from spartito.cluster import tf_config, torchrun
from spartito.cluster.address_list import ENV_ADDRESS
from spartito.cluster.spec import Task
from spartito.errors import UserError
from spartito.launch.hosts import agent, client
from spartito.launch.hosts.names import Host
from spartito.launch.hosts.ssh import Ssh
from spartito.launch.processes.local import RUNTIME, Position, defaults, environments
from spartito.launch.processes.process import Process, process_of
from spartito.launch.processes.roles import Roles, task_environment
from spartito.names import ENV_SECRET, ENV_SECRET_FILE, aligned
from spartito.wire.addresses import address

PORT = 29500
"""Where the tasks of a machine listen: the first one; the others follow."""

MEMBERSHIP = frozenset(
    {
        "SPARTITO_ADDRESS",
        "SPARTITO_CHIEF",
        "SPARTITO_CLUSTER",
        "SPARTITO_CLUSTER_DIR",
        "SPARTITO_EVALUATOR",
        "SPARTITO_PODS",
        "SPARTITO_PS",
        "SPARTITO_TASK",
        "SPARTITO_WORKERS",
    }
)
"""Variables that say who is in the job, which we say ourselves."""

STAYS = MEMBERSHIP | {ENV_SECRET, ENV_SECRET_FILE}
"""Variables of ours that do not go to other machines."""

TRAVEL = frozenset({"OMP_NUM_THREADS", *RUNTIME})
"""What goes to the other machines beside our own variables."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A job on ``hosts``: ``argv`` (after ``python``) for each task, ``workers`` on each machine.

    ``cores`` are those of each machine. ``passed`` are variables of the user's that go to the
    other machines too. Pure: all else follows from these.
    """

    hosts: tuple[Host, ...]
    cores: tuple[int, ...]
    roles: Roles
    argv: tuple[str, ...]
    ssh: Ssh
    port: int = PORT
    passed: tuple[str, ...] = ()

    @property
    def workers(self) -> int:
        """How many workers each machine has."""
        return self.roles.workers // len(self.hosts)

    def machine_of(self, task: Task) -> int:
        """The index of the task's machine among ``hosts``."""
        return self.roles.machine_of(task, len(self.hosts))

    def together(self, task: Task) -> list[Task]:
        """The tasks on the machine of ``task``, in order."""
        return self.roles.together(task, len(self.hosts))

    def address(self, task: Task) -> str:
        """Where ``task`` listens if it does: its machine's first port, and those that follow."""
        host = self.hosts[self.machine_of(task)]
        return address(host.address, self.port + self.together(task).index(task))

    def listens(self, task: Task) -> bool:
        """Whether others call ``task``: beside servers nobody calls a worker that does not lead."""
        if task == self.roles.tasks[0] or task.type == "ps":
            return True
        return task.type == "worker" and not self.roles.ps and len(self.hosts) > 1

    @property
    def most(self) -> int:
        """How many tasks a machine has at most."""
        return max(len(self.together(task)) for task in self.roles.tasks)

    def check_ports(self, allowed: range | None) -> None:
        """Raise `UserError` where a task would listen at a port that is not ``allowed``."""
        most = self.most
        needed = range(self.port, self.port + most)
        if allowed is not None and not set(needed) <= set(allowed):
            raise UserError(
                f"{most} tasks of a machine listen at ports {needed[0]}-{needed[-1]}, but only "
                f"{allowed[0]}-{allowed[-1]} are allowed",
                "Allow one for each task of a machine: --ports, SPARTITO_PORTS.",
            )

    def environment(self, task: Task, env: Mapping[str, str]) -> dict[str, str]:
        """``env``, and what ``task`` must know: who it is, and how many cores it may use."""
        machine = self.machine_of(task)
        if self.roles.asked:
            addresses = [self.address(other) for other in self.roles.tasks]
            threads = self.cores[machine] // self.workers if task.type == "worker" else 1
            own = task_environment(env, self.roles, addresses, task)
            return defaults(max(1, threads)) | own
        here = Position(machine, len(self.hosts), self.hosts[0].address, self.port)
        every = environments(env, here, self.workers, self.cores[machine])
        return every[task.index % self.workers] | {ENV_ADDRESS: self.address(task)}

    def process(self, task: Task, env: Mapping[str, str]) -> Process:
        """What to start for ``task`` here, by ssh if its machine is another one."""
        host = self.hosts[self.machine_of(task)]
        if host.here:
            argv, own = [sys.executable, *self.argv], self.environment(task, env)
        else:
            line = agent.first_line(self.environment(task, travelling(env, self.passed)))
            if len(line) > client.MOST_BYTES:
                raise UserError(
                    f"the environment for {task} has {len(line)} bytes, more than "
                    f"{client.MOST_BYTES}",
                    "Give what is long in a file that the script reads.",
                )
            remote = [self.ssh.python, *self.argv]
            keeper = agent.command(remote, self.ssh.python)
            words = self.ssh.python_command(host.name, keeper)
            argv = client.command(host.name, words, self.together(task).index(task))
            own = {**env, client.FIRST_LINE: line}
        return process_of(task, self.roles, argv, own, remote=not host.here)

    def lines(self) -> list[str]:
        """Which tasks each machine has, with the ports where they listen."""
        by_machine: list[list[str]] = [[] for _ in self.hosts]
        for task in self.roles.tasks:
            port = f" ({self.address(task).rpartition(':')[2]})" if self.listens(task) else ""
            by_machine[self.machine_of(task)].append(f"{task}{port}")
        names = (host.name for host in self.hosts)
        return aligned(list(zip(names, map(", ".join, by_machine), strict=True)))


def travelling(env: Mapping[str, str], passed: Collection[str] = ()) -> dict[str, str]:
    """What of ``env`` goes to other machines: Spartito's own settings, how to compute, ``passed``.

    The secret is not among that: `client` sends it, as a file with it is one of this machine.
    """
    return {
        name: value
        for name, value in env.items()
        if name in TRAVEL or name in passed or (name.startswith("SPARTITO_") and name not in STAYS)
    }


def check_passed(names: Sequence[str], env: Mapping[str, str]) -> None:
    """Raise `UserError` for an ``--env`` that names no variable of ``env``, or one of ours."""
    for text in names:
        name, equals, _ = text.partition("=")
        if equals:
            raise UserError(
                f"--env {name}=... gives a value, which other users could read in the list of "
                "processes",
                f"Set it here and give its name only: --env {name}",
            )
        if name in MEMBERSHIP or name in (tf_config.VARIABLE, *torchrun.VARIABLES):
            raise UserError(f"--env {name}: who is in the job is what --hosts itself says")
        if name not in env:
            raise UserError(f"--env {name}: no such variable is set here", f"export {name}=...")
