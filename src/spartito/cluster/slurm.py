"""The cluster by Slurm's variables: one task of a step that ``srun`` started."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from spartito.cluster import mpi, srun
from spartito.cluster.address_list import check_addresses, count, spec_of, task_of, with_roles
from spartito.cluster.endpoints import port_range
from spartito.cluster.nodelist import expand, expand_counts
from spartito.cluster.spec import ClusterSpec
from spartito.errors import UserError
from spartito.names import ENV_PORTS
from spartito.wire.addresses import address, is_loopback

SOURCE = "Slurm"

FIRST_PORT, PORT_STRIDE, PORT_SLOTS = 12_000, 64, 312
"""Ports from 12000 to 31967, below those that Linux gives to outgoing connections. A job has 64
in a row, one for each task of a node; jobs with near numbers have others."""

LOOPBACK = "127.0.0.1"
"""Where the tasks of a step on one node meet."""


def applies(env: Mapping[str, str]) -> bool:
    """Whether this is one of several tasks of a step.

    A batch script's own shell and that of ``salloc`` have a job but no step, ``srun --pty bash``
    has a step and a person in it: all of these are alone. So are the processes of ``mpirun``,
    which starts its daemons, not them, by ``srun``.
    """
    several = srun.tasks(env) not in ("", "1")
    return srun.in_step(env) and several and not srun.is_typed(env) and not mpi.started(env)


def from_slurm(env: Mapping[str, str]) -> ClusterSpec | None:
    """The cluster of the step's tasks by ``SLURM_PROCID``; None outside of `applies`.

    The last ``SPARTITO_PS`` tasks are parameter servers, the others workers; after the servers
    comes an evaluator where ``SPARTITO_EVALUATOR`` is 1. A task listens at
    its node's name, on a port that follows from the job's number, or from ``MASTER_PORT``, and
    its index on the node. ``MASTER_ADDR`` is the name of the first task's node, where Slurm's
    own name for it does not serve.
    """
    if not applies(env):
        return None
    tasks, rank = count({"tasks": srun.tasks(env)}, "tasks"), count(env, "SLURM_PROCID")
    components = _components(env)
    nodes, counts = components or (_nodes(env), _counts(env))
    if len(nodes) != len(counts) or sum(counts) != tasks or rank >= tasks:
        raise UserError(
            f"Slurm says task {rank} of {tasks} on {len(nodes)} nodes ({','.join(nodes)}) with "
            f"{','.join(map(str, counts))} tasks, which do not fit together",
            "Start the job with 'srun python train.py', without SLURM_ variables of your own.",
        )
    # Components may each have a rule of their own; what is not in blocks is found below.
    rule = "block" if components else env.get("SLURM_DISTRIBUTION", "block")
    if len(nodes) > 1 and rule.startswith(("plane", "arbitrary")):
        raise UserError(
            f"Slurm distributes the tasks by {rule!r}, which says nothing about who is where",
            "Start it with srun --distribution=block, or cyclic.",
        )
    slots = _cyclic(counts) if rule.startswith("cyclic") else _block(counts)
    _check_slot(env, rank, slots[rank], rule)
    base = _first_port(env, max(counts))
    # Within one node a name that nobody can resolve does no harm.
    hosts = nodes if len(nodes) > 1 else (LOOPBACK,)
    everyone = [address(hosts[node], base + local) for node, local in slots]
    found = with_roles(everyone, env, SOURCE)
    check_addresses(found, SOURCE)
    spec = spec_of(found, task_of(rank, found), SOURCE)
    return _meeting(spec, env.get("MASTER_ADDR", "").strip(), base, len(nodes))


def remark(env: Mapping[str, str]) -> str | None:
    """What to tell who is inside an allocation for several tasks, but in none of them."""
    tasks = env.get("SLURM_NTASKS", "")
    if not env.get("SLURM_JOB_ID") or tasks in ("", "1") or mpi.started(env):
        return None
    if srun.in_step(env) and not srun.is_typed(env):
        return None
    return f"this Slurm job has {tasks} tasks, but this process is none: start them with srun"


def _nodes(env: Mapping[str, str]) -> tuple[str, ...]:
    names = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    for name in names:
        if env.get(name):
            try:
                return expand(env[name].strip())
            except UserError as error:
                raise UserError(f"{name}: {error}") from error
    raise UserError(f"Slurm says SLURM_PROCID={env['SLURM_PROCID']}, but no {names[0]}")


def _components(env: Mapping[str, str]) -> tuple[tuple[str, ...], tuple[int, ...]] | None:
    """Nodes and tasks of a step over several components of a heterogeneous job, else None.

    Ranks go through the components in turn, where the step's own list of nodes is sorted. A step
    has those components whose nodes are all in it.
    """
    size = count(env, "SLURM_HET_SIZE", 0)
    step = set(_nodes(env)) if size > 1 else set()
    nodes: list[str] = []
    counts: list[int] = []
    found = 0
    for index in range(size):
        listed = env.get(f"SLURM_JOB_NODELIST_HET_GROUP_{index}", "")
        tasks = env.get(f"SLURM_TASKS_PER_NODE_HET_GROUP_{index}", "")
        if listed and tasks and step >= set(here := expand(listed)):
            found += 1
            nodes += here
            counts += expand_counts(tasks)
    return (tuple(nodes), tuple(counts)) if found > 1 else None


def _counts(env: Mapping[str, str]) -> tuple[int, ...]:
    """The number of tasks on each node."""
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
        if env.get(name):
            return expand_counts(env[name])
    return (count(env, "SLURM_NTASKS_PER_NODE"),) * len(_nodes(env))


def _block(counts: tuple[int, ...]) -> list[tuple[int, int]]:
    """Node and index on the node of each rank, where a node is filled before the next."""
    return [(node, local) for node, tasks in enumerate(counts) for local in range(tasks)]


def _cyclic(counts: tuple[int, ...]) -> list[tuple[int, int]]:
    """The same where each node in turn gets one task, until it has all its own."""
    return sorted(_block(counts), key=lambda slot: (slot[1], slot[0]))


def _check_slot(env: Mapping[str, str], rank: int, slot: tuple[int, int], rule: str) -> None:
    given = count(env, "SLURM_NODEID", slot[0]), count(env, "SLURM_LOCALID", slot[1])
    if given != slot:
        raise UserError(
            f"Slurm has task {rank} as number {given[1]} on node {given[0]}, but by distribution "
            f"{rule!r} it is number {slot[1]} on node {slot[0]}",
            "Start it with srun --distribution=block",
        )


def _first_port(env: Mapping[str, str], tasks: int) -> int:
    """The port of the first of at most ``tasks`` on a node: the same for all tasks of the step."""
    allowed = port_range(env)
    if allowed is not None and len(allowed) < tasks:
        raise UserError(
            f"{ENV_PORTS}={env[ENV_PORTS]} has {len(allowed)} ports for {tasks} tasks of a node",
            "Allow one for each task.",
        )
    if allowed is not None and not env.get("MASTER_PORT"):
        return allowed[0] + _run_of_array(env) % (len(allowed) // tasks) * tasks
    if env.get("MASTER_PORT"):
        return count(env, "MASTER_PORT")
    step = count(env, "SLURM_STEP_ID", 0)
    # Steps of one job may run side by side.
    offset = (count(env, "SLURM_JOB_ID", 0) + 131 * step) % PORT_SLOTS
    return FIRST_PORT + offset * PORT_STRIDE


def _run_of_array(env: Mapping[str, str]) -> int:
    """Which run of an array this is, from 0; runs may share a node."""
    index = count(env, "SLURM_ARRAY_TASK_ID", 0)
    return max(0, index - count(env, "SLURM_ARRAY_TASK_MIN", 0))


def _meeting(spec: ClusterSpec, host: str, port: int, nodes: int) -> ClusterSpec:
    if not host or spec.rendezvous is None:
        return spec
    if is_loopback(host) and nodes > 1:
        raise UserError(
            f"MASTER_ADDR={host!r} means each of the {nodes} nodes itself",
            "Unset it: Slurm names the first node. Or give a name that all nodes know.",
        )
    return replace(spec, rendezvous=address(host, port))
