"""One model whose copies train apart in groups, and what happens when the groups meet.

Since the last meeting group ``g`` went from the common start to ``x_g``, with what weighs ``w_g``.
A meeting takes ``sum_g w_g (start - x_g) / sum_g w_g`` for the gradient of an outer optimizer,
whose update of the start is where all go on. With a learning rate of 1 and no momentum that is
the mean of the models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from spartito.engine.checksum import OTHER_VALUES, different, outliers, rounding_id
from spartito.engine.gradients import Number, same
from spartito.engine.optimizers import unwrap
from spartito.errors import UserError
from spartito.local.flight import Flight
from spartito.local.joined import JoinedGroups
from spartito.local.outer import OuterFactory, load_outer_state, make_outer, outer_state
from spartito.local.plan import EQUAL
from spartito.local.sending import Exchange, Whole
from spartito.local.since import Meetings, Since


class Coupling:
    """The groups of one prepared model, seen from one task.

    Args:
        model: Prepared.
        outer: Makes the outer optimizer.
        weights: One of `spartito.local.plan.WEIGHTS`.
        world: All tasks, by their groups.
        exchange: How leaders add up what their groups have moved.
    """

    def __init__(
        self,
        model: nn.Module,
        outer: OuterFactory,
        weights: str,
        world: JoinedGroups,
        exchange: Exchange,
    ) -> None:
        self.since, self.meetings = Since(), Meetings()
        self.flight: Flight | None = None
        self._is_mixed = False  # since the last meeting, which has left the groups apart
        self._model, self._factory = model, outer
        self._is_equal, self._world, self._exchange = weights == EQUAL, world, exchange
        self._tensors: list[nn.Parameter] = []
        self._aside: list[Tensor] = []
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
        """Whether this task speaks for its group."""
        return self._world.is_leader

    @property
    def nbytes(self) -> int:
        """What all that meets takes, on a leader."""
        return self._start.nbytes

    def take_meetings(self) -> tuple[Meetings, ...]:
        """What the meetings of this epoch came to; the next one begins."""
        found, self.meetings = self.meetings, Meetings()
        return (found,)

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

    def follow(self, parameters: Sequence[nn.Parameter]) -> None:
        """Take the parameters that learn from now on; all tasks call it before an update.

        Args:
            parameters: Those of the optimizer. New ones have equal values in all groups.

        Raises:
            UserError: If the outer optimizer cannot have them.
        """
        if same(parameters, self._tensors):
            return
        outer = self._outer
        states = (
            {}
            if outer is None
            else {
                id(parameter): outer.state[copy]
                for parameter, copy in zip(self._tensors, self._copies, strict=True)
                if copy in outer.state
            }
        )
        self._tensors = list(parameters)
        self._begin()
        for parameter, copy in zip(self._tensors, self._copies, strict=False):
            if self._outer is not None and id(parameter) in states:
                self._outer.state[copy] = states[id(parameter)]

    def count(self, weight: Number, asked: bool) -> None:
        """Take note of an update.

        Args:
            weight: What its loss was divided by.
            asked: Whether a task of the group asked for an end.
        """
        since = self.since
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
        self._compare()
        since, self.since = self.since, Since()
        share = self._share(since.weight)
        numbers = torch.tensor([0.0, share, float(since.asked), 0.0], dtype=torch.float64)
        self.flight = flight = Flight(since.weight, numbers, due)
        if self._world.is_leader:
            flight.moved = self._difference()
            far = float(torch.linalg.vector_norm(flight.moved, dtype=torch.float64))
            numbers[3] = share * far**2
            flight.depart(self._exchange, self._world.line)

    def settle(self) -> None:
        """Wait for the exchange that is under way, if there is one; all tasks call it."""
        if (flight := self.flight) is not None:
            self._world.across(lambda: self._land(flight), flight.numbers)

    def end(self, mixing: float = 0.0) -> bool:
        """Merge what the groups had when `begin` took it; all tasks call it after the same update.

        Args:
            mixing: How much of its own values each group keeps, from 0 to 1.

        Returns:
            Whether a task of any group had asked for an end.

        Raises:
            TaskLostError: If a task is lost.
        """
        flight, self.flight = self.flight, None
        assert flight is not None, "begun"
        numbers, moved = flight.numbers, flight.moved

        def merge() -> None:
            self._land(flight)
            total = numbers[1].item()
            if not total:  # nobody had an example
                return
            moved.div_(total)
            mean = float(torch.linalg.vector_norm(moved, dtype=torch.float64)) ** 2
            numbers[3] = max(0.0, numbers[3].item() / total - mean) ** 0.5
            if self._outer is None:  # nothing learns
                return
            for copy, part in zip(self._copies, self._views(moved), strict=True):
                copy.grad = part
            self._outer.step()
            self._outer.zero_grad()

        self._world.across(merge, numbers)
        self._give(self._start, mixing)
        self._is_mixed = mixing > 0
        if not mixing:  # what was done meanwhile is gone
            self.since = Since(asked=self.since.asked)
        self.meetings.count += 1
        self.meetings.drift += numbers[3].item()
        return bool(numbers[2])

    def show(self) -> bool:
        """Put the weighted mean of the groups' models in place of one's own; all tasks call it.

        Returns:
            Whether anything changed.
        """
        if not self.is_apart or self._aside:
            return False
        self._aside = [parameter.detach().clone() for parameter in self._tensors]
        share = self._share(self._weight)
        numbers = torch.tensor([0.0, share], dtype=torch.float64)
        merged = self._start

        def mean() -> None:
            nonlocal merged
            moved = self._difference()
            Whole().add(moved, numbers[1:], self._world.between)
            if total := numbers[1].item():
                merged = self._start - moved.div_(total)

        self._world.across(mean, numbers)
        self._give(merged)
        return True

    def take_back(self) -> bool:
        """Put one's own values back in place.

        Returns:
            Whether anything changed.
        """
        if not self._aside:
            return False
        aside, self._aside = self._aside, []
        _copy(self._tensors, aside)
        return True

    def restart(self) -> None:
        """The model was given other values, the same in all groups: they begin from these."""
        self._aside, self.since, self.flight = [], Since(), None
        self._is_mixed = False
        self._exchange.error = torch.empty(0)
        if self._outer is not None:
            self._fill_start()

    def own_state(self) -> dict[str, Any]:
        """What this group alone has between meetings, for a checkpoint."""
        values = self._aside or [parameter.detach() for parameter in self._tensors]
        own = dict(zip(self._names, values, strict=True)) if self.is_apart else {}
        state = {"model": own, "weight": float(self.since.weight), "asked": self.since.asked}
        if self._world.is_leader:
            state["nbytes"] = self.meetings.nbytes
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
            state |= {"outer": self._outer_state(), "start": self._named(self._start)}
        if (flight := self.flight) is not None:
            state |= {"due": flight.due, "numbers": flight.numbers.tolist()}
            if self._outer is not None:
                state["moved"] = self._named(flight.moved)
        return state

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
        if "outer" in common:
            self._load_outer(common["outer"])
        if own is None:
            return
        if own["model"]:
            _copy(self._tensors, [own["model"][name] for name in self._names])
        if self._outer is not None and "start" in common:
            _copy(self._copies, [common["start"][name] for name in self._names])
        if self._outer is not None and "error" in own:
            self._exchange.error = torch.zeros_like(self._start)
            parts = self._views(self._exchange.error)
            _copy(parts, [own["error"][name] for name in self._names])
        self.since = Since(common["updates"], own["weight"], own["asked"])
        self._is_mixed = common["mixed"]
        if "due" in common:
            numbers = torch.tensor(common["numbers"], dtype=torch.float64)
            self.flight = flight = Flight(own["in_flight"], numbers, common["due"], landed=True)
            if self._outer is not None:
                flight.moved = torch.empty_like(self._start)
                _copy(self._views(flight.moved), [common["moved"][name] for name in self._names])
        nbytes = own["nbytes"] if self._world.is_leader else 0
        self.meetings = Meetings(common["meetings"], common["drift"], nbytes)

    @property
    def _names(self) -> list[str]:
        """The user's names of what learns."""
        names = {id(p): name for name, p in unwrap(self._model).named_parameters()}
        return [names[id(parameter)] for parameter in self._tensors]

    @property
    def _dtype(self) -> torch.dtype:
        dtype = torch.float32
        for parameter in self._tensors:
            dtype = torch.promote_types(dtype, parameter.dtype)
        if dtype.is_complex:
            raise UserError("complex parameters in groups that train apart", "Use real ones.")
        return dtype

    @property
    def _weight(self) -> Number:
        """Of all that the groups have moved from their common start."""
        return self.since.weight + (0.0 if self.flight is None else self.flight.weight)

    def _share(self, weight: Number) -> float:
        return float(weight > 0) if self._is_equal else float(weight)

    def _land(self, flight: Flight) -> None:
        self.meetings.nbytes += flight.land(self._world.line, self._world.between)

    def _begin(self) -> None:
        """Begin to follow these parameters; leaders keep where they start."""
        self._exchange.error = torch.empty(0)
        self._numel = sum(parameter.numel() for parameter in self._tensors)
        self._copies: list[nn.Parameter] = []
        self._outer: Optimizer | None = None
        dtype = self._dtype
        self._start = torch.empty(0, dtype=dtype)
        if self._world.is_leader:
            self._start = torch.empty(self._numel, dtype=dtype)
            self._copies = [nn.Parameter(part) for part in self._views(self._start)]
            self._fill_start()
            self._outer = make_outer(self._factory, self._copies) if self._copies else None

    def _fill_start(self) -> None:
        _copy(self._copies, self._tensors)

    def _views(self, flat: Tensor) -> list[Tensor]:
        parts = flat.split([p.numel() for p in self._tensors]) if self._tensors else ()
        return [part.view(p.shape) for part, p in zip(parts, self._tensors, strict=True)]

    def _difference(self) -> Tensor:
        """On a leader, how far the group moved away from the start."""
        moved = torch.empty_like(self._start)
        _copy(self._views(moved), self._aside or self._tensors)
        return torch.sub(self._start, moved, out=moved)

    def _named(self, flat: Tensor) -> dict[str, Tensor]:
        return dict(zip(self._names, self._views(flat), strict=True))

    def _give(self, values: Tensor, mixing: float = 0.0) -> None:
        """The leader's values to all of its group, who keep some of their own."""
        inside = self._world.inside
        if not self._numel:
            return
        if not self._world.is_leader:
            values = values.new_empty(self._numel)
        if inside.world_size > 1:
            self._world.within(lambda: inside.broadcast(values))
        views = self._views(values)
        if mixing:
            own = [p.detach().to(values.dtype) for p in self._tensors]
            views = [view.lerp(p, mixing) for view, p in zip(views, own, strict=True)]
        _copy(self._tensors, views)

    def _compare(self) -> None:
        """Refuse a replica that has other values than its group: they would be overwritten."""
        inside = self._world.inside
        if inside.world_size == 1 or not self._tensors:
            return
        norms = torch._foreach_norm([p.detach() for p in self._tensors], 2, dtype=torch.float64)
        mine = crc32(torch.stack(norms).numpy().tobytes())
        told = torch.tensor([mine, rounding_id(torch.device("cpu"))])
        found = [each.tolist() for each in self._world.within(lambda: inside.all_gather(told))]
        values, rounds = zip(*found, strict=True)
        if (unlike := outliers(values)) and len(set(rounds)) == 1:
            raise different(inside, unlike, *OTHER_VALUES)

    def _outer_state(self) -> dict[str, Any]:
        assert self._outer is not None, "a leader"
        names = dict(zip(map(id, self._copies), self._names, strict=True))
        return outer_state(self._outer, names)

    def _load_outer(self, saved: Mapping[str, Any]) -> None:
        if self._outer is not None:
            self._outer = make_outer(self._factory, self._copies)
            load_outer_state(self._outer, dict(zip(self._names, self._copies, strict=True)), saved)


@torch.no_grad()
def _copy(into: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy values into tensors, whatever their dtypes."""
    if into:
        torch._foreach_copy_([each.detach() for each in into], [each.detach() for each in values])
