"""Asynchronous training: workers compute on their own, parameter servers hold the values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from spartito.cluster.limits import time_limit
from spartito.cluster.recovery import Recovery
from spartito.declared import Declared
from spartito.engine.devices.device import choose_device
from spartito.errors import UserError
from spartito.outer.groups import TOKENS, Asked
from spartito.outer.optimizer import OuterOptimizer
from spartito.ps.job import Options
from spartito.ps.protocol.rules import Rules, stale_rules
from spartito.registry import strategy_info
from spartito.steps.outer_loops.outer_loop import OuterLoop
from spartito.steps.parts import Parts
from spartito.steps.placements.replicated import Replicated
from spartito.steps.servers.group_member import cluster_of
from spartito.steps.servers.groups import EVERY, Apart
from spartito.steps.servers.step import Push, ServedStep, ServedTeam, Service, ToServers
from spartito.steps.step import Step
from spartito.steps.team import Team
from spartito.steps.topology import OneShardEach
from spartito.strategies.declaration import Strategy, nested

MIRRORED = "multi_worker_mirrored"
"""What groups hold, unless something else is said."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ParameterServerStrategy(Strategy):
    """Workers push gradients to parameter servers and pull values, each at its own speed.

    The batch size is global: one push is a worker's part of it. Servers compute on CPUs, workers
    where they like: each has one device. With ``recovery`` the job outlives a chief that computes
    nothing: another process goes on from its journal, and is waited for.

    Args:
        max_staleness: None lets nobody wait for anybody; s >= 1 grants a pull only while no push
            can get staler than s updates; 0 averages one push per worker, which equals
            `MirroredStrategy`.
        on_stale: What becomes of a push beyond the bound: "wait" lets it not happen, "reject" has
            it computed again, "scale" divides its learning rate by its staleness (Zhang et al.
            2016, arXiv:1511.05950) in units of the bound, "compensate" corrects its gradient g for
            what the values w moved meanwhile: ``g + strength * g * g * (w_now - w_pulled)``
            (DC-ASGD, Zheng et al. 2017, arXiv:1609.08326), by 0.04 or, as
            ``{"compensate": 0.1}``, another strength. ``{"compensate": 2, "mean_square": 0.95}``
            has it adapt: it is divided by the root of a moving mean, of this decay, of each
            element's squared gradients. The last two take None as a bound of 0.
        aggregate: How many pushes make one update.
        groups: Groups of workers that train apart, each with its own optimizer, and push what they
            have moved: their number, the workers of each (``[[0, 1], [2]]``), or "machine". Inside
            of a group all is synchronous. The servers run the outer optimizer. None: workers push
            gradients.
        every: How many updates a group makes from one push to the next.
        outer: What servers make of the mean of what groups have moved, as under
            `LocalSGDStrategy`: None averages the models.
        quorum: So many groups are waited for and merged together; 1: nobody waits. A group that
            missed its meeting is merged alone when it comes; what is more than ``max_staleness``
            merges old is rejected, and computed again from newer values. With
            ``{"groups": 2, "grace": 0.5}`` others may come for half a second, once two have.
        inside: The strategy of a group's steps, as ``ShardedStrategy(zero=2)``, or its text:
            mirrored, sharded or mesh. What has a model between its tasks takes a chief that
            computes nothing, who evaluates and saves it.
        weights: "tokens": a group counts for what its losses were divided by since its last push;
            "equal": all count the same.
        servers: How they are run, as ``{"replicas": 2, "snapshot_seconds": 30}``:

            * ``replicas``: 2 keeps every value on two servers, either of which may die: an update
              has its reply when both have it. It takes an even number of servers.
            * ``min_shard_bytes``: tensors are cut over the servers where each part keeps so many
              bytes, 256 KiB.
            * ``wire_dtype``: "bf16" halves what is sent over a network; None sends the model's own
              dtype.
            * ``lease_seconds``: a worker that is silent so long (10) is given up, and others get
              its work.
            * ``snapshot_seconds``: how often a server writes the state from which it starts again
              (10); the first ones come sooner, after a tenth of this.
            * ``snapshot_dir``: where; None is ``SPARTITO_SNAPSHOT_DIR``, else a folder in ``/tmp``.
            * ``nan_limit``: pushes that are not finite are dropped; more than so many (100) end
              the training.
            * ``push_log``: a directory where every server records all its updates.
            * ``shared_memory``: False sends everything by sockets, on one machine too.
    """

    name = "parameter_server"
    nests = False
    without = ("sync_batchnorm", "communication")

    max_staleness: int | None = None
    on_stale: str | Mapping[str, float] = "wait"
    aggregate: int = 1
    groups: Asked | None = None
    every: int = EVERY
    outer: OuterOptimizer = None
    quorum: int | Mapping[str, float] = 1
    weights: str = TOKENS
    inside: Strategy | Declared | str = MIRRORED
    servers: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        rules = Rules(0, self.max_staleness, aggregate=self.aggregate, **stale_rules(self.on_stale))
        apart = Apart.of(self.every, self.outer, self.quorum, self.weights)
        self.__dict__["_asked"] = rules, Options.of(self.servers), apart

    def step_of(self, whole: Strategy, outer: OuterLoop | None = None) -> Step:
        """As `Strategy.step_of`: the steps of workers, which meet the servers alone.

        Args:
            whole: Itself.
            outer: None: it cannot be inside of another one.

        Returns:
            What this task does of them.
        """
        self._refuse_inside(whole, outer)
        rules, options, apart = self.__dict__["_asked"]
        recovery = Recovery.from_environment() if self.recovery is None else self.recovery
        options = replace(options, timeout=time_limit(self.timeout), recovery=recovery)
        device = choose_device(self.device, self.cluster)
        team = ServedTeam(self.name, self.job, device)
        if not team.job.is_evaluator:
            team.check(team.cluster)
        team.service = service = Service.of(team, rules, options, self.groups, apart)
        own, inside = service.group_of(team.job.task), self._check_inside(service)
        if service.apart is not None and own >= 0:
            team.name, team.group = inside.name, cluster_of(team.cluster, service.members[own])
            strategy_info(inside.name).check(team.group.world_size, team.group.local_size, 0)
        return ServedStep(team, self.parts(team), flush_denormals=self.flush_denormals)

    def _check_inside(self, service: Service) -> Strategy:
        """What groups hold.

        Args:
            service: What was asked for of the job.

        Raises:
            UserError: It cannot be.
        """
        inside = nested(self.inside, self.job)
        if inside.name != MIRRORED and service.apart is None:
            raise UserError(
                f"inside={inside} without groups under parameter_server",
                f"Add groups={len(service.workers)}, or leave it out.",
            )
        has_chief = "chief" in self.job.addresses or not service.in_groups
        strategy_info(self.name).check_inside(strategy_info(inside.name), has_chief)
        inside._refuse_inside(self, None)
        return inside

    def parts(self, team: Team) -> Parts:
        """As `Strategy.parts`.

        Args:
            team: The tasks that make its steps.

        Returns:
            What these are made of: in a group those of the strategy that it holds.
        """
        assert isinstance(team, ServedTeam), "made above"
        if team.group is None:
            inner = ToServers()
            return Parts(OneShardEach(), Replicated(team, inner), Push(team, inner))
        held = nested(self.inside, self.job).parts(team)
        return replace(held, exchange=Push(team, held.exchange))
