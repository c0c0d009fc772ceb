"""Which tasks make a group that trains apart, and how groups are connected."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from spartito.cluster.spec import ClusterSpec
from spartito.collectives.collective import Collective, IdentityCollective, Traffic
from spartito.collectives.lane import Lane
from spartito.collectives.membership.placement import Placement
from spartito.collectives.membership.rendezvous import WORLD, Part, Rendezvous
from spartito.errors import UserError
from spartito.outer.delayed_step import Now
from spartito.outer.groups import MACHINE, Asked, Members, Sites, check_alike, groups_of, sites_of
from spartito.outer.joined_groups import JoinedGroups
from spartito.outer.sites import JoinedSites
from spartito.steps.groups import ALIKE, DATA, MODEL, REPLICAS, SHARDS, Connect

INSIDE, BETWEEN, FAR = "group", "leaders", "sites"
"""The tasks of one's own group; the first one of each group; the first one of each site."""
COLUMN = "same part"
"""The tasks of all groups that have the same part of the model as this one."""

Found = Mapping[str, Collective]


class Grouping:
    """The groups of a job, and how they are connected; it does not know what holds inside of one.

    Args:
        asked: What the user said.
        sites: Likewise.
        apart: Whether even a single group has meetings.
        beside: Whether these are held beside the computation.
        alike: Whether groups are to be of one size: their tasks have a model between them.
    """

    column: JoinedGroups | None = None
    """The tasks of all groups that have the same part of the model, by groups or by sites; of whole
    models all. None where nothing is coupled."""
    near: JoinedGroups | None = None
    """Those of one's own site by their groups; without sites all of `column`."""

    def __init__(self, asked: Asked, sites: Sites, apart: bool, beside: bool, alike: bool) -> None:
        self._asked, self._asked_sites, self._alike = asked, sites, alike
        self._apart, self._beside = apart, beside
        self.members: Members = ()
        self.sites: Members = ()
        self.count = 0
        """How many groups the job has."""
        self.numbers: tuple[int, ...] = ()
        """Those of the groups among the groups of the job, of which some may be lost."""
        self._index = 0

    def inside(self, cluster: ClusterSpec) -> ClusterSpec:
        """As `OuterLoop.inside`; of machines that nobody has counted yet, those of this one."""
        if self._asked == MACHINE and not self.members:
            first = cluster.rank - cluster.local_rank
            return cluster.part(range(first, first + cluster.local_size))
        machines = self.members if self._asked == MACHINE else ()
        members = self._present(machines, cluster)[0]
        self._check(members)
        return cluster.part(next(group for group in members if cluster.rank in group))

    def data_shard(self, own: tuple[int, int], cluster: ClusterSpec) -> tuple[int, int]:
        """As `OuterLoop.data_shard`; shards are counted in the order of their tasks' ranks."""
        if own[1] == self.inside(cluster).world_size:
            return cluster.rank, cluster.world_size
        if self.column is not None:
            return self.column.rank, self.column.world_size
        index, count = own
        groups = cluster.world_size // self.inside(cluster).world_size
        group = cluster.rank // self.inside(cluster).world_size
        return group * count + index, groups * count

    def connect(self, rendezvous: Rendezvous, cluster: ClusterSpec, inner: Connect) -> Found:
        """As `OuterLoop.connect`."""
        everybody = (tuple(range(cluster.world_size)),)
        machines = rendezvous.placement().machines if cluster.world_size > 1 else everybody
        self.members, self.numbers = self._present(machines, cluster)
        self.sites = self._check(self.members)
        self.count = max(self.count, len(self.members))
        self._apart |= self.column is not None
        if len(self.members) == 1 and not self._apart:
            found = dict(inner(rendezvous, cluster))
            return {REPLICAS: found[DATA], **found}
        self._index = Placement(self.members).machine_of(cluster.rank)
        members = self.members[self._index]
        there = cast("Rendezvous", Part(rendezvous, INSIDE, members))
        own = inner(there, self.inside(cluster))
        inside, replicas, parts = own[WORLD], own[DATA], own[MODEL]
        shards = own.get(SHARDS, IdentityCollective())
        levels = _Levels(rendezvous, cluster)
        if self.sites:
            return {**own, INSIDE: inside, **self._connect_sites(levels, inside)}
        shares = shards.world_size > 1 and parts.world_size == 1
        if parts.world_size == 1:
            column = world = levels.join(JoinedGroups, BETWEEN, self.members, inside, shares)
        else:
            world = levels.join(JoinedGroups, "groups", self.members, inside)
            positions = [members.index(rank) for rank in replicas.ranks]
            alike = [tuple(group[at] for at in positions) for group in self.members]
            if alike != sorted(alike):
                raise UserError(
                    f"groups={[list(group) for group in self.members]} of tasks that have a model "
                    "between them: the first ones of all groups, the second ones and so on are to "
                    "follow one another in the same order",
                    f"Take neighbours: groups={len(self.members)}.",
                )
            column = levels.join(JoinedGroups, COLUMN, alike, replicas)
            column.name = COLUMN
            rendezvous.keep(column)
        rendezvous.keep(world)
        self.column = self.near = column
        found = {**own, WORLD: world, DATA: column, REPLICAS: replicas, INSIDE: inside}
        first = 0 if parts.world_size == 1 else members.index(replicas.ranks[0])
        at = inside.rank if shares else first
        meeting = [group[at] for group in self.members]
        if shares:
            found[ALIKE] = rendezvous.group(ALIKE, meeting)
            found[ALIKE].traffic, found[ALIKE].moved = Traffic(), inside.heartbeat
            column.line = Now(found[ALIKE])
        self._hold_beside(rendezvous, cluster, meeting, inside)
        return {**found, BETWEEN: column.between}

    def _connect_sites(self, levels: _Levels, inside: Collective) -> Found:
        """The groups of a task whose group is in a site."""
        sites = [[self.members[group] for group in site] for site in self.sites]
        own = next(groups for groups in sites if self.members[self._index] in groups)
        self.near = levels.join(JoinedGroups, BETWEEN, own, inside)
        whole = [tuple(sorted(rank for group in groups for rank in group)) for groups in sites]
        self.column = world = levels.join(JoinedSites, FAR, whole, self.near)
        levels.rendezvous.keep(world)
        leaders = [group[0] for group in self.members]
        self._hold_beside(levels.rendezvous, levels.cluster, leaders, inside)
        return {
            WORLD: world, DATA: world, REPLICAS: inside, FAR: world.between,
            BETWEEN: self.near.between,
        }  # fmt: skip

    def _hold_beside(
        self,
        rendezvous: Rendezvous,
        cluster: ClusterSpec,
        meeting: Sequence[int],
        inside: Collective,
    ) -> None:
        """Connect those who meet once more, for meetings beside the computation."""
        if self._beside and cluster.rank in meeting and self.column is not None:
            line = rendezvous.group("meetings", meeting, beside=True)
            line.moved = inside.heartbeat
            self.column.line = Lane(line)

    def _present(
        self, machines: Sequence[Sequence[int]], cluster: ClusterSpec
    ) -> tuple[Members, tuple[int, ...]]:
        """The groups of the tasks that are there, by their ranks now, and which of the job's."""
        if self._asked == MACHINE:
            members = groups_of(self._asked, machines, cluster.world_size)
            return members, tuple(range(len(members)))
        job = cluster.all_replica_tasks
        now = {
            rank: cluster.replica_tasks.index(t)
            for rank, t in enumerate(job)
            if t not in cluster.absent
        }
        all_ = groups_of(self._asked, (), len(job))
        left = [tuple(now[rank] for rank in group if rank in now) for group in all_]
        return tuple(filter(None, left)), tuple(n for n, group in enumerate(left) if group)

    def _check(self, members: Members) -> Members:
        """The sites of these groups; `UserError` for what cannot be."""
        sites = sites_of(self._asked_sites, len(members))
        if self._alike:
            check_alike(members)
        if self._alike and sites:
            raise UserError(
                f"sites={self._asked_sites!r} of groups whose tasks have a model between them",
                "Leave sites out: groups of sites have the whole model on each replica.",
            )
        return sites

    @property
    def has_sites(self) -> bool:
        """Whether groups are in sites."""
        return self._asked_sites is not None

    @property
    def index(self) -> int:
        """The number of one's own group."""
        return 0 if self.column is None else self._index

    @property
    def like(self) -> dict[str, Any]:
        """What a checkpoint must be of for groups to go on where they were."""
        sites = [list(site) for site in self.sites]
        return {"count": len(self.members), **({"sites": sites} if sites else {})}

    @property
    def shards(self) -> tuple[tuple[int, ...], ...]:
        """The data shards of each group."""
        column = self.column
        if column is None:
            return ()
        at = {rank: number for number, rank in enumerate(column.ranks)}
        return tuple(tuple(at[r] for r in group if r in at) for group in self.members)

    @property
    def is_leader(self) -> bool:
        """Whether this task speaks for the data shards of its group."""
        return self.near is not None and self.near.is_leader


@dataclass(frozen=True, slots=True)
class _Levels:
    """Joins tasks by parts of them."""

    rendezvous: Rendezvous
    cluster: ClusterSpec

    def join(
        self,
        kind: type[JoinedGroups],
        name: str,
        parts: Sequence[Sequence[int]],
        own: Collective,
        all_speak: bool = False,
    ) -> JoinedGroups:
        """Join the ranks of these ``parts``, of which ``own`` is this task's, by their first.

        Where ``all_speak`` each of them exchanges something with other parts.
        """
        ranks = sorted(rank for part in parts for rank in part)
        placement = Placement(tuple(tuple(map(ranks.index, part)) for part in parts))
        leaders = [part[0] for part in parts]
        rank, rendezvous = self.cluster.rank, self.rendezvous
        words, speakers = f"reasons of {name}", ranks if all_speak else leaders
        joined = kind(
            ranks.index(rank),
            [self.cluster.name_of(rank) for rank in ranks],
            placement,
            own,
            lambda: rendezvous.group(name, leaders),
            rendezvous.members(words, speakers)[0] if rank in speakers and len(parts) > 1 else None,
        )
        joined.ranks = tuple(ranks)
        joined.between.traffic = Traffic()
        return joined


def words_of(like: Mapping[str, Any]) -> str:
    """What `Grouping.like` says, in words."""
    sites = f" in the sites {like['sites']}" if "sites" in like else ""
    return f"{like['count']} groups{sites}"
