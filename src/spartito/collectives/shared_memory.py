"""Replicas of one machine share a mapped file: each reduces its slice, and all read the result.

The mapping holds, per rank, a line with the number of times that it synchronized and the tags
of the last two calls, lines of piggybacked scalars, and two slots of scratch (one is read while
the other is written, so one synchronization per call is enough):

    | came 0 | scalars 0 | came 1 | scalars 1 | slot A: rank 0, rank 1 | slot B: rank 0, rank 1 |

Plain stores are seen in order on x86-64, so flags need no fences there; `supported` says so.
A rank's life is a file lock, which the kernel drops when its process ends, however it ends.
"""

from __future__ import annotations

import os
import platform
import select
import struct
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

import msgspec
import torch
from torch import Tensor

from spartito.collectives.calls import encode, waiting_in
from spartito.collectives.collective import (
    MAX_PIGGYBACKED,
    Collective,
    Piggybacked,
    Reducer,
    add_piggybacked,
)
from spartito.collectives.lives import Lives
from spartito.collectives.segment import Segment
from spartito.collectives.slices import Slices
from spartito.collectives.store import Membership
from spartito.device import affinity, own_cgroup
from spartito.errors import TaskLostError, UserError
from spartito.heartbeat import dump_stacks, last_words, resume, waits
from spartito.waiting import Waiting

LINE = 64  # bytes of a cache line: no two ranks write into the same one
CELL = LINE + -(-MAX_PIGGYBACKED * 8 // LINE) * LINE  # of each rank: its flags, its scalars
SCALARS = [struct.Struct(f"={count}d") for count in range(MAX_PIGGYBACKED + 1)]
SLOT = 1 << 20  # bytes of scratch per rank
SPINS = 1000  # about 60 us of looking before the core is offered to others
CHECK_SECONDS = 0.05  # how often a waiter asks whether the others are alive


def supported() -> bool:
    """Whether this machine's memory keeps the order of plain stores that the flags rely on."""
    return platform.machine().lower() in ("x86_64", "amd64") and os.name == "posix"


def host_key() -> str:
    """The same text for processes that can share memory: one kernel, one /dev/shm."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{boot.read_text().strip() if boot.exists() else platform.node()}/{_shm_device()}"


def _shm_device() -> int:
    return os.stat("/dev/shm").st_dev if os.path.isdir("/dev/shm") else 0


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


class SharedMemoryCollective(Collective):
    """A group of tasks on one machine.

    Args:
        group: The tasks; their store is used while they meet.
        spins: Whether a wait looks at the memory for a while before it gives up its core.
        directories: Where the memory may be; the first with enough space is taken.
    """

    def __init__(
        self,
        group: Membership,
        spins: bool = False,
        directories: Sequence[Path] = (Path("/dev/shm"), Path(tempfile.gettempdir())),
    ) -> None:
        super().__init__()
        self.rank = rank = group.rank
        self.world_size = group.size
        self.timeout = group.timeout
        self.waiting = Waiting(rank, group.names)
        self.names = group.names
        self._directories = [path for path in directories if path.is_dir()]
        self._spins = SPINS if spins else 0
        self._sequence = 0
        self._parity = 0
        head = CELL * self.world_size
        size = head + 2 * SLOT * self.world_size

        self._segment = segment = self._segment_for_all(size, self._teller(group))
        self._came = memoryview(segment.map).cast("q")
        self._slots = [
            [segment.tensor(head + SLOT * (part * self.world_size + r), SLOT, torch.uint8)
             for r in range(self.world_size)]
            for part in (0, 1)
        ]  # fmt: skip
        self._own = self._cell(rank)
        self._others = [(r, self._cell(r)) for r in range(self.world_size) if r != rank]
        self._scalars = [self._cell(r) * 8 + LINE for r in range(self.world_size)]
        try:
            self._lives = Lives(rank, lambda r: segment.path.with_name(f"{segment.path.name}.{r}"))
            try:
                if missing := group.under("life").missing():
                    said = f"{' and '.join(missing)} did not come within {self.timeout:g} s"
                    raise TaskLostError(said)
                self._lives.open(self.world_size)
                self.barrier()
            except BaseException:
                self.close()
                raise
            finally:
                self._lives.unlink()
        finally:
            self._unlink(segment)

    def _all_reduce(self, tensor: Tensor) -> Tensor:
        def add(parts: list[Tensor], into: Tensor) -> None:
            into.copy_(parts[0])
            for part in parts[1:]:
                into.add_(part)

        return self._exchange(tensor, add)

    def _all_gather(self, tensor: Tensor) -> list[Tensor]:
        results = [torch.empty_like(tensor, memory_format=torch.contiguous_format).view(-1)
                   for _ in range(self.world_size)]  # fmt: skip
        done = 0

        def keep(parts: list[Tensor], into: Tensor) -> None:
            nonlocal done
            for result, part in zip(results, parts, strict=True):
                result[done : done + part.numel()] = part
            done += into.numel()

        self._exchange(tensor, keep)
        return [result.view(tensor.shape) for result in results]

    def _broadcast(self, tensor: Tensor, source: int) -> Tensor:
        return self._exchange(tensor, lambda parts, into: into.copy_(parts[source]))

    def _barrier(self) -> None:
        self.synchronize()

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
            segment = self._segment_for_all(
                size, lambda text: self.all_gather_bytes(text.encode())[0].decode()
            )
            try:
                if has_view:
                    segment.open_view()
                self.barrier()
            finally:
                self._unlink(segment)
        return segment

    def slices(self, size: int, numel: int, dtype: torch.dtype | None) -> Slices:
        """Memory for a row of ``size`` bytes that is reduced slice by slice, as `reducer`."""
        return Slices(self, size, self.tag_of_sum(numel, dtype))

    def close(self) -> None:
        self._lives.close()

    def synchronize(self) -> None:
        """Wait until all are here, at the same call."""
        self._sequence = sequence = self._sequence + 1
        came, own, tag = self._came, self._own, self.current_call.tag
        call = 2 + (sequence & 1)  # of two in turn: the next may be written while this one is read
        came[own + call] = tag
        came[own] = sequence
        for rank, cell in self._others:
            if came[cell] < sequence:
                self._wait(rank, cell, sequence)
            if came[cell + call] != tag:
                self._compare(rank, came[cell + call])

    def heartbeat(self) -> None:
        """Show those who wait for us that we make progress: their limit begins anew."""
        self._came[self._own + 1] += 1

    def exchange_piggybacked(self, piggybacked: Piggybacked) -> Piggybacked:
        """Synchronize, and return the sum of each scalar over the replicas."""
        count = len(piggybacked)
        if count > MAX_PIGGYBACKED:  # one more would lie on the next rank's flag
            raise ValueError(f"{count} piggybacked scalars, of {MAX_PIGGYBACKED} at most")
        memory, packing = self._segment.map, SCALARS[count]
        packing.pack_into(memory, self._scalars[self.rank], *piggybacked)
        self.synchronize()
        parts = [packing.unpack_from(memory, start) for start in self._scalars]
        return add_piggybacked(parts)

    def _cell(self, rank: int) -> int:
        return rank * CELL // 8

    def _wait(self, rank: int, cell: int, sequence: int) -> None:
        began, before = time.perf_counter(), waits()
        self._look_for(rank, cell, sequence)
        resume(before)
        self.traffic.waited += time.perf_counter() - began

    def _look_for(self, rank: int, cell: int, sequence: int) -> None:
        came = self._came
        for _ in range(self._spins):
            if came[cell] >= sequence:
                return
        start = checked = moved = time.monotonic()
        beat = came[cell + 1]
        while came[cell] < sequence:
            now = time.monotonic()
            if now - start < 0.0005:
                # Gives up the interpreter's lock, so that threads that read data go on.
                select.select([], [], [], 0)
                os.sched_yield()
            else:
                time.sleep(0.00005 if now - start < 1 else 0.001)
            if now - checked > CHECK_SECONDS:
                checked = now
                if came[cell + 1] != beat:
                    beat, moved = came[cell + 1], now
                late = [other for other, its in self._others if came[its] < sequence]
                self.waiting.look(now - start, late, self.timeout)
                self._check(rank, cell, sequence, now - moved)

    def _check(self, rank: int, cell: int, sequence: int, waited: float) -> None:
        alive = self._lives.alive(rank)
        if self._came[cell] >= sequence:  # it came, and then left: all is well
            return
        if not alive:
            raise TaskLostError(
                f"{self.names[rank]} is gone: its process ended while "
                f"{self.names[self.rank]} waited for it{last_words(self.names[rank])}",
                f"Look at the last lines of {self.names[rank]}."
                + dump_stacks(f"{self.names[rank]} is gone"),
            )
        if waited > self.timeout:
            raise TaskLostError(
                f"{self.names[rank]} did not come within {self.timeout:g} s; its process lives"
                + last_words(self.names[rank]),
                f"{waiting_in(self.current_call.tag)}It may be stopped, busy elsewhere, or at "
                "another call than the others. SPARTITO_TIMEOUT sets the limit in seconds."
                + dump_stacks(f"{self.names[rank]} did not come"),
            )

    def _segment_for_all(self, size: int, tell: Callable[[str], str]) -> Segment:
        """A segment that rank 0 makes and the others map; all raise if there is no space for it.

        ``tell`` gives what rank 0 says to all.
        """
        if self.rank != 0:
            path, _, refusal = tell("").partition("\n")
            if refusal:
                raise UserError(f"{self.names[0]}: {refusal}")
            return Segment.attach(Path(path), size)
        try:
            segment = Segment.create(size, self._directories)
        except UserError as error:
            tell(f"\n{error}")
            raise
        try:
            tell(str(segment.path))
        except BaseException:
            self._unlink(segment)
            raise
        return segment

    def _unlink(self, segment: Segment) -> None:
        """Take the name away: who has mapped the file keeps it, and nothing is left behind."""
        if self.rank == 0:
            segment.path.unlink(missing_ok=True)

    def _teller(self, group: Membership) -> Callable[[str], str]:
        def tell(text: str) -> str:
            if self.rank == 0:
                group.store.set("segment", text.encode())
                return text
            return group.ask(lambda: group.store.get("segment").decode())

        return tell

    def _exchange(self, tensor: Tensor, use: Callable[[list[Tensor], Tensor], object]) -> Tensor:
        """Show ``tensor`` to all, slot by slot; ``use`` gets all parts and where ours came from."""
        flat = tensor.detach().contiguous().view(-1)
        step = SLOT // flat.element_size()
        for start in range(0, max(1, flat.numel()), step):
            chunk = flat[start : start + step]
            self._parity = 1 - self._parity
            size = chunk.numel() * chunk.element_size()
            parts = [slot[:size].view(flat.dtype) for slot in self._slots[self._parity]]
            parts[self.rank].copy_(chunk)
            self.synchronize()
            use(parts, chunk)
        if flat.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(flat.view(tensor.shape))
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
