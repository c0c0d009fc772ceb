"""What groups merge: parameters as one task has them, and which tasks tell them to other groups."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

from spartito.accelerators import rounding_id
from spartito.checkpoint.cuts import Cut, Part, SpanCut, part_of
from spartito.checkpoint.saved_state import Stored
from spartito.collectives.collective import Collective
from spartito.collectives.hierarchical import ENDS_GROUP, PATIENCE
from spartito.collectives.membership.store import error_from_text, error_to_text
from spartito.engine.drift import OTHER_VALUES, different, outliers
from spartito.engine.sharding.homes import Home, settle_all
from spartito.engine.updates.optimizers import unwrap
from spartito.errors import UserError
from spartito.outer.joined_groups import JoinedGroups

SUMMED = 3
"""From which of a meeting's numbers on each part of a model has its own, which are added up."""


class Values(ABC):
    """The parameters of a model that groups merge, as one task has them.

    Args:
        model: Prepared.
        world: All tasks, by their groups.
    """

    is_divided = False
    """Whether the tasks of a group have parts of the parameters."""
    only_finite: Callable[[], bool] = bool
    """Whether what is not finite stays out of meetings, with the group that has it."""

    def __init__(self, model: nn.Module, world: JoinedGroups) -> None:
        self._model, self.world = model, world
        self.parameters: list[nn.Parameter] = []
        self.tensors: Sequence[Tensor] = ()
        """This task's elements of each parameter, where they lie; perhaps none of some."""
        self._flat: list[tuple[Tensor, list[Tensor]]] = []  # that stay, and their views

    @property
    def speaks(self) -> bool:
        """Whether this task exchanges what it has with other groups."""
        return self.world.is_leader

    @property
    def part(self) -> int:
        """Which part of a model this task has, among those of its group: the first is 0."""
        return 0

    @property
    def is_first(self) -> bool:
        """Whether this task alone counts what all parts of its group have in common."""
        return self.world.is_leader and self.part == 0

    @property
    def between(self) -> Collective:
        """Those of other groups that it exchanges it with."""
        return self.world.between

    def square(self, flat: Tensor) -> float:
        """The square of the norm of values like these, as far as this task counts them."""
        return square_of(flat)

    def follow(self, parameters: Sequence[nn.Parameter]) -> None:
        """Take these parameters from now on.

        Args:
            parameters: Of the model.

        Raises:
            UserError: Some are complex.
        """
        self.parameters, self._flat = list(parameters), []
        self.tensors = self._own()
        if self.dtype.is_complex:
            raise UserError("complex parameters in groups that train apart", "Use real ones.")

    @property
    def dtype(self) -> torch.dtype:
        """One that can hold the values of all of them."""
        found = torch.float32
        for parameter in self.parameters:
            found = torch.promote_types(found, parameter.dtype)
        return found

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self.tensors[0].device if self.tensors else torch.device("cpu")

    @property
    def numel(self) -> int:
        """How many elements this task has."""
        return sum(tensor.numel() for tensor in self.tensors)

    @property
    def names(self) -> list[str]:
        """The user's names of the parameters."""
        names = {id(p): name for name, p in unwrap(self._model).named_parameters()}
        return [names[id(parameter)] for parameter in self.parameters]

    def views(self, flat: Tensor) -> list[Tensor]:
        """The parts of a flat tensor, shaped as `tensors`."""
        for known, views in self._flat:
            if known is flat:
                return views
        parts = flat.split([t.numel() for t in self.tensors]) if self.tensors else ()
        return [part.view(t.shape) for part, t in zip(parts, self.tensors, strict=True)]

    def flat(self) -> Tensor:
        """Memory for all elements in a row, whose `views` are there from now on."""
        made = torch.empty(self.numel, dtype=self.dtype, device=self.device)
        self.keep(made)
        return made

    def keep(self, flat: Tensor) -> None:
        """Have the `views` of such memory there from now on.

        Args:
            flat: What `flat` returned for the same parameters.
        """
        self._flat.append((flat, self.views(flat)))

    def named(self, tensors: Sequence[Tensor]) -> dict[str, Any]:
        """Tensors like these, as a checkpoint has them.

        Args:
            tensors: One for each parameter.
        """
        found = zip(self.names, tensors, self._cuts(), strict=True)
        return {name: t if cut is None else Part(t, cut) for name, t, cut in found}

    def named_state(self, state: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """An outer optimizer's state of these parameters, as a checkpoint has it.

        Args:
            state: By the user's names.
        """
        cuts = dict(zip(self.names, self._cuts(), strict=True))
        return {
            name: {key: part_of(value, cuts[name]) for key, value in values.items()}
            for name, values in state.items()
            if not _is_empty(cuts[name])
        }

    def read(self, saved: Mapping[str, Stored]) -> list[Tensor]:
        """What `named` has returned for a checkpoint, as this task has it.

        Args:
            saved: By the user's names.
        """
        found = zip(self.names, self._cuts(), strict=True)
        return [saved[name].read(cut) for name, cut in found]

    def read_state(self, saved: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """What `named_state` has returned for a checkpoint, of the parameters that are here.

        Args:
            saved: By the user's names.
        """
        cuts = dict(zip(self.names, self._cuts(), strict=True))
        return {
            name: {
                key: value.read(cuts[name]) if isinstance(value, Stored) else value
                for key, value in values.items()
            }
            for name, values in saved.items()
            if name in cuts and not _is_empty(cuts[name])
        }

    def give(self, values: Tensor, mixing: float = 0.0) -> None:
        """Let the model have values that were merged; all tasks call it.

        Args:
            values: Flat, of those who speak.
            mixing: How much it keeps of its own.
        """
        views = self.views(self._told(values))
        own = [tensor.detach() for tensor in self.tensors] if mixing else []
        if mixing and (not self.only_finite() or all(bool(t.isfinite().all()) for t in own)):
            self._mix(own, views, 1 - mixing)
        else:
            self.put(views)

    def fill(self, values: Sequence[Tensor]) -> None:
        """Write values where one's own lie; in shards `Home.loaded` follows on all tasks.

        Args:
            values: One for each parameter.
        """
        copy(self.tensors, values)

    def shown(self) -> Sequence[Tensor]:
        """This task's elements of each parameter, as the model shows them to the user."""
        return self.tensors

    @abstractmethod
    def put(self, values: Sequence[Tensor]) -> None:
        """As `fill`, and let the model have them; all tasks call it."""

    @abstractmethod
    def agree(self) -> None:
        """Refuse a replica that has other values than its group; all tasks call it.

        Raises:
            UserError: Which one it is.
            TaskLostError: If a task is lost.
        """

    def all_say(self, own: bool) -> bool:
        """Whether all who speak for this group say so; they alone call it.

        Args:
            own: Whether this task does.
        """
        return own

    @abstractmethod
    def across(self, work: Callable[[], object], numbers: Tensor) -> None:
        """Let those who speak do ``work`` with other groups; all tasks call it.

        Args:
            work: Exchanges something over `between`.
            numbers: In double precision, the first 0, come to all as they are after it; those from
                `SUMMED` on are added up over those who speak for one group.

        Raises:
            TaskLostError: If a task is lost, on all.
        """

    def _together(self, parts: Collective, work: Callable[[], object], numbers: Tensor) -> None:
        """Do ``work`` on all tasks that have a model between them, who all learn how it ended."""
        world, reason = self.world, b""
        try:
            work()
        except ENDS_GROUP as error:
            reason = error_to_text(world.reason(error)).encode()
            numbers[0] = len(reason)
            world.line.group.close()  # so that nobody waits for us
            self.between.close()
        limit = parts.timeout
        parts.timeout += PATIENCE  # another one may wait for its own others, and says for whom
        parts.waiting.enabled = False
        try:
            rows = torch.stack(world.within(lambda: parts.all_gather(numbers)))
            if rows[:, 0].any():
                told = world.within(lambda: parts.all_gather_bytes(reason))
                raise error_from_text(next(filter(None, told)).decode())
        finally:
            parts.timeout = limit
            parts.waiting.enabled = True
        numbers.copy_(rows[0])
        numbers[SUMMED:] = rows[:, SUMMED:].sum(0)

    @abstractmethod
    def _own(self) -> Sequence[Tensor]:
        """This task's elements of each parameter."""

    def _mix(self, own: Sequence[Tensor], values: Sequence[Tensor], part: float) -> None:
        """Let the model have ``own``, the values that it has, moved by a part towards others."""
        pairs = zip(own, values, strict=True)
        self.put([mine.to(value.dtype).lerp(value, part) for mine, value in pairs])

    def _cuts(self) -> list[Cut | None]:
        """Of each parameter which elements those are; None: all."""
        return [None] * len(self.parameters)

    def _told(self, values: Tensor) -> Tensor:
        """Those of who speaks for this task."""
        return values


class Replicas(Values):
    """Tasks that have the same, whose first one speaks for them: all of a model, or a part of it.

    Args:
        model: Prepared.
        column: Those who have the same, by their groups.
        parts: The tasks of one's own group that have a model between them.
        cuts: Of which parameters this task has a part, by name.
        fractions: What each parameter here counts for in a sum over ``parts``.
    """

    def __init__(
        self,
        model: nn.Module,
        column: JoinedGroups,
        parts: Collective,
        cuts: Callable[[], Mapping[str, Cut]],
        fractions: Callable[[Sequence[nn.Parameter]], Sequence[float]],
    ) -> None:
        super().__init__(model, column)
        self._parts, self._cuts_of, self._fractions_of = parts, cuts, fractions
        self.is_divided = parts.world_size > 1
        self._fractions: Sequence[float] = ()

    @property
    def part(self) -> int:
        return self._parts.rank

    def follow(self, parameters: Sequence[nn.Parameter]) -> None:
        super().follow(parameters)
        self._fractions = self._fractions_of(parameters)

    def square(self, flat: Tensor) -> float:
        if not self.is_divided:
            return super().square(flat)
        views = zip(self.views(flat), self._fractions, strict=True)
        return sum(square_of(view) * fraction for view, fraction in views)

    def put(self, values: Sequence[Tensor]) -> None:
        self.fill(values)

    def _mix(self, own: Sequence[Tensor], values: Sequence[Tensor], part: float) -> None:
        if own and all(a.dtype == b.dtype for a, b in zip(own, values, strict=True)):
            torch._foreach_lerp_(list(own), list(values), part)  # in one pass, where they lie
        else:
            super()._mix(own, values, part)

    def agree(self) -> None:
        inside = self.world.inside
        if inside.world_size == 1 or not self.tensors:
            return
        norms = torch._foreach_norm([t.detach() for t in self.tensors], 2, dtype=torch.float64)
        mine = crc32(torch.stack(norms).cpu().numpy().tobytes())
        told = torch.tensor([mine, rounding_id(self.device)])
        found = [each.tolist() for each in self.world.within(lambda: inside.all_gather(told))]
        values, rounds = zip(*found, strict=True)
        if (unlike := outliers(values)) and len(set(rounds)) == 1:
            raise different(inside, unlike, *OTHER_VALUES)

    def all_say(self, own: bool) -> bool:
        return own if not self.is_divided else _all_say(self.world, self._parts, own)

    def across(self, work: Callable[[], object], numbers: Tensor) -> None:
        if not self.is_divided:
            self.world.across(work, numbers)
            return
        self._together(self._parts, lambda: self.world.across(work, numbers), numbers)

    def _own(self) -> Sequence[Tensor]:
        return self.parameters

    def _cuts(self) -> list[Cut | None]:
        cuts = self._cuts_of()
        return [cuts.get(name) for name in self.names]

    def _told(self, values: Tensor) -> Tensor:
        inside = self.world.inside
        if not self.speaks:
            values = values.new_empty(self.numel)
        if inside.world_size > 1 and len(values):
            self.world.within(lambda: inside.broadcast(values))
        return values


class Shards(Values):
    """Each task has a shard, and speaks for it: groups are of one size.

    Args:
        model: Prepared.
        world: All tasks, by their groups.
        between: Those who have the same shard.
        homes: Of the model's parameters, by their ids.
        copies: How many tasks of a group have the same shard.
    """

    is_divided = True

    def __init__(
        self,
        model: nn.Module,
        world: JoinedGroups,
        between: Collective,
        homes: Mapping[int, Home],
        copies: int = 1,
    ) -> None:
        super().__init__(model, world)
        self._between, self._homes, self._copies = between, homes, copies

    def square(self, flat: Tensor) -> float:
        return super().square(flat) / self._copies

    @property
    def speaks(self) -> bool:
        return True

    @property
    def between(self) -> Collective:
        return self._between

    def put(self, values: Sequence[Tensor]) -> None:
        inside, homes = self.world.inside, self._in
        for home in homes:
            home.release()
        self.world.within(inside.barrier)  # others may compute with what is there
        self.fill(values)
        for home in homes:
            # What was written into the parameters since the groups met is gone, as it is where
            # each has all of them; left on a page of its own it would be taken at the next update.
            if home.is_written:
                home.loaded()
            else:
                home.publish()
        self.world.within(inside.barrier)

    def shown(self) -> Sequence[Tensor]:
        for home in self._in:
            home.release()
        return self._parts_of(lambda home: home.shown)

    def agree(self) -> None:
        self.world.within(lambda: settle_all(self._in, self.world.inside))

    def all_say(self, own: bool) -> bool:
        return _all_say(self.world, self.world.inside, own)

    def across(self, work: Callable[[], object], numbers: Tensor) -> None:
        self._together(self.world.inside, work, numbers)

    @property
    def part(self) -> int:
        return self.world.inside.rank

    @property
    def _in(self) -> list[Home]:
        return list(dict.fromkeys(self._homes[id(p)] for p in self.parameters))

    def _own(self) -> Sequence[Tensor]:
        return self._parts_of(lambda home: home.own)

    def _parts_of(self, shard: Callable[[Home], Tensor]) -> list[Tensor]:
        """This task's elements of each parameter in the shards of their homes."""
        found = []
        for parameter, cut in zip(self.parameters, self._cuts(), strict=True):
            home = self._homes[id(parameter)]
            own, at = shard(home), home.span_of(parameter).offset
            if cut is None:
                found.append(own[at : at + parameter.numel()].view(parameter.shape))
            else:
                found.append(own[at : at + cut.local[0]])
        return found

    def _cuts(self) -> list[Cut | None]:
        found: list[Cut | None] = []
        for parameter in self.parameters:
            span, shape = self._homes[id(parameter)].span_of(parameter), tuple(parameter.shape)
            whole = span.stop - span.start == parameter.numel()
            found.append(None if whole else SpanCut(shape, span.start, span.stop))
        return found


def _all_say(world: JoinedGroups, group: Collective, own: bool) -> bool:
    says = torch.tensor([float(own)])
    return bool(world.within(lambda: group.all_reduce(says)).item() == group.world_size)


def square_of(tensor: Tensor) -> float:
    """The square of the L2 norm."""
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) ** 2


@torch.no_grad()
def copy(into: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy values into tensors, whatever their dtypes.

    Args:
        into: Tensors that may learn.
        values: One for each of them.
    """
    if into:
        torch._foreach_copy_([each.detach() for each in into], [each.detach() for each in values])


def _is_empty(cut: Cut | None) -> bool:
    """Whether a task has no elements of a parameter, so that it counts nothing for it either."""
    return cut is not None and cut.local == (0,)
