"""A group of tasks on one machine: sums where the gradients lie, by memory that all have mapped.

What all do in a step, `synchronize` and a few scalars beside, takes one meeting; what is repeated
(`reducer`, `slices`) has memory of its own, in which nothing is copied that nobody reads. Other
operations go through the slots of `Memory`, as those of the `torch.distributed` backend do.
"""

from __future__ import annotations

import struct
import weakref
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Self

import msgspec
import torch
from torch import Tensor

from spartito.collectives.alarm import TaskAlarm
from spartito.collectives.arithmetic import arithmetic
from spartito.collectives.calls import encode, waiting_in
from spartito.collectives.collective import (
    MAX_PIGGYBACKED,
    Collective,
    Piggybacked,
    Reducer,
    add_piggybacked,
)
from spartito.collectives.membership.store import Membership
from spartito.collectives.memory.memory_operations import SharedMemoryOperations
from spartito.collectives.memory.rank_memory import LARGE, Memory
from spartito.collectives.memory.segment import Segment
from spartito.collectives.memory.slices import Slices
from spartito.collectives.rows import row_of
from spartito.errors import SpartitoError, TaskLostError, UserError
from spartito.heartbeat import dump_stacks, last_words
from spartito.system import affinity
from spartito.system.capacity import own_cgroup

LINE = 64  # bytes of a cache line: no two ranks write into the same one
CELL = -(-MAX_PIGGYBACKED * 8 // LINE) * LINE  # bytes of the scalars of a rank, in each turn
SCALARS = [struct.Struct(f"={count}d") for count in range(MAX_PIGGYBACKED + 1)]


class Cores(msgspec.Struct, frozen=True):
    """Which CPU cores a process may use, and the cgroup whose quota it has.

    Containers of one machine share cores, but not quotas.
    """

    cores: tuple[int, ...]
    cgroup: str

    @classmethod
    def own(cls) -> Self:
        """Those of this process."""
        return cls(tuple(sorted(affinity())), own_cgroup())

    def suffice(self, everyone: Sequence[Cores], quota: float) -> bool:
        """Whether all with the same cores, and all with the same ``quota``, can compute at once."""
        sharing = sum(other.cores == self.cores for other in everyone)
        return sharing <= len(self.cores) and (
            sum(other.cgroup == self.cgroup for other in everyone) <= quota
        )


class _Alarm(TaskAlarm):
    """The errors of a group of tasks of one machine."""

    def __init__(self, group: SharedMemoryCollective) -> None:
        super().__init__(group)
        self._group = weakref.proxy(group)

    def gone(self, ranks: Sequence[int]) -> BaseException:
        names = self._group.names
        who = " and ".join(names[rank] for rank in ranks)
        is_gone = "is gone: its process" if len(ranks) == 1 else "are gone: their processes"
        return TaskLostError(
            f"{who} {is_gone} ended while {names[self._group.rank]} waited"
            + "".join(last_words(names[rank]) for rank in ranks),
            f"Look at the last lines of {who}." + dump_stacks(f"{who} {is_gone.partition(':')[0]}"),
        )

    def late(self, ranks: Sequence[int], limit: float) -> BaseException:
        group = self._group
        who = " and ".join(group.names[rank] for rank in ranks)
        said = f"{who} did not come within {limit:g} s"
        memory: Memory | None = vars(group).get("memory")
        if memory is None:  # we did not meet
            return TaskLostError(said)
        return TaskLostError(
            f"{said}; {'its process lives' if len(ranks) == 1 else 'their processes live'}"
            + "".join(last_words(group.names[rank]) for rank in ranks),
            f"{waiting_in(group.current_call.tag)}It may be stopped, busy elsewhere, or at "
            "another call than the others. SPARTITO_TIMEOUT sets the limit in seconds."
            + dump_stacks(f"{who} did not come"),
        )


class SharedMemoryCollective(Collective):
    """A group of tasks on one machine.

    Args:
        group: The tasks; their store is used while they meet.
        spins: Whether a wait looks at the memory for a while before it gives up its core.
        directories: Where the memory may be, as of `Memory`.
    """

    def __init__(
        self,
        group: Membership,
        spins: bool = False,
        directories: Sequence[Path] | None = None,
    ) -> None:
        super().__init__()
        self.rank, self.world_size, self.names = group.rank, group.size, group.names
        self._limit = group.timeout
        self.memory = memory = Memory(
            group, spins, _Alarm(self), beside=2 * CELL, directories=directories
        )
        self.waiting, memory.waited = memory.waiting, partial(_count, weakref.ref(self))
        self._operations = SharedMemoryOperations(memory, most=LARGE)
        self._map = memory.segment.map
        self._scalars = [
            [memory.beside_at + (2 * rank + turn) * CELL for rank in range(group.size)]
            for turn in (0, 1)
        ]

    @property
    def timeout(self) -> float:
        """Seconds that a wait for another task may take."""
        return self._limit

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self._limit = self.memory.timeout = seconds

    def _all_reduce(self, tensor: Tensor) -> Tensor:
        row, way = self._begin(tensor), arithmetic("SUM", tensor.dtype)
        self._operations.all_reduce(row_of(row), way)
        return _put(tensor, row)

    def _all_gather(self, tensor: Tensor) -> list[Tensor]:
        row = self._begin(tensor)
        found = [torch.empty_like(row) for _ in range(self.world_size)]
        self._operations.all_gather(row_of(row), [row_of(each) for each in found])
        return found

    def _broadcast(self, tensor: Tensor, source: int) -> Tensor:
        row = self._begin(tensor)
        self._operations.broadcast(row_of(row), source)
        self.memory.catch_up()  # the source too hears of other calls in this one
        return _put(tensor, row)

    def _reduce_scatter(self, rows: Tensor) -> Tensor:
        row, way = self._begin(rows), arithmetic("SUM", rows.dtype)
        found = torch.empty_like(row[0])
        self._operations.reduce_scatter([row_of(each) for each in row], row_of(found), way)
        return found

    def _all_to_all(self, rows: Tensor) -> Tensor:
        row = self._begin(rows)
        found = torch.empty_like(row)
        out, into = ([row_of(each) for each in of] for of in (row, found))
        self._operations.exchange(out, into, row[0].nbytes)
        return found

    def _barrier(self) -> None:
        self.synchronize()

    def _begin(self, tensor: Tensor) -> Tensor:
        """Begin the current call: its tensor as one block, in an order of its own perhaps."""
        self.memory.begin(self.current_call.tag)
        return tensor.detach().contiguous()

    def _reducer(self, numel: int, dtype: torch.dtype, device: torch.device) -> Reducer:
        if device.type != "cpu":
            raise UserError(f"shared memory cannot reduce tensors on {device}", "Use the CPU.")
        segment = self.segment(max(1, numel * dtype.itemsize) * (self.world_size + 1))
        return SharedReducer(self, segment, numel, dtype)

    def segment(self, size: int, has_view: bool = False) -> Segment:
        """``size`` bytes, all 0, that every replica has mapped; nothing else can find them.

        With ``has_view`` they are mapped once more, so that what is written there stays here.
        """
        with self.current_call.call(encode("shared memory", size, torch.uint8)):
            self.memory.begin(self.current_call.tag)
            return self.memory.shared(size, has_view)

    def slices(self, size: int, numel: int, dtype: torch.dtype | None) -> Slices:
        """Memory for a row of ``size`` bytes that is reduced slice by slice, as `reducer`."""
        return Slices(self, size, self.tag_of_sum(numel, dtype))

    def abort(self, error: SpartitoError) -> None:
        self.memory.leave(error)
        self.close()

    def close(self) -> None:
        self.memory.close()

    def synchronize(self) -> None:
        """Wait until all are here, at the same call."""
        self.memory.meet_at(self.current_call.tag)

    def heartbeat(self) -> None:
        """Show those who wait for us that we make progress: their limit begins anew."""
        self.memory.beat()

    def exchange_piggybacked(self, piggybacked: Piggybacked) -> Piggybacked:
        """Synchronize, and return the sum of each scalar over the replicas."""
        count, memory = len(piggybacked), self.memory
        if count > MAX_PIGGYBACKED:  # one more would lie on the next rank's
            raise ValueError(f"{count} piggybacked scalars, of {MAX_PIGGYBACKED} at most")
        if memory.met < memory.step:
            memory.catch_up()
        packing, starts = SCALARS[count], self._scalars[memory.step & 1]
        packing.pack_into(self._map, starts[self.rank], *piggybacked)
        memory.meet_at(self.current_call.tag)
        return add_piggybacked([packing.unpack_from(self._map, start) for start in starts])


def _count(group: weakref.ref[SharedMemoryCollective], seconds: float) -> None:
    """Count a wait as the group's."""
    if (found := group()) is not None:
        found.traffic.waited += seconds


def _put(tensor: Tensor, row: Tensor) -> Tensor:
    """``tensor``, with the values of ``row``, which may be itself."""
    if row.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(row)
    return tensor


class SharedReducer:
    """One segment with an input per rank and one output; each rank writes its slice of it."""

    def __init__(
        self, shared: SharedMemoryCollective, segment: Segment, numel: int, dtype: torch.dtype
    ) -> None:
        self._shared = shared
        world, size = shared.world_size, numel * dtype.itemsize
        inputs = [segment.tensor(rank * size, numel, dtype) for rank in range(world)]
        self.input = inputs[shared.rank]
        self.output = segment.tensor(world * size, numel, dtype)
        mine = slice(numel * shared.rank // world, numel * (shared.rank + 1) // world)
        self._first, self._second, *self._others = [part[mine] for part in inputs]
        self._sum, self._nbytes = self.output[mine], self.input.nbytes

    def reduce(self, piggybacked: Piggybacked, loss_divisor: float) -> Piggybacked:
        """As `Reducer.reduce`; bitwise the same on all ranks, summed in their order."""
        total = self._shared.exchange_piggybacked(piggybacked)
        self._shared.traffic.moved(self._nbytes)
        torch.add(self._first, self._second, out=self._sum)
        for part in self._others:
            self._sum.add_(part)
        if total[0] and total[0] != loss_divisor:
            self._sum.mul_(loss_divisor / total[0])
        self._shared.synchronize()
        return total
