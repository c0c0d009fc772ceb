"""The tasks that make steps together, as one of them sees them: what all parts of a step know."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch

from spartito.accelerators import use
from spartito.cluster.recovery import Recovery
from spartito.cluster.spec import ClusterSpec
from spartito.collectives.collective import Collective, IdentityCollective
from spartito.collectives.membership.rendezvous import Rendezvous
from spartito.data.batch import Batch
from spartito.engine.gradients import clipping
from spartito.errors import TaskLostError
from spartito.registry import strategy_info, strategy_names
from spartito.steps.coordination import Coordination, SynchronousCoordination
from spartito.steps.groups import Groups
from spartito.steps.outer_loops.outer_loop import EveryStep, OuterLoop
from spartito.steps.prepared import Pairs
from spartito.steps.topology import OneShardEach, Topology

if TYPE_CHECKING:
    from spartito.steps.parts import Parts


class Team:
    """The tasks of a job that compute, and which of them this one is.

    Making one connects to nobody: that is done when a group is needed first.

    Args:
        name: Of the strategy whose steps they make; inside of groups that of the inner one.
        job: All tasks of the job.
        device: Where this process computes: from now on wherever nobody says another.
        outer: What stands around the steps; None: nothing.
        timeout: Seconds that a wait for another task may take; None is ``SPARTITO_TIMEOUT``.
        communication: As under `spartito.strategies.Strategy`.

    Attributes:
        cluster: The tasks that train now; an evaluator is alone.
        topology: Which tasks are connected, and which data shard is whose.
        groups: This task's, by their names.
        replicas: Those whose gradients make one update, once they have met.
        model: The tasks that have one model between them, likewise.
        pairs: All models and optimizers that were prepared.
        coordination: What the tasks agree on beside the computation.
        recovery: How a training goes on when a task is lost; None: it ends.
        closing: What is to be let go of before the groups are left.
    """

    recovery: Recovery | None = None

    def __init__(
        self,
        name: str,
        job: ClusterSpec,
        device: torch.device,
        outer: OuterLoop | None = None,
        timeout: float | None = None,
        communication: str = "auto",
    ) -> None:
        self.name, self.job, self.device = name, job, device
        use(device)
        self.outer: OuterLoop = outer or EveryStep()
        self.communication, self._timeout = communication, timeout
        self.cluster = job.apart() if job.is_evaluator else job
        self.topology: Topology = OneShardEach()
        self.groups = Groups.alone()
        self.replicas: Collective = IdentityCollective()
        self.model: Collective = IdentityCollective()
        self.pairs = Pairs()
        self.closing: list[Callable[[], object]] = []
        self.coordination: Coordination

    def form(self, parts: Parts) -> None:
        """Decide which tasks are connected, and what they agree on from now on.

        Args:
            parts: What their steps are made of.
        """
        self.topology = topology = parts.topology
        rendezvous = Rendezvous(
            self.cluster, self.device, self._timeout, self.communication, recovery=self.recovery
        )
        connect = partial(self.outer.connect, inner=topology.connect)
        self.groups = Groups(rendezvous, self.cluster, connect)
        made = SynchronousCoordination(
            self.called, self.job, self.cluster, self.pairs, self.groups, self.outer
        )
        made.agreements = parts.placement.agreement, parts.exchange.agreement
        made.account = parts.placement.account
        self.coordination = made

    def check(self, cluster: ClusterSpec) -> None:
        """Refuse a cluster on which the strategy cannot run. Pure.

        Args:
            cluster: The tasks that would train.

        Raises:
            UserError: If it is refused; its hint names a strategy that can.
        """
        own = self.outer.inside(cluster)
        for name, tasks in ((self.outer.name, cluster), (self.name, own)):
            if name in strategy_names():
                servers = len(cluster.addresses.get("ps", ()))
                strategy_info(name).check(tasks.world_size, tasks.local_size, servers)

    def meet(self) -> None:
        """Connect the groups, unless they are; all tasks call it."""
        self.replicas, self.model = self.groups.replicas, self.groups.model

    def watch_clipping(self, divides: bool) -> None:
        """Refuse clipping by hand, from now on, where it would go wrong.

        Args:
            divides: Whether the exchange gives each task other parts of the gradients.
        """
        clipping.watch(self.pairs, divides or self.model.world_size > 1, self.several)

    def forget_clipping(self) -> None:
        """Refuse no clipping any more: there are no more steps."""
        clipping.forget(self.pairs)

    def regroup(self, cause: TaskLostError | None) -> bool:
        """Leave all groups, and meet those who live, and those who are new; all of them call it.

        Args:
            cause: The loss; None where nobody was lost.

        Returns:
            Whether this task was there when the others met last.

        Raises:
            TaskLostError: Too few are left, or none of them is this one.
        """
        before = self.groups.generation
        self.cluster = self.coordination.cluster = self.groups.regroup(cause)
        return self.groups.generation == before + 1

    @property
    def called(self) -> str:
        """What the user calls the whole."""
        return self.outer.name or self.name

    @property
    def tasks(self) -> ClusterSpec:
        """The tasks whose steps these are, by their ranks among them: those of one's own group."""
        return self.outer.inside(self.cluster)

    @property
    def is_chief(self) -> bool:
        """Whether this task writes files and prints."""
        return self.cluster.is_chief

    @property
    def own_shard(self) -> tuple[int, int]:
        """Which part this task reads of what one's own group does, as (index, count)."""
        return self.topology.shard(self.tasks)

    @property
    def data_shard(self) -> tuple[int, int]:
        """Which part of every global batch this task reads, as (index, count)."""
        return self.outer.data_shard(self.own_shard, self.cluster)

    @property
    def num_replicas(self) -> int:
        """The copies of the model that compute."""
        return self.data_shard[1]

    @property
    def several(self) -> bool:
        """Whether the gradients of several tasks make one update."""
        return self.replicas.world_size > 1

    # How a batch is divided (`spartito.steps.placements.computation.Division`)

    @property
    def divides(self) -> bool:
        """As `Division.divides`."""
        return self.num_replicas > 1

    @property
    def runs_without_rows(self) -> bool:
        """As `Division.runs_without_rows`."""
        return self.groups.world.world_size > 1

    def divisor(self, batch: Batch) -> float:
        """As `Division.divisor`: the planned size of an update's batch.

        Args:
            batch: Any of them.
        """
        return float(batch.global_size)

    def is_so_for_one(self, found: bool) -> bool:
        """As `Division.is_so_for_one`.

        Args:
            found: Whether it is so here.
        """
        group = self.groups.data
        if group.world_size == 1:
            return found
        return bool(group.all_reduce(torch.tensor([float(found)])).item())
