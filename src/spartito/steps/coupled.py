"""What groups that train apart have beside their strategy: connections, decisions, batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import nan
from typing import Any

import torch
from torch import Tensor, nn

from spartito.cluster.spec import ClusterSpec
from spartito.collectives.collective import Collective, IdentityCollective, Traffic
from spartito.collectives.lane import Lane
from spartito.collectives.placement import Placement
from spartito.collectives.rendezvous import WORLD, Rendezvous
from spartito.engine.buffers import shared_buffers
from spartito.engine.optimizers import unwrap
from spartito.engine.sharding.homes import Home
from spartito.errors import UserError
from spartito.local.flight import Now
from spartito.local.fragments import Fragments
from spartito.local.joined import JoinedGroups
from spartito.local.plan import Asked, Members, Sites, check_alike, groups_of, sites_of
from spartito.local.sites import JoinedSites
from spartito.log import warn
from spartito.steps.base import Step
from spartito.steps.coordination import compare_values
from spartito.steps.group_states import SECTION
from spartito.steps.groups import DATA, MODEL, one_shard_each
from spartito.steps.shards import COPIES, SHARDS, ShardedCoordination
from spartito.steps.sharing import Placed

INSIDE, BETWEEN, FAR, ALIKE = "group", "leaders", "sites", "same shard"
"""The tasks of one's own group; the first one of each group; the first one of each site; those who
have the same shard of a model."""
GROUP_LOSS = "loss_of_group_"
LEVELS = (
    ("meetings", "drift", "bytes_between_groups"),
    ("meetings_of_sites", "drift_of_sites", "bytes_between_sites"),
)
MEETINGS, EXCHANGES = "meeting_wait_fraction", "meeting_exchange_fraction"
SKIPPED = "skipped"
"""Figures of an epoch."""


class Grouping:
    """Which tasks make a group, and how they are connected; it does not know its strategy.

    Args:
        asked: What the user said.
        apart: Whether even a single group has meetings.
        beside: Whether these are held beside the computation.
        in_shards: Whether the tasks of a group have a model between them.
    """

    world: JoinedGroups | None = None
    """All tasks, by their groups or by their sites; None where nothing is coupled."""
    near: JoinedGroups | None = None
    """The tasks of one's own site by their groups; without sites all."""

    def __init__(
        self, asked: Asked, sites: Sites, apart: bool, beside: bool, in_shards: bool
    ) -> None:
        self._asked, self._asked_sites, self._apart = asked, sites, apart
        self._beside, self._in_shards = beside, in_shards
        self.members: Members = ()
        self.sites: Members = ()

    def connect(self, rendezvous: Rendezvous, cluster: ClusterSpec) -> Mapping[str, Collective]:
        """Find this task's groups; all tasks call it."""
        everybody = (tuple(range(cluster.world_size)),)
        machines = rendezvous.placement().machines if cluster.world_size > 1 else everybody
        self.members = groups_of(self._asked, machines, cluster.world_size)
        self.sites = sites_of(self._asked_sites, len(self.members))
        if self._in_shards:
            check_alike(self.members)
        alone = {COPIES: IdentityCollective()}
        if len(self.members) == 1 and not self._apart:
            found = one_shard_each(rendezvous, cluster)
            return {**found, **alone, SHARDS: found[WORLD]}
        self._index = Placement(self.members).machine_of(cluster.rank)
        inside = rendezvous.group(INSIDE, self.members[self._index])
        levels = _Levels(rendezvous, cluster)
        if not self.sites:
            self.world = self.near = levels.join(
                JoinedGroups, BETWEEN, self.members, inside, self._in_shards
            )
            found = {}
        else:
            sites = [[self.members[group] for group in site] for site in self.sites]
            own = next(groups for groups in sites if self.members[self._index] in groups)
            near = self.near = levels.join(JoinedGroups, BETWEEN, own, inside)
            whole = [tuple(sorted(rank for group in groups for rank in group)) for groups in sites]
            self.world = levels.join(JoinedSites, FAR, whole, near)
            found = {FAR: self.world.between}
        rendezvous.keep(self.world)
        meeting = [each[inside.rank if self._in_shards else 0] for each in self.members]
        if self._in_shards:
            found = {**alone, SHARDS: inside, ALIKE: rendezvous.group(ALIKE, meeting)}
            found[ALIKE].traffic, found[ALIKE].moved = Traffic(), inside.heartbeat
            self.world.line = Now(found[ALIKE])
        if self._beside and cluster.rank in meeting:
            line = rendezvous.group("meetings", meeting, beside=True)
            line.moved = inside.heartbeat
            self.world.line = Lane(line)
        found |= {WORLD: self.world, DATA: self.world, MODEL: IdentityCollective()}
        return {**found, INSIDE: inside, BETWEEN: self.near.between}

    @property
    def index(self) -> int:
        """The number of one's own group."""
        return 0 if self.world is None else self._index

    @property
    def like(self) -> dict[str, Any]:
        """What a checkpoint must be of for groups to go on where they were."""
        sites = [list(site) for site in self.sites]
        return {"count": len(self.members), **({"sites": sites} if sites else {})}

    @property
    def is_leader(self) -> bool:
        """Whether this task speaks for its group."""
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


class LocalCoordination(ShardedCoordination):
    """As `ShardedCoordination`, of groups that may have different values.

    Args:
        strategy: Whose it is; only its names, cluster and groups are kept.
        grouping: Its groups.
        couplings: Of its pairs, by the id of their optimizer.
        homes: Of parameters that are kept in shards, by their ids.
        is_whole: Whether each replica has all values of parameters.
    """

    def __init__(
        self,
        strategy: Step,
        grouping: Grouping,
        couplings: Mapping[int, Fragments],
        homes: Mapping[int, Home],
        is_whole: bool,
    ) -> None:
        job, cluster, pairs = strategy.job, strategy.cluster, strategy._pairs
        super().__init__(strategy.name, job, cluster, pairs, strategy.groups, homes, is_whole)
        self._grouping, self._couplings = grouping, couplings

    def describe(self) -> dict[str, Any]:
        members = [list(group) for group in self._grouping.members]
        sites = [list(site) for site in self._grouping.sites]
        found = {"groups": members, "sites": sites}
        return {**super().describe(), **{name: each for name, each in found.items() if each}}

    def figures(self, own: Sequence[float]) -> dict[str, float]:
        """Meetings, their drift (mean) and bytes (of all groups), and the loss of each group."""
        grouping = self._grouping
        if grouping.world is None:
            return {}
        met = [
            each
            for pair in self._pairs.in_use
            if id(pair.optimizer) in self._couplings
            for each in self._couplings[id(pair.optimizer)].take_meetings()
        ]
        levels = LEVELS if grouping.sites else LEVELS[:1]
        left_out = sum(each.take_left_out() for each in self._couplings.values())
        brought = list(own)
        for level in range(len(levels)):
            of_level = [each[level] for each in met]
            brought += [sum(each.count for each in of_level), sum(each.drift for each in of_level)]
            brought.append(sum(each.nbytes for each in of_level))
        brought.append(left_out)
        rows = self._groups.world.all_gather(torch.tensor(brought, dtype=torch.float64))
        leaders = [rows[group[0]].tolist() for group in grouping.members]
        figures: dict[str, float] = {}
        for level, (meetings, drift, nbytes) in enumerate(levels):
            at = len(own) + 3 * level
            drifts = [leaders[site[0]][at + 1] for site in grouping.sites or ((0,),)]
            count = leaders[0][at]
            mean = sum(drifts) / len(drifts) / count if count else 0.0
            sent = sum(row[at + 2].item() for row in rows)
            figures |= {meetings: int(count), drift: mean, nbytes: sent}
        losses = {
            f"{GROUP_LOSS}{index}": loss / weight if weight else nan
            for index, (loss, weight, *_) in enumerate(leaders)
        }
        if self.skips_nonfinite:  # by any group
            figures[SKIPPED] = int(sum(leader[-1] for leader in leaders))
        return {**figures, **losses}

    @property
    def skips_together(self) -> bool:
        return self._grouping.world is None or len(self._grouping.members) == 1

    def tell_left_out(self, count: int) -> None:
        """Say that one's own group has left out an update, the ``count``-th of this epoch.

        The chief says it of its own.
        """
        if self._grouping.is_leader and not self.cluster.is_chief:
            warn(
                "loss or gradients of group %d were not finite: an update left out (%d in this "
                "epoch)",
                self._grouping.index,
                count,
            )

    def check_shown(self, coupling: Fragments) -> None:
        """Refuse, on all tasks, what one has written into the merged model that is shown."""

        def check() -> str:
            coupling.check_shown()
            return ""

        with self.during("data"):
            self.attempt(check)

    def waits(self, data: float, seconds: float) -> dict[str, float]:
        found = super().waits(data, seconds)
        if self._grouping.world is None:
            return found
        held = sum(each.take_seconds() for each in self._couplings.values())
        blocked = sum(each.take_blocked() for each in self._couplings.values())
        means = {MEETINGS: held, EXCHANGES: blocked}
        return {**found, **{name: self._mean(each / seconds) for name, each in means.items()}}

    def synchronize(self) -> None:
        super().synchronize()
        if self._grouping.world is not None:
            for pair in self._pairs.in_use:
                own = shared_buffers(unwrap(pair.model), with_synchronized=False)
                self._settle(self._groups.world, own, is_strict=False)
        for pair in self._pairs.in_use:
            coupling = self._couplings.get(id(pair.optimizer))
            if coupling is not None and coupling.show():
                pair.gradients.written()

    def compare_models(self, model: nn.Module) -> None:
        """Refuse a task that has another model than the chief; all tasks call it."""
        kinds = {n: f"{tuple(p.shape)} {p.dtype}" for n, p in unwrap(model).named_parameters()}
        own = repr({"class": type(unwrap(model)).__name__, **kinds})
        first, *others = self.tell_all(own)
        for rank, text in enumerate(others, 1):
            if text != first:
                raise UserError(
                    f"{self.cluster.name_of(rank)} has another model than "
                    f"{self.cluster.name_of(0)}",
                    "All tasks of all groups build the same one.",
                )

    def _compare(self, order: int) -> str:
        if any(each.is_apart and not each.shows_merged for each in self._couplings.values()):
            self._compare_in(self._groups[INSIDE], self._parameters(), order)
            return ""
        super()._compare(order)
        if not self._is_whole and ALIKE in self._groups:
            compare_values(self._groups[ALIKE], self._shards)
        return ""

    def compare(self, order: int = 0) -> None:
        if self._is_whole:
            super().compare(order)
        else:  # all hear of it, not only those with the same shard

            def compare() -> str:
                self.settle()  # who has written something else is told to all groups, too
                return self._compare(order)

            self.attempt(compare)
            self.compare_buffers()
        self._pairs.unseen = False

    def _settle_buffers(self) -> str:
        """Inside of a group as under others; groups differ, until their merged model is shown."""
        if self._grouping.world is None:
            return super()._settle_buffers()
        self._settle_all(self._groups[INSIDE])
        return ""

    @property
    def _writing(self) -> Collective:
        return self._groups.get(INSIDE, self._groups.data)

    @property
    def _shards(self) -> list[Tensor]:
        """What this task has of all blocks."""
        return [home.own for home in dict.fromkeys(self._homes.values())]


def told(like: Mapping[str, Any]) -> str:
    """What `Grouping.like` says, in words."""
    sites = f" in the sites {like['sites']}" if "sites" in like else ""
    return f"{like['count']} groups{sites}"


class Coupled(Placed):
    """Batches of a replica whose results are those of its group alone.

    Args:
        groups: The tasks by their groups, those of one's own site at least.
        *args: As under `Placed`.
    """

    alike = False

    def __init__(self, groups: JoinedGroups, *args: Any) -> None:
        super().__init__(*args)
        self._groups = groups

    def total(self, shared: Sequence[float], own: Sequence[float]) -> list[float]:
        counts = float(self._groups.is_leader)  # a group's tasks have the same sums
        return super().total((), [*(value * counts for value in shared), *own])

    @property
    def _rank(self) -> int:
        saved = None if self._pairs is None else self._pairs.only.saved
        return self._groups.inside.rank if saved and SECTION in saved else super()._rank
