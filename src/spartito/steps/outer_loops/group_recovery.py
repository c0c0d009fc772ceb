"""Where the state of a lost task is found under local SGD: in its group, or in other groups.

A group that has a task left has all that is its own: model and optimizer. What groups have in
common, where they have started since they met and the outer optimizer's state, is with the first
task of each. A group of which nobody is left begins anew from there.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from spartito.errors import TaskLostError
from spartito.steps.prepared import Pair
from spartito.steps.recovery import (
    OF_GROUP,
    ShardsLostError,
    Standing,
    load_state,
    share_state,
    state_of,
)

if TYPE_CHECKING:
    from spartito.steps.outer_loops.local_sgd import LocalSGD
    from spartito.steps.team import Team


class _Told(msgspec.Struct, frozen=True):
    """What each task tells of its group and itself."""

    group: Standing
    knows: bool
    """Whether it has what groups have in common."""


class InGroups:
    """Each replica of a group has all of the group's state, and the first of each the common one.

    Args:
        team: Whose training it is.
        loop: What couples the groups.
    """

    def __init__(self, team: Team, loop: LocalSGD) -> None:
        self._team, self._loop = team, loop

    def keep(self) -> None:
        """As `Copies.keep`: all is there; from now on look who leaves."""
        if self._team.replicas.rank == 0:
            self._team.groups.look_for_leavers()

    @contextmanager
    def updating(self, pair: Pair, aboard: bool) -> Generator[None]:
        """As `Copies.updating`: a meeting is held when the update counts."""
        self._loop.defers = aboard
        yield

    @contextmanager
    def loading(self, aboard: bool) -> Generator[None]:
        """As `Copies.loading`: nothing else is to know."""
        yield

    def leaving(self, cause: TaskLostError | None) -> TaskLostError | None:
        """As `Copies.leaving`."""
        return cause

    def share(
        self, own: Standing, training: Callable[[], dict[str, Any]]
    ) -> tuple[Standing, dict[str, Any] | None]:
        """As `Copies.share`: each group for itself, then those that are new as a whole."""
        team, loop = self._team, self._loop
        loop.rejoin(team)
        pairs, world = team.pairs.all, team.groups.world
        best, state = share_state(team.replicas, pairs, own, training, self._state, self._take)
        couplings = [coupling for _, coupling in loop.coupled(pairs)]
        merged = tuple(count for coupling in couplings for count in coupling.merged)
        is_first = team.replicas.rank == 0
        text = msgspec.json.encode(_Told(best, is_first and min(merged, default=0) >= 0))
        told = [msgspec.json.decode(each, type=_Told) for each in world.all_gather_bytes(text)]
        if all(each.group.is_new for each in told):
            best, given = share_state(world, pairs, own, training)
            loop.restart(pairs)
            return best, state if given is None else given
        if not any(each.knows for each in told):
            raise ShardsLostError(
                "the first tasks of all groups were lost together: where the groups have started "
                "since they met is nowhere",
                "Start the job again: it goes on from the newest backup of BackupAndRestore, or "
                "checkpoint, if there is one.",
            )
        is_new = best.is_new
        if any(each.group.is_new for each in told):
            source = next(each.group for each in told if not each.group.is_new)
            among = msgspec.structs.replace(source, is_new=is_new)
            best = source if is_new else best
            _, found = share_state(world, pairs, among, training, self._state, self._take)
            if found is not None:
                del found[OF_GROUP]
                state = found
        if is_first and loop.between is not None:
            lacks = min(merged, default=0) < 0
            at = Standing(merged, lacks, own.fit, own.pairs)
            share_state(loop.between, pairs, at, dict, loop.common, loop.take_common)
        for coupling in couplings:
            coupling.catch_up(is_new)
        return best, state

    def _state(self, pair: Pair) -> dict[str, Any]:
        return {**state_of(pair), "coupling": self._loop.kept(pair)}

    def _take(self, pair: Pair, saved: dict[str, Any]) -> None:
        load_state(pair, saved)
        self._loop.take(pair, saved["coupling"])
