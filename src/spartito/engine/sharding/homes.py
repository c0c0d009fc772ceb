"""Where the values of a block are between the moments at which a module computes with them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NoReturn, Protocol, SupportsIndex
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from spartito.collectives.collective import Collective
from spartito.collectives.memory.pages import PAGE, PrivatePages
from spartito.collectives.memory.segment import Segment
from spartito.engine.devices.host_reads import Number
from spartito.engine.devices.memory_layout import viewing
from spartito.engine.drift import OTHER_VALUES, different, outliers
from spartito.engine.meta.meta_models import make
from spartito.engine.sharding.block_transport import Stage
from spartito.engine.sharding.blocks import Layout, Members, Section
from spartito.engine.sharding.hidden_parameters import cover, no_copies, uncover
from spartito.errors import UserError
from spartito.fingerprints import checksum


class BlockOfHome(Protocol):
    """What waits for an update of a block's parameters: sums, and whole gradients in ``.grad``."""

    @property
    def home(self) -> Home:
        """The block."""
        ...

    missing: int
    parts: dict[int, Any]

    def begin_pass(self, syncs: bool) -> None:
        """Before a backward pass, in which gradients are summed, or not."""
        ...

    def end_pass(self) -> None:
        """After it."""
        ...

    def discard(self, discards: bool) -> None:
        """Whether the next backward pass counts for nothing."""
        ...

    @property
    def holds_any(self) -> bool:
        """Whether there are sums."""
        ...

    def clear(self) -> None:
        """Forget them."""
        ...

    def scale(self, factor: Number) -> None:
        """Multiply them."""
        ...

    def meet(self, replicas: Collective) -> None:
        """Add up those of the tasks that have the same shards; all call it."""
        ...

    def whole_sums(self) -> list[Tensor]:
        """Those of all shards, by the parameters; all call it."""
        ...

    def reduce(self) -> None:
        """Add the whole gradients that wait on all replicas to the sums; all call it."""
        ...

    def give(self, idle: frozenset[int]) -> None:
        """Let the optimizer find the sums of all parameters but those that nobody has used."""
        ...


class Home(ABC):
    """The values of one block's parameters, of which this replica has a shard: ``own``, flat.

    The parameters are the user's own, and show the whole values after `gather`.
    """

    is_shared = False
    """Whether the values of an update are there for all once all have made theirs."""
    was_written = False
    """Whether it has taken values that were written beside the updates."""
    watches = False
    """Whether `was_written` has to be right: writes may be looked for at some cost."""

    def __init__(self, members: Members, stage: Stage) -> None:
        self.members, self.stage = members, stage
        self.parameters: Sequence[nn.Parameter] = members.parameters
        sizes = tuple(parameter.numel() for parameter in self.parameters)
        self.layout = Layout(sizes, stage.group.world_size)
        self.dtype = self.parameters[0].dtype
        self.own: Tensor

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Refuse to be copied, or stored, with a model."""
        raise no_copies()

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

    def block(self, learn: set[int], used: set[int]) -> BlockOfHome | None:
        """What waits for an update of this block, where that does not wait in ``.grad``.

        Args:
            learn: The ids of an optimizer's parameters.
            used: Gets the ids of those that had a gradient.

        Returns:
            None where it does.
        """
        return None

    def gather(self) -> None:  # noqa: B027 - most have them there
        """Let the parameters show all values; all replicas call it."""

    def gather_to_stay(self) -> None:  # noqa: B027 - most have them there
        """As `gather`, for somebody who does not say when he is done: until the next update."""

    def free(self) -> None:  # noqa: B027 - most keep them
        """Nobody computes with the parameters for a while."""

    def release(self) -> None:
        """An update or something like it follows: nobody has to see all values before the end."""
        self._take_moved()

    def publish(self) -> None:  # noqa: B027 - some have no need
        """Each replica's own shard has new values; all call it."""

    def updated(self) -> None:  # noqa: B027 - most have no need
        """An update is over."""

    def seen(self, rank: int) -> Tensor | None:
        """The shard of another replica, where this one has it and writes leave no trace."""
        return None

    @property
    def shown(self) -> Tensor:
        """This replica's shard as its parameters show it, with what was written into them."""
        return self.own

    def leave(self) -> None:  # noqa: B027 - most have nothing to undo
        """The parameters get another home."""

    def loaded(self) -> None:
        """All shards have loaded values: whatever was done to the parameters does not count."""
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
    def is_written(self) -> bool:
        """Whether this replica has written values that those of the others have to equal."""
        return False

    def take_written(self) -> None:  # noqa: B027 - most have it there
        """Take what was written into the parameters; all have, and meet behind it."""

    @property
    def is_doubtful(self) -> bool:
        """Whether what this replica has written may not be what all have."""
        return False

    def show_new(self) -> None:  # noqa: B027 - most show them anyway
        """Let the parameters show what all have taken."""

    def _take_moved(self) -> None:
        """Values that were put into ``.data`` go to where they belong."""
        for parameter, view in zip(self.parameters, self._shown, strict=True):
            if not shows(parameter, view):
                if parameter.shape != view.shape or parameter.dtype != view.dtype:
                    raise UserError(
                        f"a parameter of a {type(self.members.module).__name__} was "
                        f"{tuple(view.shape)} of {view.dtype}, and is {tuple(parameter.shape)} of "
                        f"{parameter.dtype} since its .data was replaced",
                        "In shards it keeps its shape and dtype.",
                    )
                view.copy_(parameter.detach())
                parameter.data = view

    def _take_shown(self, shown: Tensor, own: Tensor) -> None:
        """Put into our own elements what was written where a module's values were shown.

        Whether it was is not looked for on a device, which would be waited for, unless it counts.
        """
        if not (own.is_cpu or self.watches):
            own.copy_(shown)
        elif not same_bits(shown, own):
            own.copy_(shown)
            self.was_written = True

    @property
    def _is_moved(self) -> bool:
        pairs = zip(self.parameters, self._shown, strict=True)
        return not all(shows(parameter, view) for parameter, view in pairs)

    def _show(self, views: Sequence[Tensor]) -> None:
        self._shown = views
        for parameter, view in zip(self.parameters, views, strict=True):
            make(parameter, view)


class WholeHome(Home):
    """Every replica has all values; the shard says who updates what (stages 1 and 2)."""

    def __init__(self, members: Members, stage: Stage) -> None:
        super().__init__(members, stage)
        self._flat = torch.zeros(self.size, dtype=self.dtype, device=stage.device)
        self.own = self._shard(self._flat)

    def fill(self, values: Iterable[Tensor]) -> None:
        views = self.views(self._flat)
        for view, value in zip(views, values, strict=True):
            view.copy_(value)
        self._show(views)
        self.show_new()

    @property
    def is_written(self) -> bool:
        return self._is_moved or self._version != sum(p._version for p in self.parameters)

    @property
    def is_doubtful(self) -> bool:
        return True

    def show_new(self) -> None:
        self._version = sum(p._version for p in self.parameters)

    def seen(self, rank: int) -> Tensor | None:
        return self._flat.view(self.layout.shards, -1)[rank]

    def publish(self) -> None:
        self.stage.spread(self.own, self._flat.view(self.layout.shards, -1))


class SharedHome(Home):
    """All values once in memory that the replicas of a machine share: nothing has to be gathered.

    A replica touches its own shard alone in an update. The parameters show a second mapping: what
    is written into them stays on the replica that did it, until all replicas take it at once.
    """

    is_shared = True

    @staticmethod
    def bytes_of(members: Members, stage: Stage) -> int:
        """What a block takes in the segment: whole pages."""
        sizes = tuple(parameter.numel() for parameter in members.parameters)
        length = Layout(sizes, stage.group.world_size).length
        return -(-length * stage.group.world_size * members.parameters[0].itemsize // PAGE) * PAGE

    def __init__(self, members: Members, stage: Stage, segment: Segment, offset: int) -> None:
        super().__init__(members, stage)
        self._flat = segment.tensor(offset, self.size, self.dtype)
        self._seen = segment.tensor(offset, self.size, self.dtype, segment.view)
        self.own = self._shard(self._flat)
        self._private = PrivatePages(segment, offset, self.bytes_of(members, stage))

    def fill(self, values: Iterable[Tensor]) -> None:
        for view, value in zip(self.views(self._flat), values, strict=True):
            if self.stage.group.rank == 0:
                view.copy_(value)
        self._private.forget_shared()
        self._show(self.views(self._seen))

    @property
    def is_written(self) -> bool:
        return self._is_moved or bool(len(self._private.find()))

    @property
    def shown(self) -> Tensor:
        return self._shard(self._seen)

    def take_written(self) -> None:
        self.own.copy_(self.shown)

    @property
    def is_doubtful(self) -> bool:
        return not self._private.are_as_shared

    def show_new(self) -> None:
        self._private.drop()

    def publish(self) -> None:
        if not self._private.are_told:  # one that was written with the same values is of before
            self._private.drop()

    def loaded(self) -> None:
        self._show(self.views(self._seen))
        self.show_new()


class GatheredHome(Home):
    """This replica's shard alone; the rest comes while a module computes, and goes again.

    In between the parameters are `Hidden`: whoever computes with them then has them gathered, and
    they stay until the next update, if gradients may need them. What is written while they are
    there is taken when they go: all replicas have written it.
    """

    def __init__(self, members: Members, stage: Stage) -> None:
        super().__init__(members, stage)
        self.own = torch.zeros(self.layout.length, dtype=self.dtype, device=stage.device)
        self._make_memory()
        self._left: list[tuple[StorageWeakRef, int]] = []  # with the updates before it
        self._updates = 0
        nothing = torch.tensor(float("nan") if self.dtype.is_floating_point else 0)
        self._nothing = [
            nothing.to(stage.device, self.dtype).expand(p.shape) for p in self.parameters
        ]
        self.is_whole, self._is_kept = True, False
        self._before: Tensor | None = None  # what others may have written into since

    def fill(self, values: Iterable[Tensor]) -> None:
        for section, whole in zip(self.spans, values, strict=True):
            value = whole.reshape(-1)[section.start : section.stop]
            self.own[section.offset : section.offset + len(value)] = value
        self.publish()

    def gather(self) -> None:
        if self.is_whole:
            return
        self._flat.untyped_storage().resize_(self.size * self._flat.element_size())
        self.stage.spread(self.own, self._flat.view(self.layout.shards, -1))
        uncover(self.parameters)
        self._show(self._views)
        whole_homes[self._flat.untyped_storage().data_ptr()] = self
        self.is_whole = True

    def gather_to_stay(self) -> None:
        with self.stage.group.current_call.during("parameter without its module"):
            self.gather()
        self._is_kept = torch.is_grad_enabled()
        if self.watches:
            self._before = self._flat.clone()

    def free(self) -> None:
        if self.is_whole and not self._is_kept:
            self.release()

    def leave(self) -> None:
        if self.is_whole:
            whole_homes.pop(self._flat.untyped_storage().data_ptr(), None)
        else:
            uncover(self.parameters)

    def release(self) -> None:
        if self.is_whole:
            self._take_moved()
            if self._before is not None:
                self.was_written |= not same_bits(self._before, self._flat)
            self._take_shown(self._shard(self._flat), self.own)
            self.publish()

    def publish(self) -> None:
        if self.is_whole:
            self._show(self._nothing)
            cover(self.parameters, self)
            storage = self._flat.untyped_storage()
            whole_homes.pop(storage.data_ptr(), None)
            ours = 2 + len(self._views)
            if torch._C._storage_Use_Count(storage._cdata) > ours or not storage.resizable():
                self._left.append((StorageWeakRef(storage), self._updates))  # others have views
                self._make_memory()
            self._flat.untyped_storage().resize_(0)
            self.is_whole = self._is_kept = False
            self._before = None

    def _make_memory(self) -> None:
        self._flat = torch.empty(0, dtype=self.dtype, device=self.stage.device)
        self._flat.resize_(self.size)
        self._views = self.views(self._flat)

    def updated(self) -> None:
        self._updates += 1
        self._left = [(left, since) for left, since in self._left if not left.expired()]
        if any(self._updates - since > 2 for _, since in self._left):
            raise UserError(
                f"a view of parameters of a {type(self.members.module).__name__} (p.data, "
                "p.detach(), p[0], ...) is kept, and has the values of three updates ago",
                "With shards between machines keep the parameter itself, or a copy: p.clone().",
            )

    def saved(self, like: Tensor) -> Callable[[], Tensor]:
        """What gives a tensor that lies in the memory that is gathered now, then too."""
        view = viewing(like)

        def again() -> Tensor:
            self.gather()
            return view(self._flat.untyped_storage())

        return again


class Saves(Protocol):
    """What can give a tensor of gathered memory once more."""

    def saved(self, like: Tensor) -> Callable[[], Tensor]:
        """As `GatheredHome.saved`."""
        ...


whole_homes: WeakValueDictionary[int, Saves] = WeakValueDictionary()
"""The blocks that are gathered now, by the address of their memory."""


def shows(parameter: nn.Parameter, view: Tensor) -> bool:
    """Whether a parameter still lies where a view of our memory does."""
    if view.is_cpu:
        return parameter.is_set_to(view)
    # Not every device has that operation.
    return (
        parameter.untyped_storage()._cdata == view.untyped_storage()._cdata
        and parameter.storage_offset() == view.storage_offset()
        and parameter.shape == view.shape
        and parameter.stride() == view.stride()
    )


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one shape and dtype have the same bits."""
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def settle(homes: Collection[Home], group: Collective, writers: float) -> None:
    """Make what was written into parameters beside the updates the values of all replicas.

    All of ``group`` call this, of which so many have written.

    Raises:
        UserError: If not all have written the same.
    """
    for home in homes:
        home.release()
    if not writers:
        return
    if writers < group.world_size:
        _compare(homes, group)
    for home in homes:
        home.take_written()
        home.was_written = True
    group.barrier()
    unlike = any(home.is_doubtful for home in homes)
    if group.all_reduce(torch.tensor([float(unlike)])).item():
        _compare(homes, group)
    for home in homes:
        home.show_new()


def settle_all(homes: Collection[Home], group: Collective) -> None:
    """Find out who has written, and `settle`; all of ``group`` call this."""
    if homes:
        written = torch.tensor([float(any(home.is_written for home in homes))])
        settle(homes, group, group.all_reduce(written).item())


def _compare(homes: Iterable[Home], group: Collective) -> None:
    """Raise `UserError` if replicas see different values."""
    mine = checksum(parameter for home in homes for parameter in home.parameters)
    found = [int(each) for each in group.all_gather(torch.tensor([mine]))]
    if unlike := outliers(found):
        raise different(group, unlike, *OTHER_VALUES)
