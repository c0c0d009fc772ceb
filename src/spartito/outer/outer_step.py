"""One model whose copies train apart in groups, and what happens when the groups meet.

Since the last meeting group ``g`` went from the common start to ``x_g``, with what weighs ``w_g``.
A meeting takes ``sum_g w_g (start - x_g) / sum_g w_g`` for the gradient of an outer optimizer,
whose update of the start is where all go on. With a learning rate of 1 and no momentum that is
the mean of the models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from spartito.engine.devices.host_reads import Number
from spartito.engine.gradients.gradient_sum import same
from spartito.outer.counts import Meetings, Since
from spartito.outer.delayed_step import Flight
from spartito.outer.delta_exchange import Exchange, Whole
from spartito.outer.group_values import Values, copy
from spartito.outer.groups import EQUAL
from spartito.outer.optimizer import OuterFactory, load_outer_state, make_outer, outer_state
from spartito.outer.synchronized_values import Shown

SQUARE = 3
"""Which of a meeting's numbers is the square of a distance."""
NOTHING = -1
"""Of how many meetings the values are of who has none that groups have in common."""


class Coupling:
    """The groups of one prepared model, seen from one task.

    Args:
        values: What this task has of it.
        outer: Makes the outer optimizer.
        weights: One of `spartito.outer.groups.WEIGHTS`.
        exchange: How those who speak for groups add up what these have moved.
    """

    def __init__(
        self, values: Values, outer: OuterFactory, weights: str, exchange: Exchange
    ) -> None:
        self.since, self.meetings = Since(), Meetings()
        self.flight: Flight | None = None
        self.heard = False
        """Whether an end was asked for at the last meeting, if no update came since."""
        self._sent = Since()  # what the flight is of
        self._given = self._merged = 0  # of how many meetings the model, and `_start`, are
        self._outcome = [0.0, 0.0]  # of the last one: an end was asked for, the square of the drift
        self._blocked = 0.0
        self._is_mixed = False  # since the last meeting, which has left the groups apart
        self._values, self._factory = values, outer
        self._is_equal, self._exchange = weights == EQUAL, exchange
        self._aside: list[Tensor] = []
        self._shown = Shown((), ())
        self._copies: list[nn.Parameter] = []
        self._outer: Optimizer | None = None
        self._begin()

    @property
    def is_apart(self) -> bool:
        """Whether the groups may have different values; equal on all tasks."""
        return self._is_mixed or self.since.updates > 0 or self.flight is not None

    @property
    def due(self) -> int:
        """After which update what is under way is merged; 0 where nothing is."""
        return 0 if self.flight is None else self.flight.due

    @property
    def shows_merged(self) -> bool:
        """Whether the model has the merged values at this moment, and its own are aside."""
        return bool(self._aside)

    @property
    def is_leader(self) -> bool:
        """Whether this task is the first of its group."""
        return self._values.is_first

    @property
    def nbytes(self) -> int:
        """What all that meets takes, on a leader."""
        return self._start.nbytes

    def take_meetings(self) -> tuple[Meetings, ...]:
        """What the meetings of this epoch came to; the next one begins."""
        found, self.meetings = self.meetings, Meetings()
        return (found,)

    def take_blocked(self) -> float:
        """Seconds at meetings in which this task waited for an exchange, since the last call."""
        found, self._blocked = self._blocked, 0.0
        return found

    def meet_all(self) -> bool:
        """As `meet`: there are no neighbours to meet before."""
        return self.meet()

    def meet(self) -> bool:
        """Merge the groups; all tasks call it after the same update.

        Returns:
            Whether a task of any group asked for an end.

        Raises:
            UserError: If a replica has other values than the rest of its group.
            TaskLostError: If a task is lost.
        """
        self.begin(0)
        return self.end()

    def outer_states(self) -> dict[int, Any]:
        """What the outer optimizer keeps of each parameter, by the parameter's id."""
        if self._outer is None:
            return {}
        state, pairs = self._outer.state, zip(self._values.parameters, self._copies, strict=False)
        return {id(parameter): state[own] for parameter, own in pairs if own in state}

    def follow(self, parameters: Sequence[nn.Parameter], states: Mapping[int, Any]) -> None:
        """Take the parameters that learn from now on; all tasks call it before an update.

        Args:
            parameters: Those of the optimizer. New ones have equal values in all groups.
            states: The `outer_states` of all fragments: a layer may have been in another one.

        Raises:
            UserError: If the outer optimizer cannot have them.
        """
        values = self._values
        if same(parameters, values.parameters):
            return
        values.follow(parameters)
        self._begin()
        for parameter, own in zip(values.parameters, self._copies, strict=False):
            if self._outer is not None and id(parameter) in states:
                self._outer.state[own] = states[id(parameter)]

    def count(self, weight: Number, asked: bool) -> None:
        """Take note of an update.

        Args:
            weight: What its loss was divided by.
            asked: Whether a task of the group asked for an end.
        """
        since, self.heard = self.since, False
        since.updates += 1
        since.weight = since.weight + weight
        since.asked = since.asked or asked

    def begin(self, due: int) -> None:
        """Take how far the group has moved, and let leaders exchange it; all tasks call it.

        Args:
            due: After which update `end` is to be called.

        Raises:
            UserError: If a replica has other values than the rest of its group.
            TaskLostError: If a task is lost.
        """
        self._values.agree()
        self._sent = since = self.since
        self.since = Since()
        share = self._share(since.weight)
        numbers = torch.tensor([0.0, share, float(since.asked), 0.0], dtype=torch.float64)
        self.flight = flight = Flight(since.weight, numbers, due)
        if not self._values.speaks:
            return
        flight.moved = self._taken(fresh=self._may_keep_gradients)

        def move() -> None:
            numbers[1], square = self._moved(flight.moved, share)
            numbers[SQUARE] = numbers[1] * square

        begins = [move]
        if self._values.only_finite():  # which the tasks of a group find out together
            begins.pop()()
        flight.depart(self._exchange, self._values.world.line, begins, lambda: self._merge(flight))

    def settle(self) -> None:
        """Wait for the exchange that is under way, if there is one; all tasks call it."""
        if (flight := self.flight) is not None:
            self._values.across(lambda: self._land(flight), flight.numbers)
            self._keep_square(flight)

    def end(self, mixing: float = 0.0) -> bool:
        """Merge what the groups had when `begin` took it; all tasks call it after the same update.

        Args:
            mixing: How much of its own values each group keeps, from 0 to 1.

        Returns:
            Whether a task of any group had asked for an end.

        Raises:
            TaskLostError: If a task is lost.
        """
        flight = self.flight
        assert flight is not None, "begun"
        numbers = flight.numbers
        began = perf_counter()
        self._values.across(lambda: self._land(flight), numbers)
        self._blocked += perf_counter() - began
        self._values.give(self._start, mixing)
        self.flight, self._is_mixed = None, mixing > 0
        if not mixing:  # what was done meanwhile is gone
            self.since = Since(asked=self.since.asked)
        self._met(*numbers[2:].tolist())
        return self.heard

    def _met(self, asked: float, square: float) -> None:
        """Take note of a meeting whose outcome the model has."""
        self._given, self.heard = self._given + 1, asked > 0
        self.meetings.count += 1
        self.meetings.drift += max(0.0, square) ** 0.5

    def show(self) -> bool:
        """Put the weighted mean of the groups' models in place of one's own; all tasks call it.

        Returns:
            Whether anything changed.
        """
        if not self.is_apart or self._aside:
            return False
        self.settle()  # or what has landed by now would decide about the last bits
        values = self._values
        values.agree()
        self._aside = [tensor.detach().clone() for tensor in values.tensors]
        share = self._share(self._weight)
        numbers = torch.tensor([0.0, share], dtype=torch.float64)
        merged = self._start

        def mean() -> None:
            nonlocal merged
            moved = self._taken(fresh=True)
            numbers[1], _ = self._moved(moved, share)
            Whole().add(moved, numbers[1:], values.between)
            if total := numbers[1].item():
                merged = self._start - moved.div_(total)

        values.across(mean, numbers)
        values.give(merged)
        self._shown = Shown(values.names, values.shown())
        return True

    def check_shown(self) -> None:
        """Refuse what was written into the model while it showed the mean; all tasks call it.

        Raises:
            UserError: On who finds that.
        """
        if self._aside:
            self._shown.check(self._values.shown())

    def take_back(self) -> bool:
        """Put one's own values back in place; all tasks call it.

        Returns:
            Whether anything changed.
        """
        if not self._aside:
            return False
        aside, self._aside = self._aside, []
        self._values.put(aside)
        return True

    def restart(self) -> None:
        """The model was given other values, the same in all groups: they begin from these."""
        self._aside, self.since, self.flight = [], Since(), None
        self._is_mixed, self._given, self._merged = False, 0, 0
        self._exchange.error = torch.empty(0)
        if self._outer is not None:
            self._fill_start()

    def own_state(self) -> dict[str, Any]:
        """What this group alone has between meetings, for a checkpoint."""
        values = self._aside or [tensor.detach() for tensor in self._values.tensors]
        own = self._values.named(values) if self.is_apart else {}
        state = {"model": own, "weight": float(self.since.weight), "asked": self.since.asked}
        if self._values.speaks:
            state["nbytes"] = {str(self._values.part): self.meetings.nbytes}
        if self._exchange.error.numel():
            state["error"] = self._named(self._exchange.error)
        if self.flight is not None:
            state["in_flight"] = float(self.flight.weight)
        return state

    def common_state(self) -> dict[str, Any]:
        """What all groups have in common between meetings, for a checkpoint; on leaders."""
        meetings = self.meetings
        state: dict[str, Any] = {
            "updates": self.since.updates, "meetings": meetings.count, "drift": meetings.drift,
            "mixed": self._is_mixed,
        }  # fmt: skip
        if self._outer is not None:
            names = dict(zip(map(id, self._copies), self._values.names, strict=True))
            outer = outer_state(self._outer, names)
            outer["state"] = self._values.named_state(outer["state"])
            state |= {"outer": outer, "start": self._named(self._start)}
        if (flight := self.flight) is not None:
            state |= {"due": flight.due, "numbers": flight.numbers.tolist()}
        return state

    def load(self, common: Mapping[str, Any], own: Mapping[str, Any] | None) -> None:
        """Go on where a checkpoint was, whose merged values are in place.

        Args:
            common: What `common_state` returned.
            own: What `own_state` returned in this group; None where there were other groups:
                they begin from the merged values. Tensors of both are `Stored`.

        Raises:
            UserError: The outer optimizer is another one.
        """
        self.restart()
        values = self._values
        if "outer" in common and self._outer is not None:
            saved = {**common["outer"], "state": values.read_state(common["outer"]["state"])}
            self._outer = make_outer(self._factory, self._copies, values.is_divided)
            load_outer_state(self._outer, dict(zip(values.names, self._copies, strict=True)), saved)
        if own is None:
            return
        if own["model"]:
            values.fill(values.read(own["model"]))
        if self._outer is not None and "start" in common:
            copy(self._copies, values.read(common["start"]))
        if self._outer is not None and "error" in own:
            self._exchange.error = self._flat(own["error"])
        self.since = Since(common["updates"], own["weight"], own["asked"])
        self._is_mixed = common["mixed"]
        if "due" in common:
            numbers = torch.tensor(common["numbers"], dtype=torch.float64)
            self.flight = flight = Flight(own["in_flight"], numbers, common["due"], landed=True)
            self._keep_square(flight)
        nbytes = sum(own["nbytes"].values()) if self.is_leader else 0
        self.meetings = Meetings(common["meetings"], common["drift"], nbytes)

    # After a loss

    def rejoin(self, values: Values) -> None:
        """Go on as a task of other groups; what was in a meeting is to meet again.

        Args:
            values: What this task has, by the groups as they are now.
        """
        self.take_back()
        if self.flight is not None:
            self.flight, self.since = None, self._sent
        before, self._values = self._values, values
        values.follow(before.parameters)
        if values.speaks and before.speaks:
            for flat in (self._start, self._moving):
                values.keep(flat)
        else:
            self._begin()
            self._merged = NOTHING

    def forget(self) -> None:
        """What is here is of no use: this task was not there."""
        self._merged = NOTHING

    @property
    def merged(self) -> int:
        """Of how many meetings the values are that groups have in common; -1: they are not here."""
        return self._merged

    def kept(self) -> dict[str, Any]:
        """What the tasks of a group have each, and is not in the model."""
        since, meetings = self.since, self.meetings
        return {
            "since": [since.updates, float(since.weight), since.asked], "given": self._given,
            "meetings": [meetings.count, meetings.drift, meetings.nbytes], "heard": self.heard,
        }  # fmt: skip

    def take(self, kept: Mapping[str, Any]) -> None:
        """Take what `kept` returned in another task."""
        self.since, self.meetings = Since(*kept["since"]), Meetings(*kept["meetings"])
        self._given, self.heard = kept["given"], kept["heard"]

    def common(self) -> dict[str, Any]:
        """What those who speak have each: where groups have started, and the outer optimizer."""
        names = {id(own): str(number) for number, own in enumerate(self._copies)}
        outer = {} if self._outer is None else outer_state(self._outer, names)
        counts = {"merged": self._merged, "outcome": self._outcome}
        return {**counts, "start": self._start, "outer": outer}

    def take_common(self, common: Mapping[str, Any]) -> None:
        """Take what `common` returned in another task."""
        self._merged, self._outcome = common["merged"], common["outcome"]
        self._start.copy_(common["start"])
        if self._outer is not None:
            self._outer = make_outer(self._factory, self._copies, self._values.is_divided)
            named = {str(number): own for number, own in enumerate(self._copies)}
            load_outer_state(self._outer, named, common["outer"])

    def catch_up(self, is_new: bool) -> None:
        """Have what came of the last meeting, if any group has; all tasks of a group call it.

        Args:
            is_new: Whether this group begins from there: its model is another group's.
        """
        inside = self._values.world.inside
        own = torch.tensor([self._given, self._merged, *self._outcome], dtype=torch.float64)
        rows = [each.tolist() for each in inside.all_gather(own)]
        _, merged, *outcome = max(rows, key=lambda row: row[1])
        if is_new or any(given < merged for given, *_ in rows):
            self._values.give(self._start)
        if self._given < merged:
            self.since = Since()
            self._met(*outcome)
        elif is_new:
            self.since = Since(self.since.updates)

    @property
    def _weight(self) -> Number:
        """Of all that the groups have moved from their common start."""
        return self.since.weight + (0.0 if self.flight is None else self.flight.weight)

    def _share(self, weight: Number) -> float:
        return float(weight > 0) if self._is_equal else float(weight)

    def _land(self, flight: Flight) -> None:
        self.meetings.nbytes += flight.land(self._values.world.line, self._values.between)

    def _keep_square(self, flight: Flight) -> None:
        """One task of a group goes on with the sum of its squares: it is added up once more."""
        if not self.is_leader:
            flight.numbers[SQUARE] = 0.0

    def _begin(self) -> None:
        """Begin to follow the parameters; those who speak keep where they start."""
        values = self._values
        self._exchange.error = torch.empty(0)
        self._copies, self._outer = [], None
        self._start = self._moving = torch.empty(0, dtype=values.dtype, device=values.device)
        if values.speaks:
            self._start, self._moving = values.flat(), values.flat()
            self._copies = [nn.Parameter(part) for part in values.views(self._start)]
            self._fill_start()
            if self._copies:
                self._outer = make_outer(self._factory, self._copies, values.is_divided)

    def _fill_start(self) -> None:
        copy(self._copies, self._values.tensors)

    @property
    def _may_keep_gradients(self) -> bool:
        """Whether the outer optimizer may go on with a gradient itself: none of torch's does."""
        outer = self._outer
        return outer is not None and not type(outer).__module__.startswith("torch.optim.")

    def _taken(self, fresh: bool = False) -> Tensor:
        """On who speaks, the group's values as they are now, flat.

        Unless it is to be ``fresh``, in memory that is that of each flight in turn: a copy is all
        for which training waits.
        """
        taken = torch.empty_like(self._start) if fresh else self._moving
        copy(self._values.views(taken), self._aside or self._values.tensors)
        return taken

    def _moved(self, taken: Tensor, share: float) -> tuple[float, float]:
        """On who speaks, make of what was taken how far the group moved away from the start.

        Returns:
            What it counts for, and the square of its norm.
        """
        torch.sub(self._start, taken, out=taken)
        square, values = self._values.square(taken), self._values
        if values.only_finite() and not values.all_say(isfinite(square)):
            taken.zero_()
            return 0.0, 0.0
        return share, square

    def _merge(self, flight: Flight) -> None:
        """On who speaks, let the outer optimizer use what all groups have moved."""
        self._update(flight)
        self._merged, self._outcome = self._merged + 1, flight.numbers[2:].tolist()

    def _update(self, flight: Flight) -> None:
        numbers, moved = flight.numbers, flight.moved
        total = numbers[1].item()
        if not total:  # nobody had an example
            return
        moved.div_(total)
        numbers[SQUARE] = numbers[SQUARE] / total - self._values.square(moved)
        if self._outer is None:  # nothing learns
            return
        for own, part in zip(self._copies, self._values.views(moved), strict=True):
            own.grad = part
        self._outer.step()
        self._outer.zero_grad()

    def _named(self, flat: Tensor) -> dict[str, Any]:
        return {**self._values.named(self._values.views(flat))}

    def _flat(self, saved: Mapping[str, Any]) -> Tensor:
        flat = torch.empty_like(self._start)
        copy(self._values.views(flat), self._values.read(saved))
        return flat
