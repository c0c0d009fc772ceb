"""A cluster from the addresses of all its tasks, whoever listed them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from spartito.cluster.spec import NO_RANK, REPLICA_ROLES, ROLES, ClusterSpec, Task
from spartito.errors import UserError
from spartito.names import nearest
from spartito.wire.addresses import canonical, is_loopback, machine_of, split_address

ENV_TASK = "SPARTITO_TASK"
"""Which task this process is, as ``worker 0``."""
ENV_ADDRESS = "SPARTITO_ADDRESS"
"""The ``host:port`` at which the others reach this process, where nothing else says it."""
ENV_WORKERS = "SPARTITO_WORKERS"
"""How many workers there are, where the environment does not tell by itself."""
ENV_PS = "SPARTITO_PS"
"""How many parameter servers there are; of numbered tasks they are the last."""
ENV_CHIEF = "SPARTITO_CHIEF"
"""How many chiefs there are, 0 or 1; of numbered tasks it is the first."""
ENV_EVALUATOR = "SPARTITO_EVALUATOR"
"""How many evaluators there are, 0 or 1; of numbered tasks it comes after the servers."""


def spec_of(cluster: Mapping[str, tuple[str, ...]], task: Task, source: str) -> ClusterSpec:
    """The cluster of which ``task`` is one, by the ``host:port`` of each.

    The chief is the explicit one, else worker 0; its address is where the processes meet.
    Tasks whose hosts are equal (all loopback names are) share a machine.
    """
    replicas = [Task(role, i) for role in REPLICA_ROLES for i in range(len(cluster.get(role, ())))]
    mine = _machine(cluster[task.type][task.index])
    local = [t for t in replicas if _machine(cluster[t.type][t.index]) == mine]
    meets = len(replicas) + len(cluster.get("ps", ())) > 1
    chief = replicas[0]
    return ClusterSpec(
        addresses=cluster,
        task=task,
        rank=replicas.index(task) if task in replicas else NO_RANK,
        world_size=len(replicas),
        local_rank=local.index(task) if task in local else NO_RANK,
        local_size=len(local),
        rendezvous=cluster[chief.type][chief.index] if meets else None,
        source=source,
    )


def numbered(
    rank: int, size: int, local_rank: int, local_size: int, meeting: str, source: str
) -> ClusterSpec:
    """The cluster of ``size`` workers of which we only know where they meet."""
    return ClusterSpec(
        addresses={"worker": (meeting if size > 1 else "", *[""] * (size - 1))},
        task=Task("worker", rank),
        rank=rank,
        world_size=size,
        local_rank=local_rank,
        local_size=local_size,
        rendezvous=meeting if size > 1 else None,
        source=source,
    )


def roles_of(given: Any, source: str, advice: str) -> dict[str, tuple[str, ...]]:
    """The addresses by role that somebody wrote down; `UserError` unless they can be a job."""
    if not isinstance(given, dict):
        raise UserError(f"{source} must map roles to addresses, but has {given!r}", advice)
    for role, tasks in given.items():
        if role not in ROLES:
            raise UserError(f"{source}: {role!r} is not a role", nearest(str(role), ROLES))
        if not isinstance(tasks, list) or not all(isinstance(a, str) for a in tasks):
            raise UserError(
                f"{source}: {role!r} must be a list of host:port, but is {tasks!r}", advice
            )
    cluster = {role: tuple(tasks) for role, tasks in given.items() if tasks}
    if not any(role in cluster for role in REPLICA_ROLES):
        raise UserError(f"{source}: the cluster {given!r} has no chief and no worker", advice)
    check_addresses(cluster, source)
    return cluster


def with_servers(addresses: Sequence[str], servers: int) -> dict[str, tuple[str, ...]]:
    """The roles of numbered tasks: workers, and the last ``servers`` of them are ps."""
    split = len(addresses) - servers
    cluster = {"worker": tuple(addresses[:split]), "ps": tuple(addresses[split:])}
    return {role: tasks for role, tasks in cluster.items() if tasks}


def with_roles(
    addresses: Sequence[str], env: Mapping[str, str], source: str, *, chief: bool = False
) -> dict[str, tuple[str, ...]]:
    """The roles of numbered tasks, as ``SPARTITO_PS`` and its like say how many there are of each.

    Workers, then servers, then an evaluator; the first task is a chief where one is asked for and
    ``chief`` says that there may be one. `UserError` where no worker is left.
    """
    names = {"chief": ENV_CHIEF} if chief else {}
    names |= {"ps": ENV_PS, "evaluator": ENV_EVALUATOR}
    asked = {role: count(env, name, 0) for role, name in names.items()}
    for role in ("chief", "evaluator"):
        if asked.get(role, 0) > 1:
            raise UserError(f"{names[role]}={asked[role]}, but a job has at most one {role}")
    workers = len(addresses) - sum(asked.values())
    if workers < 1:
        told = " and ".join(f"{names[role]}={number}" for role, number in asked.items() if number)
        raise UserError(
            f"{told}, but {source} has {len(addresses)} tasks: that leaves no worker",
            "Start more tasks, or ask for fewer of these.",
        )
    counts = {"chief": asked.get("chief", 0), "worker": workers, **asked}
    rest = iter(addresses)
    return {role: tuple(islice(rest, number)) for role, number in counts.items() if number}


def task_of(number: int, cluster: Mapping[str, tuple[str, ...]]) -> Task:
    """The task that is the ``number``-th of a cluster made by `with_servers` or `with_roles`."""
    return [Task(role, i) for role, tasks in cluster.items() for i in range(len(tasks))][number]


def check_addresses(cluster: Mapping[str, tuple[str, ...]], source: str) -> None:
    """Every address whole, no two equal, and no ``localhost`` that another host would dial."""
    seen: dict[tuple[str, int], tuple[Task, str]] = {}
    own: list[str] = []
    others: list[str] = []
    for role, tasks in cluster.items():
        for index, address in enumerate(tasks):
            task = Task(role, index)
            try:
                host, port = split_address(address)
            except UserError as error:
                raise UserError(f"{source}, {task}: {error}") from error
            twin, other = seen.setdefault((canonical(host), port), (task, address))
            if twin != task:
                same = address if other == address else f"{other}, which is {address}"
                raise UserError(
                    f"{source}: {twin} and {task} have one address, {same}",
                    "Give each task a port of its own.",
                )
            (own if is_loopback(host) else others).append(f"{task} at {address}")
    if own and others:
        raise UserError(
            f"{source} has {own[0]} beside {others[0]}: on every machine that address means "
            "the machine itself",
            "Give each task the name or address by which the other machines reach it.",
        )


def count(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    """The whole number in variable ``name``; ``default`` where it is not set, if there is one."""
    text = env.get(name, "").strip()
    if not text and default is not None:
        return default
    if not text:
        raise UserError(f"{name} is not set", "It must be a whole number.")
    if not (text.isascii() and text.isdigit()):
        raise UserError(f"{name}={env[name]!r} is not a whole number")
    return int(text)


def named_task(env: Mapping[str, str]) -> Task | None:
    """The task that ``SPARTITO_TASK`` names, as ``worker 0`` or ``worker:0``; None if not set."""
    text = env.get(ENV_TASK, "").strip()
    if not text:
        return None
    role, _, index = text.replace(":", " ").partition(" ")
    if role not in ROLES:
        raise UserError(f"{ENV_TASK}={text!r}: {role!r} is not a role", nearest(role, ROLES))
    if not (index.strip().isascii() and index.strip().isdigit()):
        raise UserError(f"{ENV_TASK}={text!r} has no number", f"It looks like '{role} 0'")
    return Task(role, int(index))


def _machine(address: str) -> str:
    return machine_of(split_address(address)[0]) if address else ""
