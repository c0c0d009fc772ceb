"""Groups that train apart over parameter servers: what a user may ask for, and their figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite, nan
from typing import Any

from torch import nn
from torch.optim import Optimizer

from spartito.cluster.spec import ClusterSpec, Task
from spartito.engine.modules.batchnorm import has_batchnorm
from spartito.errors import UserError
from spartito.names import nearest, plural
from spartito.notes import warn
from spartito.numeric import is_number, is_whole
from spartito.outer.groups import TOKENS, Asked, Members, check_weights, groups_of, updates_between
from spartito.outer.optimizer import OuterOptimizer, choose, make_outer
from spartito.ps.protocol.rules import Rules
from spartito.ps.scheduler.gathering import Done
from spartito.wire.addresses import split_address

EVERY = 20
GROUP_LOSS, GROUP_MERGES, BYTES = "loss_of_group_", "merges_of_group_", "bytes_between_groups"
"""Figures of an epoch."""


@dataclass(frozen=True, slots=True)
class Apart:
    """How groups train apart, and are merged."""

    every: int = EVERY
    outer: OuterOptimizer = None
    quorum: int = 1
    grace: float = 0.0
    weights: str = TOKENS

    members: Members = ()
    """The workers of each group."""

    @classmethod
    def of(cls, every: int, outer: OuterOptimizer, quorum: object, weights: str) -> Apart:
        """What a user has said of groups; a ``quorum`` of a mapping has a ``grace`` too.

        Raises:
            UserError: A key of the mapping is neither.
        """
        said: Mapping[Any, Any] = quorum if isinstance(quorum, Mapping) else {"groups": quorum}
        for name in said:
            if name not in ("groups", "grace"):
                raise UserError(f"quorum={dict(said)!r}", nearest(str(name), ("groups", "grace")))
        return cls(every, outer, said.get("groups", 1), said.get("grace", 0.0), weights)

    def check(self, asked: Asked, cluster: ClusterSpec, workers: Sequence[Task]) -> Members:
        """The workers of each group; `UserError` for what those of ``cluster`` cannot be."""
        updates_between(self.every, None)
        check_weights(self.weights)
        choose(self.outer)
        members = groups_of(asked, machines(cluster, workers), len(workers), "worker")
        count = len(members)
        quorum, grace = self.quorum, self.grace
        if not is_whole(quorum) or not 1 <= quorum <= count:
            raise UserError(
                f"quorum={quorum!r} of {plural(count, 'group')}",
                f"So many groups are waited for: from 1 (nobody waits) to {count} (all); "
                'quorum={"groups": 1, "grace": 0.5} waits half a second for others.',
            )
        if not is_number(grace) or not (isfinite(grace) and grace >= 0):
            raise UserError(
                f"a grace of {grace!r}",
                'Seconds that others may come, 0 or more: quorum={"groups": 1, "grace": 0.5}.',
            )
        return members

    def optimizer(self, own: Optimizer) -> Optimizer:
        """The servers' optimizer, of the parameters that a group's ``own`` has."""
        parameters = [p for group in own.param_groups for p in group["params"]]
        if not parameters:
            raise UserError(
                "groups over parameter servers, and an optimizer without parameters",
                "Give the Trainer an optimizer; to evaluate or to predict alone choose mirrored.",
            )
        return make_outer(choose(self.outer), parameters)


def machines(cluster: ClusterSpec, workers: Sequence[Task]) -> list[list[int]]:
    """The indices of the workers on each machine, as their addresses say."""
    listed = cluster.addresses.get("worker", ())
    hosts = [split_address(address)[0] for address in listed] or [""] * len(workers)
    return [[i for i, h in enumerate(hosts) if h == host] for host in dict.fromkeys(hosts)]


def apart(
    groups: Asked | None,
    asked: Apart,
    rules: Rules,
    cluster: ClusterSpec,
    workers: Sequence[Task],
) -> Apart | None:
    """How ``groups`` train apart; None where there are none. Raises `UserError`."""
    if groups is None:
        for name in ("every", "outer", "quorum", "grace", "weights"):
            if getattr(asked, name) != getattr(Apart(), name):
                raise UserError(
                    f"{name}={getattr(asked, name)!r} without groups under parameter_server",
                    f"Add groups={len(workers)}, or leave it out.",
                )
        return None
    members = asked.check(groups, cluster, workers)
    if rules.aggregate > 1:
        raise UserError(
            f"aggregate={rules.aggregate} with groups={groups!r}",
            "quorum says how many groups are merged together: leave aggregate out.",
        )
    if rules.on_stale not in ("wait", "reject"):
        raise UserError(
            f"on_stale={rules.on_stale!r} with groups={groups!r}",
            "What is staler than max_staleness is rejected: leave on_stale out.",
        )
    return replace(asked, members=members)


def members_of(asked: Apart | None, workers: Sequence[Task]) -> Members:
    """The workers of each group; without groups each is one."""
    return tuple((index,) for index in range(len(workers))) if asked is None else asked.members


def check_length(every: int, steps: int | None, accumulate: int) -> None:
    """Say that an epoch of so many ``steps`` is shorter than what a group does between pushes.

    Args:
        every: Updates between two pushes; 0 where groups do not train apart.
        steps: Global batches; None: nobody knows yet.
        accumulate: Global batches of an update.
    """
    updates = None if steps is None else -(-steps // accumulate)
    if updates is not None and updates < every:
        warn(
            "every=%d, and an epoch has %s: groups push what they have moved at its end",
            every,
            plural(updates, "update"),
        )


def tell_of_statistics(rules: Rules, model: nn.Module) -> None:
    """Say that nobody computes with the merged model whose running statistics are evaluated.

    Args:
        rules: Those of the job.
        model: What is trained.
    """
    alone = rules.every > 0 and rules.workers > 1 and rules.quorum == 1 and not rules.grace
    if alone and has_batchnorm(model):
        warn(
            "BatchNorm in groups that are merged one by one: the running statistics are of the "
            "groups' models, so early on the merged model validates worse than its weights are. "
            "quorum=%d, or a grace of seconds for groups of about one speed, has them meet",
            rules.workers,
        )


def figures(done: Mapping[int, Done], groups: int) -> dict[str, float]:
    """What was merged of each of so many groups, as figures of an epoch."""
    own = [done.get(group, Done()) for group in range(groups)]
    merges = sum(each.merges for each in own)
    return {
        "merges": merges,
        "merged_alone": sum(each.alone for each in own),
        "staleness": sum(each.staleness for each in own) / merges if merges else 0.0,
        "rejected": sum(each.rejected for each in own),
        BYTES: sum(each.nbytes for each in own),
        **{f"{GROUP_MERGES}{group}": each.merges for group, each in enumerate(own)},
        **{
            f"{GROUP_LOSS}{group}": each.loss / each.counts if each.counts else nan
            for group, each in enumerate(own)
        },
    }
