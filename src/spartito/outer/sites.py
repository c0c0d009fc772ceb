"""Groups of several sites: neighbours meet often, sites seldom."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from spartito.engine.devices.host_reads import Number
from spartito.errors import SpartitoError
from spartito.outer.counts import Meetings, Since
from spartito.outer.joined_groups import JoinedGroups
from spartito.outer.outer_step import Coupling


class JoinedSites(JoinedGroups):
    """All tasks by their sites, in which they are joined by their groups."""

    inside: JoinedGroups

    def abort(self, error: SpartitoError) -> None:
        self.inside.abort(error)
        super().abort(error)


class Hierarchy:
    """One fragment of a model whose groups meet in their site, and now and then with all.

    It is used as a `Coupling` is. In a site the models are averaged. Sites go by their averages,
    each for what its groups have trained on, and the outer optimizer updates what all have in
    common.

    Args:
        near: Couples the groups of a site: averages.
        far: Couples the sites.
        world: All tasks.
        turn: All meet at every so manieth meeting of a site.
    """

    def __init__(self, near: Coupling, far: Coupling, world: JoinedSites, turn: int) -> None:
        self._near, self._far, self._turn = near, far, turn
        self._world, self._site = world, world.inside
        self._met = 0  # since all have

    @property
    def is_apart(self) -> bool:
        """Whether the groups may have different values; equal on all tasks."""
        return self._far.is_apart

    @property
    def shows_merged(self) -> bool:
        """Whether the model has the merged values at this moment, and its own are aside."""
        return self._far.shows_merged

    @property
    def heard(self) -> bool:
        """As `Coupling.heard`."""
        return self._far.heard

    @property
    def since(self) -> Since:
        """What this group did since all have met."""
        return self._far.since

    @property
    def meetings(self) -> Meetings:
        """Those of all, in this epoch."""
        return self._far.meetings

    def take_meetings(self) -> tuple[Meetings, ...]:
        """As `Coupling.take_meetings`: of the site, of all."""
        return *self._near.take_meetings(), *self._far.take_meetings()

    def take_blocked(self) -> float:
        """As `Coupling.take_blocked`."""
        return self._near.take_blocked() + self._far.take_blocked()

    def outer_states(self) -> dict[int, Any]:
        """As `Coupling.outer_states`."""
        return self._far.outer_states()

    def follow(self, parameters: Sequence[nn.Parameter], states: Mapping[int, Any]) -> None:
        """As `Coupling.follow`."""
        self._near.follow(parameters, {})
        self._far.follow(parameters, states)

    def count(self, weight: Number, asked: bool) -> None:
        """As `Coupling.count`."""
        self._near.count(weight, asked)
        self._far.count(weight, asked)

    @property
    def due(self) -> int:
        """As `Coupling.due`."""
        return self._near.due

    def begin(self, due: int) -> None:
        """As `Coupling.begin`, in each site."""
        self._near.begin(due)

    def settle(self) -> None:
        """As `Coupling.settle`."""
        self._near.settle()

    def end(self, mixing: float = 0.0) -> bool:
        """Merge the groups of each site, and all if it is their turn; all tasks call it.

        Args:
            mixing: As under `Coupling.end`.

        Returns:
            Whether all have met, and a task of any group asked for an end.
        """
        self._world.within(lambda: self._near.end(mixing))
        self._met += 1
        return self._met == self._turn and self._meet_far()

    def meet_all(self) -> bool:
        """Merge all at once."""
        if self._near.is_apart:
            self._world.within(self._near.meet)
        return self._meet_far()

    def show(self) -> bool:
        """As `Coupling.show`."""
        if not self.is_apart or self.shows_merged:
            return False
        self._world.within(self._near.show)
        with self._of_site():
            return self._far.show()

    def check_shown(self) -> None:
        """As `Coupling.check_shown`."""
        self._far.check_shown()

    def take_back(self) -> bool:
        """As `Coupling.take_back`."""
        return any([self._far.take_back(), self._near.take_back()])

    def restart(self) -> None:
        """As `Coupling.restart`."""
        self._met = 0
        self._far.restart()
        self._near.restart()

    def own_state(self) -> dict[str, Any]:
        """What this group, or its site, alone has between meetings, for a checkpoint."""
        near, far = self._near.own_state(), self._far.own_state()
        model = near["model"] or far["model"]  # where the site has just met: what all of it have
        return {**far, "model": {}, "near": {**self._near.common_state(), **near, "model": model}}

    def common_state(self) -> dict[str, Any]:
        """As `Coupling.common_state`."""
        return {**self._far.common_state(), "met": self._met}

    def load(self, common: Mapping[str, Any], own: Mapping[str, Any] | None) -> None:
        """As `Coupling.load`."""
        self.restart()
        self._far.load(common, own)
        if own is not None:
            self._near.load(own["near"], own["near"])
            self._met = common["met"]

    def _meet_far(self) -> bool:
        self._met = 0
        with self._of_site():
            asked = self._far.meet()
        if self._far.is_leader:  # who gave it to the other groups of the site
            others = self._site.between.world_size - 1
            self._near.meetings.nbytes += others * self._far.nbytes
        self._near.restart()  # from there
        return asked

    @contextmanager
    def _of_site(self) -> Generator[None]:
        """A block in which what the groups of a site did counts as one."""
        own = self._far.since
        brought = torch.tensor([float(own.weight), float(own.asked)], dtype=torch.float64)
        brought *= float(self._site.is_leader)
        weight, asked = self._world.within(lambda: self._site.all_reduce(brought)).tolist()
        self._far.since = together = Since(own.updates, weight, asked > 0)
        yield
        if self._far.since is together:
            self._far.since = own
