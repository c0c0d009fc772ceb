"""Where the values of a block are between the moments at which a module computes with them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import NoReturn, SupportsIndex

import torch
from torch import Tensor, nn

from spartito.collectives.segment import Segment
from spartito.engine.sharding.blocks import Layout, Members, Section
from spartito.engine.sharding.stage import Stage
from spartito.engine.unmade import make
from spartito.errors import UserError


class Home(ABC):
    """The values of one block's parameters, of which this replica has a shard: ``own``, flat.

    The parameters are the user's own, and show the whole values after `gather`.
    """

    is_shared = False
    """Whether the values of an update are there for all once all have made theirs."""
    has_own = False
    """Whether what a replica writes into a parameter is right once all have written it."""

    def __init__(self, members: Members, stage: Stage) -> None:
        self.members, self.stage = members, stage
        self.parameters: Sequence[nn.Parameter] = members.parameters
        sizes = tuple(parameter.numel() for parameter in self.parameters)
        self.layout = Layout(sizes, stage.group.world_size)
        self.dtype = self.parameters[0].dtype
        self.own: Tensor

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Refuse to be copied, or stored, with a model."""
        raise UserError(
            "a copy of a model whose parameters are kept in shards (sharded, zero=3)",
            "Copy it before prepare; strategy.state_dict() has its values whole; or take zero=2.",
        )

    @property
    def size(self) -> int:
        """Elements of all shards."""
        return self.layout.length * self.layout.shards

    def views(self, flat: Tensor) -> list[Tensor]:
        """The parts of a flat tensor of the whole block, shaped as the parameters."""
        parts = flat[: sum(self.layout.sizes)].split(list(self.layout.sizes))
        return [part.view(p.shape) for part, p in zip(parts, self.parameters, strict=True)]

    def _shard(self, flat: Tensor) -> Tensor:
        return flat.view(self.layout.shards, -1)[self.stage.group.rank]

    @abstractmethod
    def fill(self, values: Iterable[Tensor]) -> None:
        """Take these values, one at a time, equal on all replicas; all call this."""

    def gather(self) -> None:  # noqa: B027 - most have them there
        """Let the parameters show all values; all replicas call it."""

    def free(self) -> None:  # noqa: B027 - most keep them
        """Nobody computes with the parameters for a while."""

    def publish(self) -> None:  # noqa: B027 - some have no need
        """Each replica's own shard has new values; all call it."""

    def loaded(self) -> None:
        """All shards have loaded values: whatever was done to the parameters does not count."""
        self._version = sum(p._version for p in self.parameters)
        self.publish()

    @property
    def spans(self) -> list[Section]:
        """This replica's elements of each parameter, perhaps none."""
        found = {section.parameter: section for section in self.layout.shard(self.stage.group.rank)}
        return [found.get(n, Section(n, 0, 0, 0)) for n in range(len(self.parameters))]

    def span_of(self, parameter: nn.Parameter) -> Section:
        """This replica's elements of one of the parameters."""
        return next(s for s in self.spans if self.parameters[s.parameter] is parameter)

    @property
    def sections(self) -> list[Tensor]:
        """Their values, flat."""
        return [self.own[p.offset : p.offset + p.stop - p.start] for p in self.spans]

    @property
    def moved(self) -> list[int]:
        """How far somebody else has moved the parameters' memory; 0 for each is what is right."""
        pairs = zip(self.parameters, self._positions, strict=True)
        moved = [parameter.data_ptr() - position for parameter, position in pairs]
        return [*moved, int(self._written)]

    @property
    def _written(self) -> bool:
        """Whether somebody else has written into the parameters, who had to write once for all."""
        return not self.has_own and self._version != sum(p._version for p in self.parameters)

    def check(self) -> None:
        """Before an update.

        Raises:
            UserError: If somebody else has written into parameters that exist once for all.
        """
        if self._written:
            raise UserError(
                "parameters were changed in place under sharded with zero=3, which keeps each "
                "value once for all replicas: it would be changed more than once, or not at all",
                'Take zero=2 or mirrored, or change values by strategy.load({"model": ...}).',
            )

    def _show(self, views: Sequence[Tensor]) -> None:
        for parameter, view in zip(self.parameters, views, strict=True):
            make(parameter, view)
        self._positions = [view.data_ptr() for view in views]
        if not hasattr(self, "_version"):
            self._version = sum(p._version for p in self.parameters)


class WholeHome(Home):
    """Every replica has all values; the shard says who updates what (stages 1 and 2)."""

    has_own = True

    def __init__(self, members: Members, stage: Stage) -> None:
        super().__init__(members, stage)
        self._flat = torch.zeros(self.size, dtype=self.dtype)
        self.own = self._shard(self._flat)

    def fill(self, values: Iterable[Tensor]) -> None:
        views = self.views(self._flat)
        for view, value in zip(views, values, strict=True):
            view.copy_(value)
        self._show(views)

    def publish(self) -> None:
        self.stage.spread(self.own, self._flat.view(self.layout.shards, -1))


class SharedHome(Home):
    """All values once in memory that the replicas of a machine share: nothing has to be gathered.

    A replica touches its own shard alone in an update.
    """

    is_shared = True

    @staticmethod
    def bytes_of(members: Members, stage: Stage) -> int:
        """What a block takes in the segment: whole lines."""
        sizes = tuple(parameter.numel() for parameter in members.parameters)
        length = Layout(sizes, stage.group.world_size).length
        return -(-length * stage.group.world_size * members.parameters[0].itemsize // 64) * 64

    def __init__(self, members: Members, stage: Stage, segment: Segment, offset: int) -> None:
        super().__init__(members, stage)
        self._flat = segment.tensor(offset, self.size, self.dtype)
        self.own = self._shard(self._flat)

    def fill(self, values: Iterable[Tensor]) -> None:
        views = self.views(self._flat)
        for view, value in zip(views, values, strict=True):
            if self.stage.group.rank == 0:
                view.copy_(value)
        self._show(views)

    def loaded(self) -> None:
        self._show(self.views(self._flat))
        super().loaded()


class GatheredHome(Home):
    """This replica's shard alone; the rest comes while a module computes, and goes again.

    In between the parameters show numbers that are none: whoever computes with them then sees it.
    """

    def __init__(self, members: Members, stage: Stage) -> None:
        super().__init__(members, stage)
        self.own = torch.zeros(self.layout.length, dtype=self.dtype)
        self._flat = torch.zeros(0, dtype=self.dtype)
        self._flat.resize_(self.size)
        self._views = self.views(self._flat)
        self._nothing = float("nan") if self.dtype.is_floating_point else 0
        self._shown = torch.tensor(self._nothing).to(self.dtype)
        self._hidden = [self._shown.expand(p.shape) for p in self.parameters]
        self.is_whole, self._lost = True, False

    @property
    def moved(self) -> list[int]:
        written = bool(self._shown == self._shown) and self.dtype.is_floating_point
        return [int(self._lost or written), *super().moved]

    def fill(self, values: Iterable[Tensor]) -> None:
        for section, whole in zip(self.spans, values, strict=True):
            value = whole.reshape(-1)[section.start : section.stop]
            self.own[section.offset : section.offset + len(value)] = value
        self.free()

    def gather(self) -> None:
        if self.is_whole:
            return
        self._lost = any(self.moved)
        self._flat.untyped_storage().resize_(self.size * self._flat.element_size())
        self.stage.spread(self.own, self._flat.view(self.layout.shards, -1))
        self._show(self._views)
        self.is_whole = True

    def free(self) -> None:
        if self.is_whole:
            self._show(self._hidden)
            self._flat.untyped_storage().resize_(0)
            self.is_whole = False

    def loaded(self) -> None:
        self._shown.fill_(self._nothing)
        self.is_whole, self._lost = True, False  # not any more once it is published
        super().loaded()

    def publish(self) -> None:
        self.free()  # gathered again by a backward pass, after its gradients: values of before
