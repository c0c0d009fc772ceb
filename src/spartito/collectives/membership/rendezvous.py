"""How the tasks of a job find each other: one store at the rendezvous, then groups of tasks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Protocol, Self

import msgspec
import torch

from spartito.accelerators import are_shared, go_over
from spartito.cluster.endpoints import (
    check_drawn,
    chosen_interface,
    group_endpoint,
    job_key,
    peer_endpoint,
)
from spartito.cluster.limits import time_limit
from spartito.cluster.recovery import Recovery
from spartito.cluster.spec import ClusterSpec
from spartito.collectives.collective import Collective, IdentityCollective
from spartito.collectives.hierarchical import HierarchicalCollective
from spartito.collectives.membership.generations import cluster_of
from spartito.collectives.membership.meeting import Meeting, meet
from spartito.collectives.membership.placement import Placement, note_sockets
from spartito.collectives.membership.regrouping import Watch
from spartito.collectives.membership.store import (
    KeyValues,
    Membership,
    lost_with,
    nobody,
    quiet_torch,
)
from spartito.collectives.membership.versions import Versions, check_versions
from spartito.collectives.membership.ways import (
    THROUGH_HOST,
    DeviceOfTask,
    Way,
    check_devices,
    compared,
    way_of,
)
from spartito.collectives.memory.shared_memory import Cores, SharedMemoryCollective
from spartito.collectives.process_group import ProcessGroupCollective
from spartito.collectives.sockets.peers import check_connections
from spartito.collectives.sockets.tcp import SocketCollective
from spartito.collectives.staged import StagedCollective
from spartito.errors import TaskLostError, UserError
from spartito.heartbeat import CONNECT, RECOVER, during, in_generation, keep_files
from spartito.names import nearest
from spartito.system import host_key, shares_memory
from spartito.system.capacity import cgroup_quota
from spartito.wire.addresses import Endpoint
from spartito.wire.interfaces import interface_of
from spartito.wire.secret import check_secrets, fingerprint, read_secret

COMMUNICATION = ("auto", "ddp", "fsdp", "process_group", "sockets")
WORLD = "world"
"""The group of all tasks that train."""
MOST_TRIES = 10  # to go on after a loss, without a step in between
FAREWELL = 10.0  # seconds that the keeper of the store stays for those who are refused with it


class TaskInfo(msgspec.Struct, frozen=True):
    """What each task says of itself; equal texts ``host`` share memory.

    What is added to it later has a default, so that one release can refuse another by its name.
    """

    host: str
    versions: Versions
    cores: Cores = Cores((), "")
    secret: str = ""
    device: DeviceOfTask = DeviceOfTask()


class Closable(Protocol):
    """What tasks have connected beside or of groups."""

    def close(self) -> None:
        """Leave the others. May be called again."""
        ...


class Rendezvous:
    """The tasks of a job, of which groups with a name exchange tensors.

    Making one connects to nobody: the first `group` meets the other tasks. As a context manager it
    closes its groups at the end.

    Args:
        cluster: The tasks, and which of them this process is.
        device: Where the tensors of the groups are.
        timeout: Seconds that a wait for another task may take; None is ``SPARTITO_TIMEOUT``.
        communication: "auto" is the fastest way: on CPUs of one machine shared memory, of several
            machines sockets, and shared memory inside a machine with several tasks; between
            accelerators torch's process group for them, as NCCL. "sockets" leaves shared memory
            out. "process_group", "ddp" and "fsdp" are gloo on CPUs. See
            `spartito.collectives.membership.ways`.
        host: Processes with equal texts share memory; None finds out.
        recovery: What the tasks do when one is lost; None: the job ends.
        keeper: The rank whose process keeps the store for these tasks alone, whatever the job has;
            None: the job's.

    Raises:
        UserError: An unknown ``communication``, or one that the device cannot have.
    """

    def __init__(
        self,
        cluster: ClusterSpec,
        device: torch.device,
        timeout: float | None = None,
        communication: str = "auto",
        host: str | None = None,
        recovery: Recovery | None = None,
        keeper: int | None = None,
    ) -> None:
        check_communication(communication)
        self._job = self.cluster = cluster
        self.device, self._recovery, self._keeper = device, recovery, keeper
        self._timeout = time_limit(timeout)
        self._communication, self._host = communication, host
        if cluster.world_size > 1 and self._way_of([self._own_device]).group is not None:
            check_drawn()
        self._everybody = self._names = [cluster.name_of(n) for n in range(cluster.world_size)]
        self._groups: dict[str, Collective] = {}
        self._kept: list[Closable] = []
        self._watch, self._trains, self._tries = Watch(), False, 0
        self._leavers = Watch()

    def group(
        self, name: str = WORLD, ranks: Sequence[int] | None = None, *, beside: bool = False
    ) -> Collective:
        """The group of this name, which is made when it is asked for the first time.

        All of its tasks call this together, and tasks that are in several groups ask for these in
        the same order. Groups of one name need no common task, as those of each row of a mesh.

        Args:
            name: What errors call the group.
            ranks: Its tasks by their rank in the job, this one included; None is all. Their rank
                in the group follows that in the job.
            beside: Whether its calls run beside a computation: by sockets, whose waits need no
                core.

        Raises:
            TaskLostError: Names the tasks that did not come within the time limit.
            UserError: On all tasks, where their versions of Spartito or torch do not fit together,
                or their secrets differ and they are to connect by sockets.
        """
        world = range(len(self._names))
        members = tuple(world) if ranks is None else tuple(sorted(set(ranks)))
        if self.cluster.rank not in members or not set(members) <= set(world):
            raise UserError(
                f"group {name!r} of the ranks {list(members)}, asked for by rank "
                f"{self.cluster.rank} of {len(world)}",
                "A task asks for the groups that it is in, of ranks that the job has.",
            )
        before = tuple(world) if name == WORLD else members
        if name in self._groups:
            before = self._groups[name].ranks
        if members != before:
            raise UserError(
                f"group {name!r} has the ranks {list(before)}, and now is to have {list(members)}",
                "Give each group of a task a name of its own.",
            )
        if name not in self._groups:
            made = self._made(name, members, beside)
            made.name, made.ranks = name, members
            if self._groups:  # what calls are for is the same in all groups
                made.follow(next(iter(self._groups.values())).current_call)
            self._groups[name] = made
        return self._groups[name]

    def placement(self) -> Placement:
        """Which tasks are on which machine: those that share memory; all tasks call it."""
        return Placement.of([task.host for task in self._tasks])

    def keep(self, made: Closable) -> None:
        """Close before the groups what was made beside or of them.

        Args:
            made: Nobody asks for it by a name.
        """
        self._kept.append(made)

    def members(self, name: str, ranks: Sequence[int]) -> tuple[Membership, bool, bool]:
        """Where some tasks can meet for connections of their own.

        Args:
            name: What the keys of their store begin with.
            ranks: The tasks, this one included, by their rank in the job.

        Returns:
            The tasks, whether they share memory, and whether there is a core for each.
        """
        tasks = self._tasks
        hosts = {tasks[rank].host for rank in ranks}
        group = self._member(self._store, ranks).under(f"{name}/{ranks[0]}")
        return group, self._way.shares_memory and len(hosts) == 1, self._spins

    def close(self) -> None:
        """Leave all groups. May be called again."""
        self._leave()
        self._watch.stop()
        self._leavers.stop()
        meeting: Meeting | None = self.__dict__.pop("_meeting", None)
        if meeting is not None and meeting.assembly is not None:
            meeting.assembly.close()
        if meeting is not None:
            meeting.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def generation(self) -> int:
        """How often the tasks have agreed anew on who is in the job."""
        return self._meeting.generation.number if "_meeting" in self.__dict__ else 0

    @property
    def joins(self) -> bool:
        """Whether the others train already: this process comes in by `regroup`."""
        alone = self._recovery is None or self._job.world_size == 1
        return not alone and self._meeting.is_newcomer

    def regroup(self, cause: TaskLostError | None) -> ClusterSpec:
        """Leave all groups, and agree with the others on the next generation.

        All members call this when one is lost, or when `somebody_waits` told them all; a newcomer
        calls it before it meets anybody.

        Args:
            cause: Whom this task lost; None for a newcomer, and for those who let it in.

        Returns:
            The cluster of those who train together from now on.

        Raises:
            TaskLostError: They cannot go on; ``cause`` where the job does not recover.
        """
        recovers = self._recovery is not None and self._job.world_size > 1
        if not recovers or (meeting := self._meeting).assembly is None:
            raise cause or UserError("a job that does not recover has no generations")
        self._tries += 1
        if self._tries > MOST_TRIES:
            raise TaskLostError(
                f"the tasks have agreed {MOST_TRIES} times who is there, and could not go on: "
                f"{str(cause).partition(chr(10))[0]}",
                "All reach the job's store: do they reach each other?",
            )
        joins = meeting.is_newcomer
        self._trains |= joins
        self._watch.stop()
        self._leavers.stop()
        self._leave()
        with during(RECOVER), lost_with(meeting.keeper):
            last = None if joins else meeting.generation
            generation = meeting.assembly.regroup(last, cause is not None)
        self.cluster = cluster_of(self._job, generation, meeting.assembly.own)
        self._names = [self._everybody[card.rank] for card in generation.members]
        for found in ("_tasks", "_spins"):
            self.__dict__.pop(found, None)
        self._meeting = replace(meeting, generation=generation)
        in_generation(generation.number)
        self._look_for_newcomers()
        return self.cluster

    def training_begins(self) -> None:
        """Look from now on who comes to a job that goes on with fewer tasks."""
        self._trains = True
        self._look_for_newcomers()

    def look_for_leavers(self) -> None:
        """Look from now on whether others leave this generation, for who seldom meets them."""
        meeting = self._meeting
        if meeting.assembly is not None:
            self._leavers.start(partial(meeting.assembly.is_left, meeting.generation.number))

    @property
    def others_leave(self) -> bool:
        """Whether others were seen to leave this generation: one of them has lost somebody."""
        return self._leavers.seen

    def somebody_waits(self) -> bool:
        """Whether a newcomer was seen: all members are to `regroup` after the same step."""
        self._tries = 0  # there was a step since the last loss
        return self._watch.seen

    def _leave(self) -> None:
        while self._kept:
            self._kept.pop().close()
        while self._groups:
            self._groups.popitem()[1].close()

    def _look_for_newcomers(self) -> None:
        is_smaller = self.cluster.world_size < self._job.world_size
        if self._trains and is_smaller and self.cluster.rank == 0:
            assembly = self._meeting.assembly
            assert assembly is not None
            self._watch.start(assembly.comes)

    @cached_property
    def _meeting(self) -> Meeting:
        """The job's store and the tasks there, once every task has come."""
        quiet_torch()
        with during(CONNECT):
            return meet(self._job, self._everybody, self._timeout, self._recovery, self._keeper)

    @property
    def _store(self) -> KeyValues:
        return self._meeting.keys

    @cached_property
    def _tasks(self) -> list[TaskInfo]:
        """What the tasks say of themselves, by rank; raises on all where they do not fit."""
        world = self._member(self._store, range(len(self._names)))
        rank = self.cluster.rank
        here = (self._host or host_key()) if shares_memory() else f"rank {rank}"
        secret = fingerprint(read_secret())
        own = TaskInfo(here, Versions.own(), Cores.own(), secret, self._own_device)
        text = msgspec.json.encode(own).decode()
        missing, texts = world.under("came as").sign_in(self._timeout, text)
        if missing:
            raise TaskLostError(f"{' and '.join(missing)} is gone")
        tasks = [msgspec.json.decode(each, type=TaskInfo) for each in texts]
        keep_files(world.names)
        try:
            named = dict(zip(world.names, tasks, strict=True))
            check_versions({name: task.versions for name, task in named.items()})
            check_devices({name: task.device for name, task in named.items()})
            hosts = [task.host for task in tasks]
            self._way = self._way_of(compared([task.device for task in tasks], hosts))
            by_torch = self._way.group is not None
            if self._way.shares_memory and not by_torch and self.generation == 0:
                note_sockets(self.cluster)
            if not self._way.shares_memory or len({task.host for task in tasks}) > 1:
                check_secrets({name: task.secret for name, task in named.items()})
        except UserError:
            # The store goes with its keeper: that one leaves when all have read it.
            world.under("refused").missing(FAREWELL)
            raise
        return tasks

    def _member(self, store: KeyValues, ranks: Sequence[int]) -> Membership:
        names = [self._names[rank] for rank in ranks]
        rank = ranks.index(self.cluster.rank)
        return Membership(
            rank, names, store, self._timeout, self._meeting.keeper, self.generation,
            self._meeting.assembly is not None, self._lost(),
        )  # fmt: skip

    def _lost(self) -> Callable[[Collection[str]], Sequence[str]]:
        """Which of the members have certainly ended, for who waits for them."""
        meeting = self._meeting
        if meeting.assembly is None:
            return nobody
        return partial(meeting.assembly.lost, members=meeting.generation.members)

    def _made(self, name: str, ranks: tuple[int, ...], beside: bool) -> Collective:
        if len(self._names) == 1:
            return IdentityCollective()
        tasks = self._tasks  # all come, also to a group of one
        if len(ranks) == 1:
            return IdentityCollective()
        made = self._connected(name, ranks, tasks, beside)
        # Of a mix those of CPUs do as the others: all are in the same calls.
        through_host = self._way.stages or (self._way.group not in (None, "cpu") and beside)
        return StagedCollective(made) if through_host else made

    def _connected(
        self, name: str, ranks: tuple[int, ...], tasks: Sequence[TaskInfo], beside: bool
    ) -> Collective:
        """The group of several tasks that moves what the way of the job can."""
        group = self._member(self._store, ranks).under(f"group/{name}/{ranks[0]}")
        if self._way.group is None or (beside and self._way.group != "cpu"):
            return self._by_host(group, ranks, tasks, beside)
        if name != WORLD:
            self.group()  # torch makes other groups out of the one of all
        host = None
        if self._way.group != "cpu":
            host = self._by_host(group.under("host"), ranks, tasks, beside)
        try:
            return self._process_group(group, name, None if name == WORLD else ranks, host)
        except BaseException:
            if host is not None:
                host.close()
            raise

    def _by_host(
        self,
        group: Membership,
        ranks: tuple[int, ...],
        tasks: Sequence[TaskInfo],
        beside: bool,
    ) -> Collective:
        """The group of several tasks that moves the host's memory."""
        placement = Placement.of([tasks[rank].host for rank in ranks])
        shares = self._way.shares_memory and not beside
        if shares and len(placement.machines) == 1:
            return SharedMemoryCollective(group, self._spins)
        if shares and placement.is_layered:
            return self._hierarchical(group, placement)
        return SocketCollective(group, self._endpoint, job_key(self.cluster))

    @property
    def _endpoint(self) -> Endpoint:
        """Where this task listens for the sockets of a group, as the doctor says it does."""
        by_torch = self._way.group is not None
        return group_endpoint(self.cluster) if by_torch else peer_endpoint(self.cluster)

    @cached_property
    def _spins(self) -> bool:
        """Whether the cores suffice for all tasks of the job on this machine, of any group."""
        own = self._tasks[self.cluster.rank]
        return own.cores.suffice(
            [task.cores for task in self._tasks if task.host == own.host], cgroup_quota()
        )

    def _hierarchical(self, group: Membership, placement: Placement) -> Collective:
        """Shared memory among the tasks of this machine, sockets among the leaders."""
        machine, members = placement.machine_of(group.rank), placement.members(group.rank)
        inside: Collective = IdentityCollective()
        if len(members) > 1:
            names = [group.names[member] for member in members]
            neighbours = replace(group, rank=members.index(group.rank), names=names)
            inside = SharedMemoryCollective(neighbours.under(f"machine/{machine}"), self._spins)

        def meet_leaders() -> Collective:
            names = [group.names[leader] for leader in placement.leaders]
            leaders = replace(group, rank=machine, names=names)
            return SocketCollective(leaders, self._endpoint, job_key(self.cluster))

        return HierarchicalCollective(group.rank, group.names, placement, inside, meet_leaders)

    def _process_group(
        self, group: Membership, name: str, ranks: Sequence[int] | None, host: Collective | None
    ) -> Collective:
        endpoint = group_endpoint(self.cluster)
        device = torch.device(self._way.group or "cpu")
        if interface := chosen_interface():
            go_over(device.type, interface_of(interface))
        if device.type == "cpu":
            check_connections(group.under("ways"), endpoint, job_key(self.cluster))
        return ProcessGroupCollective(group, device, endpoint.host, ranks, name, host)

    @property
    def _own_device(self) -> DeviceOfTask:
        is_shared = are_shared(self.device, self.cluster.local_size)
        return DeviceOfTask(self.device.type, is_shared, self.device.index or 0)

    def _way_of(self, devices: Sequence[DeviceOfTask]) -> Way:
        return way_of(devices, self._communication, self._recovery is not None)


class Part:
    """The rendezvous of some tasks of a job, as if there were no others.

    Args:
        rendezvous: That of the job.
        name: What the group of all of them is called.
        ranks: The tasks, by their rank in the job.
    """

    def __init__(self, rendezvous: Rendezvous, name: str, ranks: Sequence[int]) -> None:
        self._rendezvous, self._name, self._ranks = rendezvous, name, tuple(ranks)
        self.device = rendezvous.device

    def group(
        self, name: str = WORLD, ranks: Sequence[int] | None = None, *, beside: bool = False
    ) -> Collective:
        """As `Rendezvous.group`; ranks are those among these tasks."""
        named = self._name if name == WORLD else name
        return self._rendezvous.group(named, self._of_job(ranks), beside=beside)

    def members(self, name: str, ranks: Sequence[int]) -> tuple[Membership, bool, bool]:
        """As `Rendezvous.members`."""
        return self._rendezvous.members(name, self._of_job(ranks))

    def keep(self, made: Closable) -> None:
        """As `Rendezvous.keep`."""
        self._rendezvous.keep(made)

    def placement(self) -> Placement:
        """As `Rendezvous.placement`."""
        whole = self._rendezvous.placement()
        return Placement.of([str(whole.machine_of(rank)) for rank in self._ranks])

    def close(self) -> None:
        """As `Rendezvous.close`: of the whole job."""
        self._rendezvous.close()

    def _of_job(self, ranks: Sequence[int] | None) -> tuple[int, ...]:
        return self._ranks if ranks is None else tuple(self._ranks[rank] for rank in ranks)


def check_communication(communication: str) -> None:
    """Raise `UserError` for a way that does not exist."""
    if communication not in (*COMMUNICATION, THROUGH_HOST):
        raise UserError(
            f"unknown communication {communication!r}", nearest(communication, COMMUNICATION)
        )


def connect(
    cluster: ClusterSpec,
    device: torch.device,
    timeout: float | None = None,
    communication: str = "auto",
    host: str | None = None,
) -> Collective:
    """The group of all tasks of a `Rendezvous` with these arguments."""
    return Rendezvous(cluster, device, timeout, communication, host).group()
