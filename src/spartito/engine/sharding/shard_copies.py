"""A second copy of each replica's shard, so that a task may be lost at any moment.

After each update a replica writes its shard (its part of the parameters, and of the optimizer's
state) to where others can read it, and all meet. Two versions lie there in turn: who is lost while
it writes has left the one before. Who came through the meeting knows that the new one is complete.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from math import prod
from operator import is_
from typing import Any

import msgspec
import torch
from msgspec.structs import astuple
from torch import Tensor

from spartito.collectives.calls import encode
from spartito.collectives.collective import Collective
from spartito.collectives.memory.pages import PAGE
from spartito.collectives.memory.shared_memory import SharedMemoryCollective
from spartito.collectives.sockets.tcp import SocketCollective, views
from spartito.collectives.staged import on_host
from spartito.errors import UserError

NONE = -1
"""The version of a task that has no state."""
ALIGNED = 64  # bytes
VALUES = -1  # stands for the number of a parameter: the shard of a block's values


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """A tensor of a shard, or a number that an optimizer keeps.

    ``parameter`` counts within its block, `VALUES` for the shard of all its values; ``key`` is that
    of the optimizer's state.
    """

    block: int
    parameter: int
    key: str
    dtype: str
    shape: tuple[int, ...]
    number: float | int | bool | None = None

    @classmethod
    def of(cls, block: int, parameter: int, key: str, value: Any) -> Entry:
        """What is told of ``value``."""
        if isinstance(value, Tensor):
            name = str(value.dtype).removeprefix("torch.")
            return cls(block, parameter, key, name, tuple(value.shape))
        if value is None or isinstance(value, float | int):
            return cls(block, parameter, key, "", (), value)
        raise UserError(
            f"an optimizer's state {key!r} that is a {type(value).__name__}, with recovery",
            "Choose one of torch's own optimizers, or leave recovery out.",
        )

    @property
    def is_tensor(self) -> bool:
        """Whether it is not a number."""
        return bool(self.dtype)

    def empty(self) -> Tensor:
        """Memory for it."""
        return torch.empty(self.shape, dtype=getattr(torch, self.dtype))

    @property
    def nbytes(self) -> int:
        """What it takes."""
        return prod(self.shape) * getattr(torch, self.dtype).itemsize if self.is_tensor else 0

    def view(self, memory: Tensor, offset: int) -> Tensor:
        """It, in the bytes that it lies in from ``offset`` on."""
        part = memory[offset : offset + self.nbytes].view(getattr(torch, self.dtype))
        return part.view(self.shape)


Shard = Sequence[tuple[int, int, Mapping[str, Any]]]
"""The parts of a shard, those of the values first: block, parameter, and values by key."""


def _values(shard: Shard) -> list[Any]:
    return [value for _, _, each in shard for value in each.values()]


def offsets(entries: Iterable[Entry]) -> list[int]:
    """Where each begins, one after the other; the last number is the size of all."""
    found = [0]
    for entry in entries:
        found.append(found[-1] + -(-entry.nbytes // ALIGNED) * ALIGNED)
    return found


class Memory(ABC):
    """Where the shards of a group's tasks lie: two versions of each, of so many bytes."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = sizes

    @abstractmethod
    def own(self, turn: int) -> Tensor:
        """This task's bytes of one of the two versions."""

    def send(self, turn: int) -> None:  # noqa: B027 - memory of all needs none
        """Bring own bytes to who keeps them, and those that this task keeps; all call it."""

    @abstractmethod
    def of(self, rank: int, turn: int) -> Tensor | None:
        """The bytes of a task, if this one has them."""


class SharedCopies(Memory):
    """On one machine: memory that all have mapped, and that outlives each of them."""

    def __init__(self, group: SharedMemoryCollective, sizes: Sequence[int]) -> None:
        super().__init__(sizes)
        self._rank, whole = group.rank, [-(-size // PAGE) * PAGE for size in sizes]
        segment = group.segment(max(PAGE, 2 * sum(whole)))
        self._bytes = [
            [
                segment.tensor(turn * sum(whole) + sum(whole[:rank]), size, torch.uint8)
                for rank, size in enumerate(sizes)
            ]
            for turn in (0, 1)
        ]

    def own(self, turn: int) -> Tensor:
        return self._bytes[turn][self._rank]

    def of(self, rank: int, turn: int) -> Tensor | None:
        return self._bytes[turn][rank]


class SentCopies(Memory):
    """Over sockets: each task sends its shard to the next, of another machine if there is one.

    Its own lies here too: an update that another task did not live to make is undone by it.
    """

    def __init__(self, group: SocketCollective, sizes: Sequence[int], order: Sequence[int]) -> None:
        super().__init__(sizes)
        self._group, at = group, order.index(group.rank)
        self._keeper, self._kept = order[(at + 1) % len(order)], order[at - 1]
        self._bytes = {
            rank: [torch.zeros(sizes[rank], dtype=torch.uint8) for _ in (0, 1)]
            for rank in (group.rank, self._kept)
        }

    def own(self, turn: int) -> Tensor:
        return self._bytes[self._group.rank][turn]

    def send(self, turn: int) -> None:
        with self._group.current_call.call(encode("copies of shards", 0, torch.uint8)):
            self._group.exchange(
                {self._keeper: views([self.own(turn)])},
                {self._kept: views([self._bytes[self._kept][turn]])},
            )

    def of(self, rank: int, turn: int) -> Tensor | None:
        return self._bytes[rank][turn] if rank in self._bytes else None


class OwnCopy(Memory):
    """A task that is alone."""

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__(sizes)
        self._bytes = [torch.zeros(sizes[0], dtype=torch.uint8) for _ in (0, 1)]

    def own(self, turn: int) -> Tensor:
        return self._bytes[turn]

    def of(self, rank: int, turn: int) -> Tensor | None:
        return self._bytes[turn]


def check_group(group: Collective) -> None:
    """Raise `UserError` for a group whose tasks can keep no copies for each other."""
    host = on_host(group)
    if not isinstance(host, SharedMemoryCollective | SocketCollective) and group.world_size > 1:
        raise UserError(
            "recovery of shards with several tasks on each of several machines",
            "Add communication='sockets': then each shard has its copy on another machine.",
        )


def make_memory(group: Collective, sizes: Sequence[int], local_ranks: Sequence[int]) -> Memory:
    """Memory of a group, whose tasks all call this and have these ranks on their machines."""
    host = on_host(group)
    if isinstance(host, SharedMemoryCollective):
        return SharedCopies(host, sizes)
    if isinstance(host, SocketCollective):
        order = sorted(range(group.world_size), key=lambda rank: (local_ranks[rank], rank))
        return SentCopies(host, sizes, order)
    return OwnCopy(sizes)


@dataclass(frozen=True)
class Snapshot:
    """All shards after one update, as far as this task has them."""

    version: int
    names: Sequence[str]
    entries: Sequence[Sequence[Entry]]
    memory: Memory

    def tensors(self, rank: int) -> list[Tensor] | None:
        """The tensors of a task's shard; None where they are elsewhere."""
        found, entries = self.memory.of(rank, self.version % 2), self.entries[rank]
        if found is None:
            return None
        pairs = zip(entries, offsets(entries), strict=False)
        return [entry.view(found, offset) for entry, offset in pairs if entry.is_tensor]

    def values(self, rank: int) -> list[Tensor]:
        """The values of each block in a task's shard; none where they are elsewhere."""
        found = self.memory.of(rank, self.version % 2)
        first = [*takewhile(lambda entry: entry.parameter == VALUES, self.entries[rank])]
        pairs = zip(first, offsets(first), strict=False)
        return [] if found is None else [entry.view(found, offset) for entry, offset in pairs]


class _Told(msgspec.Struct, array_like=True):
    """What a task tells of its shard before it lies anywhere."""

    local_rank: int
    entries: list[Entry]


_told = msgspec.msgpack.Decoder(_Told)


class ShardCopies:
    """What a task has of the shards of all, its own included, after the newest update.

    Args:
        group: The tasks.
        local_rank: Which one of its machine this is.

    Raises:
        UserError: These tasks can keep no copies for each other.
    """

    def __init__(self, group: Collective, local_rank: int) -> None:
        self.committed = NONE
        """The newest version that is certainly complete everywhere."""
        self.is_older = False
        """Whether something other than an update has changed values since."""
        self.snapshots: dict[int, Snapshot] = {}
        self.regroup(group, local_rank)

    def regroup(self, group: Collective, local_rank: int) -> None:
        """From now on among other tasks; what is here stays until the next version is complete."""
        check_group(group)
        self._group, self._local_rank = group, local_rank
        self._now: Snapshot | None = None
        self._slots: dict[int, list[Tensor]] = {}
        self._values: list[Any] = []
        self._written: list[int] = []

    def forget(self) -> None:
        """What is here is of no use any more."""
        self.committed, self.snapshots = NONE, {}

    def look(self, shard: Shard) -> None:
        """Look whether something other than an update has changed values; before each one."""
        changed = not self._fits(_values(shard)) or self._written != self._versions()
        self.is_older = self.is_older or changed

    def keep(self, shard: Shard) -> None:
        """Write a new version of this task's shard; all call it, and meet behind it."""
        version, values = self.committed + 1, _values(shard)
        self.snapshots = {n: each for n, each in self.snapshots.items() if n == self.committed}
        fits = self._fits(values)
        if self._now is not None:
            now = replace(self._now, version=version)
            if fits:
                self._write(now)
                self.snapshots[version] = self._now = now
            now.memory.send(version % 2)
        if self._now is None or self._is_any(not fits):
            self._values = values
            self._now = now = self._make(version, shard)
            self._write(now)
            now.memory.send(version % 2)
            self.snapshots[version] = now
            self._group.barrier()
        self.committed, self.is_older, self._written = version, False, self._versions()

    def _fits(self, values: Sequence[Any]) -> bool:
        return len(values) == len(self._values) and all(map(is_, values, self._values))

    def _versions(self) -> list[int]:
        return [value._version for value in self._values if isinstance(value, Tensor)]

    def _is_any(self, here: bool) -> bool:
        return bool(self._group.all_reduce(torch.tensor([float(here)])).item())

    def _make(self, version: int, shard: Shard) -> Snapshot:
        """Memory for shards that are not what they were, on some task; all call it."""
        entries = [
            Entry.of(block, parameter, key, value)
            for block, parameter, each in shard
            for key, value in each.items()
        ]
        if len({entry[:3] for entry in map(astuple, entries)}) < len(entries):
            raise UserError(
                "recovery of shards with two optimizers that have state of one parameter",
                "Give each parameter to one optimizer, or leave recovery out.",
            )
        own = msgspec.msgpack.encode(_Told(self._local_rank, entries))
        all_ = [_told.decode(each) for each in self._group.all_gather_bytes(own)]
        sizes = [offsets(each.entries)[-1] for each in all_]
        memory = make_memory(self._group, sizes, [each.local_rank for each in all_])
        self._slots.clear()
        return Snapshot(version, self._group.names, [each.entries for each in all_], memory)

    @torch.no_grad()
    def _write(self, now: Snapshot) -> None:
        turn = now.version % 2
        if turn not in self._slots:
            self._slots[turn] = now.tensors(self._group.rank) or []
        tensors = [value.detach() for value in self._values if isinstance(value, Tensor)]
        torch._foreach_copy_(self._slots[turn], tensors)
