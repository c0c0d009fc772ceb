"""Local SGD: groups of replicas that are synchronous inside, and agree every so many updates."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import nan
from typing import TYPE_CHECKING, Any

import torch
from msgspec import structs
from torch import nn

from spartito.checkpoint.cuts import Cut
from spartito.checkpoint.saved_state import Saved
from spartito.cluster.spec import ClusterSpec
from spartito.collectives.collective import Collective
from spartito.data.dataset import Dataset
from spartito.engine.modules.batchnorm import has_batchnorm
from spartito.engine.updates.optimizers import NoOptimizer, unwrap
from spartito.errors import SpartitoError, TaskLostError, UserError
from spartito.names import plural
from spartito.notes import warn
from spartito.outer import delta_exchange
from spartito.outer.fragment_schedule import Turns
from spartito.outer.fragments import Fragments
from spartito.outer.group_values import Values
from spartito.outer.joined_groups import JoinedGroups
from spartito.outer.optimizer import Average, OuterFactory
from spartito.outer.outer_step import Coupling
from spartito.outer.sites import Hierarchy, JoinedSites
from spartito.steps.batches import Placed
from spartito.steps.coordination import SynchronousCoordination
from spartito.steps.distributed import StepResult
from spartito.steps.outer_loops.group_recovery import InGroups
from spartito.steps.outer_loops.group_state import (
    SECTION,
    accumulated_by_all,
    in_parts,
    like_of,
    load_own,
    states_of,
)
from spartito.steps.outer_loops.group_topology import Grouping, words_of
from spartito.steps.outer_loops.outer_loop import Here, MakeValues
from spartito.steps.prepared import Pair
from spartito.steps.recovery import Copies

if TYPE_CHECKING:
    from spartito.steps.team import Team

GROUP_LOSS = "loss_of_group_"
LEVELS = (
    ("meetings", "drift", "bytes_between_groups"),
    ("meetings_of_sites", "drift_of_sites", "bytes_between_sites"),
)
MEETINGS, EXCHANGES = "meeting_wait_fraction", "meeting_exchange_fraction"
SKIPPED = "skipped"
"""Figures of an epoch."""


class LocalSGD:
    """The outer loop of groups that merge what they have every so many updates.

    Args:
        grouping: Which tasks are a group.
        every: Updates from one meeting of all to the next one.
        turns: When fragments meet.
        outer: Makes the outer optimizer.
        weights: What a group counts for.
        exchange: Makes what adds up what groups have moved.
    """

    name = "local_sgd"

    def __init__(
        self,
        grouping: Grouping,
        every: int,
        turns: Turns,
        outer: OuterFactory,
        weights: str,
        exchange: Callable[[], delta_exchange.Exchange],
    ) -> None:
        self._grouping, self._every, self._turns = grouping, every, turns
        self.connect = grouping.connect  # groups outlive the models that this one has
        self._outer, self._weights, self._exchange = outer, weights, exchange
        self._couplings: dict[int, Fragments] = {}  # by the id of a pair's optimizer
        self._values: MakeValues | None = None
        self.defers = False
        """Whether meetings are held by `meet_due`, once their update counts."""
        self._unread: dict[int, tuple[Saved, Callable[[], Here]]] = {}  # of pairs to come
        self._warned = self._resumed = False
        self._coordination: SynchronousCoordination

    def inside(self, cluster: ClusterSpec) -> ClusterSpec:
        """As `OuterLoop.inside`."""
        return self._grouping.inside(cluster)

    def data_shard(self, own: tuple[int, int], cluster: ClusterSpec) -> tuple[int, int]:
        """As `OuterLoop.data_shard`."""
        return self._grouping.data_shard(own, cluster)

    def divided(self, chain: Dataset, pairs: Sequence[Pair]) -> Dataset:
        """Cut among groups first; two rows for each BatchNorm, also for one that is synchronized.

        It sees the rows of a group, which may be one replica.
        """
        if self._grouping.column is None:
            return chain
        norms = any(has_batchnorm(pair.model) for pair in pairs)
        return replace(chain, least=2 if norms else chain.least, groups=self._grouping.shards)

    def check(self, model: nn.Module, precision: str, team: Team) -> None:
        """As `OuterLoop.check`."""
        self._coordination = team.coordination  # type: ignore[assignment]  # of groups that meet
        team.groups.meet()
        if self._grouping.column is None:
            return
        if precision == "fp16":
            raise UserError(
                "precision='fp16' under local_sgd: each group would have its own loss scale",
                "Choose precision='bf16'.",
            )
        own = unwrap(model)
        kinds = {name: f"{tuple(p.shape)} {p.dtype}" for name, p in own.named_parameters()}
        with self._coordination.during("prepare"):
            told = self._coordination.tell_all(repr({"class": type(own).__name__, **kinds}))
        cluster = self._coordination.cluster
        for rank, text in enumerate(told):
            if text != told[0]:
                raise UserError(
                    f"{cluster.name_of(rank)} has another model than {cluster.name_of(0)}",
                    "All tasks of all groups build the same one.",
                )

    def add(self, pair: Pair, team: Team, values: MakeValues) -> None:
        """As `OuterLoop.add`; what was loaded before, it goes on from now."""
        self._values, column = values, self._grouping.column
        if column is None or isinstance(pair.optimizer, NoOptimizer):
            return
        made = Fragments(pair.model, lambda: self._coupling(pair, column, values), self._turns)

        def follow() -> str:
            made.follow(pair.gradients.parameters, strict=True)
            return ""

        with team.coordination.during("prepare"):
            team.coordination.attempt(follow)
        self._couplings[id(pair.optimizer)] = made
        if (unread := self._unread.pop(id(pair.optimizer), None)) is not None:
            self.load(pair, *unread)

    def _coupling(
        self, pair: Pair, column: JoinedGroups, values_of: MakeValues
    ) -> Coupling | Hierarchy:
        values = self._made_values(pair, column, values_of)
        made = Coupling(values, self._outer, self._weights, self._exchange())
        if not isinstance(column, JoinedSites):
            return made
        inside = values_of(pair, column.inside)
        inside.only_finite = values.only_finite
        near = Coupling(inside, Average(), self._weights, delta_exchange.Whole())
        return Hierarchy(near, made, column, self._every // self._turns.every)

    def _made_values(self, pair: Pair, column: JoinedGroups, values_of: MakeValues) -> Values:
        values = values_of(pair, column)
        values.only_finite = lambda: pair.skips_nonfinite  # which is known later
        return values

    def placed(self, found: Placed, training: bool) -> Placed:
        """As `OuterLoop.placed`."""
        found.near = self._grouping.near
        if found.near is not None and training:
            found.before = self.begin
        return found

    def begin(self) -> None:
        """Go on from one's own group's values, after the merged ones were shown."""
        if self._coordination.groups.others_leave:
            raise TaskLostError("another group has lost a task, or one comes to it")
        for pair, coupling in self.coupled(self._coordination._pairs.all):
            if coupling.shows_merged:
                self._check_shown(coupling)
                coupling.take_back()
                pair.gradients.written()

    def _check_shown(self, coupling: Fragments) -> None:
        """Refuse, on all tasks, what one has written into the merged model that is shown."""

        def check() -> str:
            coupling.check_shown()
            return ""

        with self._coordination.during("data"):
            self._coordination.attempt(check)

    @contextmanager
    def telling(self) -> Generator[None]:
        """As `OuterLoop.telling`."""
        try:
            yield
        except SpartitoError as error:
            if self._grouping.column is not None:
                self._grouping.column.abort(error)
            raise

    def update(self, pair: Pair, update: Callable[[], StepResult]) -> StepResult:
        """As `OuterLoop.update`."""
        coupling = self._couplings.get(id(pair.optimizer))
        if coupling is None:
            return update()
        pair.gradients.refresh()
        self._check_apart(pair)
        coupling.follow(pair.gradients.parameters)
        result = update()
        coupling.count(result.weight, result.stop)
        if result.dropped:
            coupling.left_out += 1
            self._tell_left_out(coupling.left_out)
        asked = not self.defers and coupling.is_due and self._meet(pair, coupling.meet)
        return structs.replace(result, stop=asked)

    def meet_due(self) -> bool:
        """As `OuterLoop.meet_due`."""
        due = [(p, each) for p, each in self.coupled(self._coordination._pairs.all) if each.is_due]
        if not due:
            return False
        with self.telling():
            asked = [self._meet(pair, coupling.meet) for pair, coupling in due]
        return any(asked)  # after all: others make the same calls

    def flush(self, pair: Pair) -> None:
        """As `OuterLoop.flush`."""
        coupling = self._couplings.get(id(pair.optimizer))
        if coupling is not None and (coupling.is_apart or coupling.is_ending):
            if not (coupling.meetings or self._resumed):  # of a whole epoch
                self.tell_length(coupling.updates)
            self._meet(pair, coupling.meet_all)
        self._resumed = False

    def tell_length(self, updates: int) -> None:
        """Say once that an epoch of so many updates has no meeting but that at its end."""
        if self._grouping.column is None:
            return
        if updates < self._every and not self._warned and self._coordination.cluster.is_chief:
            warn(
                "every=%d, and an epoch has %s: groups meet at its end",
                self._every,
                plural(updates, "update"),
            )
        self._warned = self._warned or updates < self._every

    def _check_apart(self, pair: Pair) -> None:
        """Refuse an update of parameters that another optimizer has moved since a meeting."""
        several = len(self._grouping.members) > 1
        others = self._coordination._pairs.sharing(pair.optimizer) if several else ()
        for other, coupling in self.coupled(others):
            if coupling.is_apart:
                raise UserError(
                    f"two optimizers, {type(other.optimizer).__name__} and "
                    f"{type(pair.optimizer).__name__}, with the same parameters under local_sgd "
                    "in several groups: at a meeting each would undo what the other has done",
                    "Give each parameter to one optimizer, or choose mirrored.",
                )

    def coupled(self, pairs: Iterable[Pair]) -> Iterator[tuple[Pair, Fragments]]:
        """Those of these pairs of which groups may have something of their own, with what that is.

        Args:
            pairs: Prepared ones.
        """
        for pair in pairs:
            if (coupling := self._couplings.get(id(pair.optimizer))) is not None:
                yield pair, coupling

    def _meet(self, pair: Pair, meet: Callable[[], bool]) -> bool:
        """Merge the groups; whether a task of any of them asked for an end."""
        with self._coordination.during("update"):
            asked = meet()
        pair.gradients.written()
        return asked

    def _tell_left_out(self, count: int) -> None:
        """Say that one's own group has left out an update, the ``count``-th of this epoch.

        The chief says it of its own.
        """
        if self._grouping.is_leader and not self._coordination.cluster.is_chief:
            warn(
                "loss or gradients of group %d were not finite: an update left out (%d in this "
                "epoch)",
                self._grouping.index,
                count,
            )

    # After a loss

    def copies(self, team: Team) -> Copies:
        """As `OuterLoop.copies`."""
        whole, turns = isinstance(self._exchange(), delta_exchange.Whole), self._turns
        if turns.delay or turns.mixing or self._grouping.has_sites or not whole:
            raise UserError(
                "recovery under local_sgd with overlap, mixing, sites or compress: what is under "
                "way, or was left out, would be lost",
                "Leave these out, or recovery.",
            )
        return InGroups(team, self)

    def rejoin(self, team: Team) -> None:
        """All tasks have met again: couple what is prepared by the groups as they are now.

        Args:
            team: The tasks.
        """
        column, values = self._grouping.column, self._values
        if column is None or values is None:
            return
        for pair in team.pairs.all:
            if isinstance(pair.optimizer, NoOptimizer):
                continue
            make = partial(self._made_values, pair, column, values)
            if (coupling := self._couplings.get(id(pair.optimizer))) is not None:
                coupling.rejoin(make)
                continue
            made = Fragments(pair.model, partial(self._coupling, pair, column, values), self._turns)
            made.follow(pair.gradients.parameters, strict=True)
            made.forget()
            self._couplings[id(pair.optimizer)] = made

    def restart(self, pairs: Sequence[Pair]) -> None:
        """All groups begin from the values that their models have.

        Args:
            pairs: The prepared ones.
        """
        for _, coupling in self.coupled(pairs):
            coupling.restart()

    @property
    def between(self) -> Collective | None:
        """The first tasks of all groups, as one of them sees them."""
        column = self._grouping.column
        return None if column is None else column.between

    def kept(self, pair: Pair) -> dict[str, Any]:
        """As `Fragments.kept`."""
        coupling = self._couplings.get(id(pair.optimizer))
        return {} if coupling is None else coupling.kept()

    def take(self, pair: Pair, kept: dict[str, Any]) -> None:
        """As `Fragments.take`."""
        if (coupling := self._couplings.get(id(pair.optimizer))) is not None:
            coupling.take(kept)

    def common(self, pair: Pair) -> dict[str, Any]:
        """As `Fragments.common`."""
        coupling = self._couplings.get(id(pair.optimizer))
        return {} if coupling is None else {"fragments": coupling.common()}

    def take_common(self, pair: Pair, common: dict[str, Any]) -> None:
        """As `Fragments.take_common`."""
        if (coupling := self._couplings.get(id(pair.optimizer))) is not None:
            coupling.take_common(common["fragments"])

    # Checkpoints

    def has(self, pair: Pair) -> bool:
        """As `OuterLoop.has`."""
        return id(pair.optimizer) in self._couplings

    def saved(self, pair: Pair, state: dict[str, Any], cuts: Mapping[str, Cut]) -> dict[str, Any]:
        """As `OuterLoop.saved`."""
        coupling = self._settled(pair)
        if coupling is None:
            return state
        index, column = self._grouping.index, self._grouping.column
        assert column is not None, "coupled"
        own = coupling.own_state()
        if index:  # the first group's is in the section of its name
            own["optimizer"] = in_parts(state["optimizer"], cuts)
            state["optimizer"] = {**state["optimizer"], "state": {}}
        if "accumulated" in state:
            own["accumulated"] = state["accumulated"]
            state["accumulated"] = accumulated_by_all(
                pair, state["accumulated"], column, self._grouping.is_leader
            )
        common = {**self._grouping.like, "common": coupling.common_state()}
        return {**state, SECTION: {**common, "own": {str(index): own}}}

    def _settled(self, pair: Pair) -> Fragments | None:
        """The groups of a pair, without exchanges under way."""
        coupling = self._couplings.get(id(pair.optimizer))
        if coupling is not None:
            with self.telling():
                coupling.settle()
        return coupling

    def load(self, pair: Pair, saved: Saved, here: Callable[[], Here]) -> None:
        """As `OuterLoop.load`; of a pair that is added later then."""
        self._resumed = True
        coupling = self._settled(pair)
        if coupling is None:
            self._load_later(pair, saved, here)
            return
        if "optimizer" not in saved or SECTION not in saved:
            coupling.restart()
            return

        def load() -> str:
            index, is_same = self._grouping.index, self._is_like(saved)
            coupling.load(*states_of(saved, index if is_same else None))
            if is_same:
                cuts, kept = here()
                load_own(pair, saved, index, kept, cuts)
            return ""

        self._coordination.attempt(load)

    def _load_later(self, pair: Pair, saved: Saved, here: Callable[[], Here]) -> None:
        """Keep what was loaded before it is known what this task has of a pair."""
        if self._grouping.column is None or isinstance(pair.optimizer, NoOptimizer):
            return
        if "accumulated" in saved:
            raise UserError(
                "a checkpoint between the batches of an update, of pipelines in groups",
                "Go on from one at the end of an update, as callbacks write it.",
            )
        self._unread[id(pair.optimizer)] = saved, here

    def _is_like(self, saved: Saved) -> bool:
        """Whether a checkpoint is of groups like these; else say what it is of."""
        there, like = like_of(saved), self._grouping.like
        if there != like and self._coordination.cluster.is_chief:
            warn(
                "the checkpoint is of %s, and here are %s: all go on from the merged model, "
                "with the first group's optimizer", words_of(there), words_of(like),
            )  # fmt: skip
        return there == like

    # What the tasks agree on

    @property
    def is_whole(self) -> bool:
        """As `OuterLoop.is_whole`."""
        return self._grouping.column is None or len(self._grouping.members) == 1

    @property
    def is_apart(self) -> bool:
        """As `OuterLoop.is_apart`."""
        couplings = self._couplings.values()
        return any(each.is_apart and not each.shows_merged for each in couplings)

    def show(self, pairs: Sequence[Pair]) -> None:
        """As `OuterLoop.show`."""
        for pair, coupling in self.coupled(pairs):
            if coupling.show():
                pair.gradients.written()

    def describe(self) -> dict[str, Any]:
        """As `OuterLoop.describe`."""
        members = [list(group) for group in self._grouping.members]
        sites = [list(site) for site in self._grouping.sites]
        found = {"groups": members, "sites": sites}
        return {name: each for name, each in found.items() if each}

    def figures(self, own: Sequence[float], pairs: Sequence[Pair]) -> dict[str, float]:
        """Meetings, their drift (mean) and bytes (of all groups), and the loss of each group."""
        grouping = self._grouping
        if grouping.column is None:
            return {}
        met = [each for _, coupling in self.coupled(pairs) for each in coupling.take_meetings()]
        levels = LEVELS if grouping.sites else LEVELS[:1]
        left_out = sum(each.take_left_out() for each in self._couplings.values())
        brought = list(own)
        for level in range(len(levels)):
            of_level = [each[level] for each in met]
            brought += [sum(each.count for each in of_level), sum(each.drift for each in of_level)]
            brought.append(sum(each.nbytes for each in of_level))
        brought.append(left_out)
        world = self._coordination.groups.world
        rows = world.all_gather(torch.tensor(brought, dtype=torch.float64))
        leaders = [rows[group[0]].tolist() for group in grouping.members]
        figures: dict[str, float] = {}
        for level, (meetings, drift, nbytes) in enumerate(levels):
            at = len(own) + 3 * level
            drifts = [leaders[site[0]][at + 1] for site in grouping.sites or ((0,),)]
            count = leaders[0][at]
            mean = sum(drifts) / len(drifts) / count if count else 0.0
            sent = sum(row[at + 2].item() for row in rows)
            figures |= {meetings: int(count), drift: mean, nbytes: sent}
        losses = {f"{GROUP_LOSS}{index}": nan for index in range(grouping.count)}
        for index, (loss, weight, *_) in zip(grouping.numbers, leaders, strict=True):
            losses[f"{GROUP_LOSS}{index}"] = loss / weight if weight else nan
        if any(pair.skips_nonfinite for pair in pairs):  # by any group
            figures[SKIPPED] = int(sum(leader[-1] for leader in leaders))
        return {**figures, **losses}

    def waits(self) -> dict[str, float]:
        """As `OuterLoop.waits`."""
        if self._grouping.column is None:
            return {}
        held = sum(each.take_seconds() for each in self._couplings.values())
        blocked = sum(each.take_blocked() for each in self._couplings.values())
        return {MEETINGS: held, EXCHANGES: blocked}
