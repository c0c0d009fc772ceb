"""Groups of replicas: synchronous inside, and loosely coupled with each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spartito.declared import Declared
from spartito.errors import UserError
from spartito.outer import delta_exchange
from spartito.outer.fragment_schedule import turns_of
from spartito.outer.groups import TOKENS, Asked, Sites, check_weights, updates_between
from spartito.outer.optimizer import Average, OuterOptimizer, choose
from spartito.registry import strategy_info
from spartito.steps.outer_loops.group_topology import Grouping
from spartito.steps.outer_loops.local_sgd import LocalSGD
from spartito.steps.outer_loops.outer_loop import OuterLoop
from spartito.steps.parts import Parts
from spartito.steps.step import Step
from spartito.steps.team import Team
from spartito.strategies.declaration import Strategy, nested


@dataclass(frozen=True, kw_only=True, eq=False)
class LocalSGDStrategy(Strategy):
    """Groups of replicas that meet every so many updates (Stich 2019; DiLoCo, Douillard 2023).

    Inside a group all is as under the strategy that it holds. Between meetings nothing goes from
    group to group.

    Args:
        groups: How many groups of neighbours, the ranks of each (``[[0, 1], [2]]``), or
            "machine".
        every: How many updates a group makes from one meeting to the next. There is one at the
            end of each epoch, too. With ``sites`` two numbers: from one meeting of neighbours
            to the next one, and of all, a multiple of it.
        outer: What a meeting makes of the groups' mean difference: None averages the models;
            "diloco" or ``{"lr": 0.7, "momentum": 0.9}`` is Nesterov's momentum; a function of
            the parameters returns any torch optimizer.
        weights: "tokens": a group counts for what its losses were divided by since the last
            meeting (examples, tokens); "equal": all count the same.
        compress: How what a group has moved goes to the others: None is as it is; "bf16",
            "8bit" and "4bit" numbers of fewer bits; "topk", "topk:0.01" the largest of them.
            What is left out is added to what is sent at the next meeting.
        fragments: Parts of the model, of whole layers, that meet in turn: each after ``every``
            updates, and no two after the same.
        sites: How many sites of neighbouring groups there are, or the numbers of the groups of
            each (``[[0, 1], [2]]``). Groups of a site average their models; ``outer`` and
            ``compress`` are for the meetings of all, in which a site goes by its average.
        overlap: For how many updates what a group has moved is under way to the others while
            training goes on; True is a quarter of ``every``, and less than from one fragment's
            meeting to the next one's; False waits for it.
        mixing: How much of its own values a group keeps at a meeting, from 0 to 1; None is
            half of it with ``overlap``, else 0. At the end of an epoch nothing is kept.
        inside: The strategy of a group's steps, as ``MeshStrategy(model=2)``, or its text. Where a
            group's tasks have a model between them, groups are of one size, and those with the same
            part of it meet.
    """

    name = "local_sgd"
    nests = False
    recovers = True

    groups: Asked = 2
    every: int | Sequence[int] = 20
    outer: OuterOptimizer = None
    weights: str = TOKENS
    compress: str | None = None
    fragments: int = 1
    sites: Sites = None
    overlap: bool | int = False
    mixing: float | None = None
    inside: Strategy | Declared | str = "multi_worker_mirrored"

    def __post_init__(self) -> None:
        super().__post_init__()
        near, every = updates_between(self.every, self.sites)
        check_weights(self.weights)
        turns = turns_of(self.fragments, near, self.overlap, self.mixing)
        if self.sites is not None and (turns.delay or turns.mixing):
            raise UserError(
                f"overlap={self.overlap!r}, mixing={self.mixing!r} with sites",
                "Sites wait for their meetings: leave one of them out.",
            )
        outer, sums = choose(self.outer), delta_exchange.choose(self.compress)
        self.__dict__["_loop"] = (every, turns, outer, self.weights, sums)

    def parts(self, team: Team) -> Parts:
        """As `Strategy.parts`.

        Args:
            team: The tasks of a group.

        Returns:
            Those of the strategy that it holds.
        """
        return nested(self.inside, self.job).parts(team)

    def step_of(self, whole: Strategy, outer: OuterLoop | None = None) -> Step:
        """As `Strategy.step_of`: the steps of a group, with the outer loop around them."""
        if outer is not None:
            raise UserError(
                f"{whole.name} with local_sgd inside",
                "Groups of groups are sites: local_sgd(groups=4, sites=2, every=[20, 200]).",
            )
        every, turns, make, *rest = self.__dict__["_loop"]
        groups, sites = (1, None) if self.is_evaluator else (self.groups, self.sites)
        apart = not isinstance(make, Average)
        inside = nested(self.inside, self.job)
        alike = strategy_info(inside.name).divides_model and not self.is_evaluator
        grouping = Grouping(groups, sites, apart, turns.delay > 0, alike)
        return inside.step_of(whole, LocalSGD(grouping, every, turns, make, *rest))
