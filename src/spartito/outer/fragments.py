"""A model in fragments that meet in turn (Streaming DiLoCo, Douillard et al. 2025)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from math import prod
from time import perf_counter
from typing import Any

from torch import nn

from spartito.engine.devices.host_reads import Number
from spartito.engine.gradients.gradient_sum import same
from spartito.engine.updates.optimizers import unwrap, whole_shape
from spartito.errors import UserError
from spartito.outer.counts import Meetings
from spartito.outer.fragment_schedule import Turns
from spartito.outer.group_values import Values
from spartito.outer.outer_step import Coupling
from spartito.outer.sites import Hierarchy


def fragments_of(sizes: Sequence[int], count: int) -> list[range]:
    """Divide layers in their order into parts of about equal size, none of them empty. Pure.

    Args:
        sizes: Of the layers.
        count: The parts, as many as there are layers at most.

    Returns:
        Which layers each part has.
    """
    ends = [0, *accumulate(sizes)]
    cuts = [0]
    for part in range(1, count):
        first, last = cuts[-1] + 1, len(sizes) - (count - part)
        wanted = ends[-1] * part / count
        cuts.append(min(range(first, last + 1), key=lambda cut: abs(ends[cut] - wanted)))
    return [range(a, b) for a, b in zip(cuts, [*cuts[1:], len(sizes)], strict=True)]


class Fragments:
    """One prepared model whose groups train apart, in one or several fragments.

    Args:
        model: Prepared.
        make: Makes what couples one fragment.
        turns: When they meet.
    """

    def __init__(
        self, model: nn.Module, make: Callable[[], Coupling | Hierarchy], turns: Turns
    ) -> None:
        self._model, self._turns, self._count = model, turns, turns.fragments
        self._parts = [make() for _ in range(self._count)]
        self._parameters: list[nn.Parameter] = []
        self.updates = 0
        """How many since all have met."""
        self.left_out = 0
        """Updates of this epoch that were not finite, which this group has left out."""
        self._seconds, self._next = 0.0, 0
        self._ends = False  # an epoch, or what learns changes: all of it meets
        self._look_ahead()

    @property
    def is_ending(self) -> bool:
        """Whether `meet_all` has begun, and ended with the loss of a task."""
        return self._ends

    @property
    def is_apart(self) -> bool:
        """Whether the groups may have different values; equal on all tasks."""
        return any(part.is_apart for part in self._parts)

    @property
    def shows_merged(self) -> bool:
        """Whether the model has the merged values at this moment, and its own are aside."""
        return any(part.shows_merged for part in self._parts)

    @property
    def meetings(self) -> int:
        """How many there were in this epoch."""
        return sum(part.meetings.count for part in self._parts)

    def take_meetings(self) -> list[tuple[Meetings, ...]]:
        """What they came to in this epoch, of each fragment; the next epoch begins."""
        return [part.take_meetings() for part in self._parts]

    def take_seconds(self) -> float:
        """In which this task was at meetings, instead of training, since the last call."""
        found, self._seconds = self._seconds, 0.0
        return found

    def take_blocked(self) -> float:
        """In how many of these it waited for an exchange, since the last call."""
        return sum(part.take_blocked() for part in self._parts)

    def take_left_out(self) -> int:
        """How many updates this group has left out in this epoch; the next one begins."""
        found, self.left_out = self.left_out, 0
        return found

    def follow(self, parameters: Sequence[nn.Parameter], strict: bool = False) -> None:
        """Take the parameters that learn from now on; all tasks call it before an update.

        Args:
            parameters: Those of the optimizer. New ones have equal values in all groups.
            strict: Whether each fragment must have a layer.

        Raises:
            UserError: There are more fragments than layers, or the outer optimizer cannot have
                these parameters.
        """
        if same(parameters, self._parameters):
            return
        asked = self.meet_all()  # what is taken out would stay apart
        self._parameters = list(parameters)
        divided = self._divided(strict)
        states = {key: its for part in self._parts for key, its in part.outer_states().items()}
        for part, own in zip(self._parts, divided, strict=True):
            part.follow(own, states)
            part.since.asked = asked

    def count(self, weight: Number, asked: bool) -> None:
        """Take note of an update.

        Args:
            weight: What its loss was divided by.
            asked: Whether a task of the group asked for an end.
        """
        self.updates += 1
        for part in self._parts:
            part.count(weight, asked)

    @property
    def is_due(self) -> bool:
        """Whether something is to be taken or merged now."""
        return self.updates >= self._next

    def meet(self) -> bool:
        """Merge what is due, and take what has its turn; all tasks call it after the same update.

        Returns:
            Whether a task of any group asked for an end.
        """
        began, turns, asked = perf_counter(), self._turns, False
        for number, part in enumerate(self._parts):
            begins = turns.begins(number, self.updates)
            if begins and not turns.delay and not part.since.updates:
                asked |= part.heard  # they met, and then a task was lost
                continue
            if part.due and (begins or part.due <= self.updates):
                asked |= part.end(turns.mixing)
            if begins:
                part.begin(self.updates + turns.delay)
            if begins and not turns.delay:
                asked |= part.end(turns.mixing)
        self._look_ahead()
        self._seconds += perf_counter() - began
        return asked

    def meet_all(self) -> bool:
        """Merge what is under way, then all that is apart; all tasks call it.

        Returns:
            Whether a task of any group asked for an end.
        """
        began, asked = perf_counter(), False
        self._ends = True
        for part in sorted(self._in_flight, key=lambda part: part.due):
            asked |= part.end(self._turns.mixing)
        for part in self._parts:
            asked |= part.is_apart and part.meet_all()
        self.updates, self._ends = 0, False
        self._look_ahead()
        self._seconds += perf_counter() - began
        return asked

    def settle(self) -> None:
        """Wait for the exchanges that are under way; all tasks call it."""
        for part in self._in_flight:
            part.settle()

    def show(self) -> bool:
        """As `Coupling.show`, of all fragments."""
        return _any([part.show() for part in self._parts])

    def check_shown(self) -> None:
        """As `Coupling.check_shown`, of all fragments."""
        for part in self._parts:
            part.check_shown()

    def take_back(self) -> bool:
        """As `Coupling.take_back`, of all fragments."""
        return _any([part.take_back() for part in self._parts])

    def restart(self) -> None:
        """The model was given other values, the same in all groups: they begin from these."""
        self.updates = 0
        for part in self._parts:
            part.restart()
        self._look_ahead()

    def own_state(self) -> dict[str, Any]:
        """What this group alone has between meetings, for a checkpoint."""
        parts = [part.own_state() for part in self._parts]
        return {"fragments": parts, "left_out": self.left_out}

    def common_state(self) -> dict[str, Any]:
        """What all groups have in common between meetings, for a checkpoint; on leaders."""
        parts = [part.common_state() for part in self._parts]
        return {"updates": self.updates, "fragments": parts}

    def load(self, common: Mapping[str, Any], own: Mapping[str, Any] | None) -> None:
        """Go on where a checkpoint was, whose merged values are in place.

        Args:
            common: What `common_state` returned.
            own: What `own_state` returned in this group; None where there were other groups:
                they begin from the merged values.

        Raises:
            UserError: The outer optimizer is another one.
        """
        self.restart()
        found = common["fragments"]
        if own is None or len(found) != self._count:
            outers = [each["outer"] for each in found if "outer" in each]
            state = {name: value for each in outers for name, value in each["state"].items()}
            whole = {"outer": {**outers[0], "state": state}} if outers else {}
            for part in self._parts:
                part.load(whole, None)
            return
        self.updates, self.left_out = common["updates"], own.get("left_out", 0)
        for part, its, mine in zip(self._parts, found, own["fragments"], strict=True):
            part.load(its, mine)
        self._look_ahead()

    # After a loss

    def rejoin(self, values: Callable[[], Values]) -> None:
        """As `Coupling.rejoin`, of all fragments.

        Args:
            values: Makes what this task has, by the groups as they are now.
        """
        for part in self._whole:
            part.rejoin(values())

    def forget(self) -> None:
        """As `Coupling.forget`, of all fragments."""
        for part in self._whole:
            part.forget()

    @property
    def merged(self) -> tuple[int, ...]:
        """As `Coupling.merged`, of each fragment."""
        return tuple(part.merged for part in self._whole)

    def kept(self) -> dict[str, Any]:
        """What the tasks of a group have each, and is not in the model."""
        parts = [part.kept() for part in self._whole]
        counts = [self.updates, self._next, self.left_out, self._ends]
        return {"counts": counts, "parts": parts}

    def take(self, kept: Mapping[str, Any]) -> None:
        """Take what `kept` returned in another task."""
        self.updates, self._next, self.left_out, self._ends = kept["counts"]
        for part, its in zip(self._whole, kept["parts"], strict=True):
            part.take(its)

    def common(self) -> list[dict[str, Any]]:
        """As `Coupling.common`, of each fragment."""
        return [part.common() for part in self._whole]

    def take_common(self, common: Sequence[Mapping[str, Any]]) -> None:
        """Take what `common` returned in another task."""
        for part, its in zip(self._whole, common, strict=True):
            part.take_common(its)

    def catch_up(self, is_new: bool) -> None:
        """As `Coupling.catch_up`, of all fragments."""
        for part in self._whole:
            part.catch_up(is_new)

    @property
    def _whole(self) -> list[Coupling]:
        """The fragments of groups that recover: these have no sites."""
        return [part for part in self._parts if isinstance(part, Coupling)]

    @property
    def _in_flight(self) -> list[Coupling | Hierarchy]:
        return [part for part in self._parts if part.due]

    def _look_ahead(self) -> None:
        """Find out after which update something is to be done next."""
        due = [part.due for part in self._in_flight]
        self._next = min([self._turns.next(self.updates), *due])

    def _divided(self, strict: bool) -> list[list[nn.Parameter]]:
        """The parameters of each fragment: those of whole layers, in the model's order."""
        if self._count == 1:
            return [self._parameters]
        learning = {id(parameter) for parameter in self._parameters}
        layers: dict[str, list[nn.Parameter]] = {}  # those of other tasks, too: all divide alike
        for name, parameter in unwrap(self._model).named_parameters():
            if id(parameter) in learning or (parameter.is_meta and parameter.requires_grad):
                layers.setdefault(name.rpartition(".")[0], []).append(parameter)
        if strict and len(layers) < self._count:
            raise UserError(
                f"fragments={self._count} of a model of {len(layers)} layers that learn",
                "A fragment has one layer at least.",
            )
        sizes = [sum(prod(whole_shape(p)) for p in each) for each in layers.values()]
        parts = fragments_of(sizes, min(self._count, len(sizes))) if sizes else []
        each = list(layers.values())
        found = [[p for n in part for p in each[n] if not p.is_meta] for part in parts]
        return found + [[] for _ in range(self._count - len(found))]


def _any(found: Sequence[bool]) -> bool:
    """Whether one of them is true, after all were found out: all tasks make the same calls."""
    return any(found)
