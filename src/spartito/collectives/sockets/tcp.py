"""Collectives on CPUs of several machines, by a TCP connection between each two tasks.

A sum has two parts: every rank owns a slice, gets that slice of all others and adds it up in rank
order; then it sends the result to all. A small tensor goes to all as a whole, and everyone adds it
up in the same order. Either way all have the same bits. Bytes move in both
directions at once.
"""

from __future__ import annotations

import ctypes
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from spartito.collectives.alarm import TaskAlarm
from spartito.collectives.calls import encode
from spartito.collectives.collective import HALF, Collective, Piggybacked, Reducer, added
from spartito.collectives.membership.liveness import LivenessCheck
from spartito.collectives.membership.store import Membership
from spartito.collectives.rows import check_device
from spartito.collectives.sockets.connections import Connections, Wanted
from spartito.collectives.sockets.links import Views
from spartito.collectives.sockets.peers import connect_all
from spartito.errors import MismatchedCallsError, SpartitoError, UserError
from spartito.heartbeat import resume, waits
from spartito.waiting import Waiting
from spartito.wire.addresses import Endpoint
from spartito.wire.secret import NO_SECRET, Key

SMALL = 64 << 10  # bytes that a rank may send to have a tensor added up as a whole by all
ALIGNED = 64  # bytes: where a part of the scratch memory may begin


def slices(numel: int, world_size: int) -> list[slice]:
    """The elements that each rank adds up: in order, without gaps, and nearly equal in number."""
    bounds = [numel * rank // world_size for rank in range(world_size + 1)]
    return [slice(start, stop) for start, stop in pairwise(bounds)]


class _Alarm(TaskAlarm):
    """The errors of a group of tasks, of which those that live sign in at the store."""

    def __init__(self, group: SocketCollective) -> None:
        super().__init__(group)
        self._group = weakref.proxy(group)

    def gone(self, ranks: Sequence[int]) -> BaseException:
        what = "is gone: it closed the connection"
        return self._lost(ConnectionResetError(what), ranks, what)

    def late(self, ranks: Sequence[int], limit: float) -> BaseException:
        what = f"did not come within {limit:g} s"
        return self._lost(TimeoutError(what), ranks, what)

    def heard(self, words: bytes) -> BaseException:
        self._group._liveness.informed()
        return super().heard(words)

    def broken(self, rank: int) -> BaseException:
        what = "is gone: it sent what is no frame"
        return self._lost(ConnectionError(what), [rank], what)

    def look(self, ranks: Sequence[int]) -> None:
        group = self._group
        if group._liveness.looks and (
            gone := group._liveness.gone([group.names[rank] for rank in ranks])
        ):
            raise group._liveness.lost(TimeoutError(), gone, "is out of reach")

    def _lost(self, why: OSError, ranks: Sequence[int], what: str) -> BaseException:
        group = self._group
        found: BaseException = group._liveness.lost(why, [group.names[r] for r in ranks], what)
        return found


class SocketCollective(Collective):
    """A group of tasks with a TCP connection between each two.

    A wait ends at the time limit if nothing moves until then, and at once where a peer closes
    its connection.

    Args:
        group: The tasks.
        endpoint: Where this one listens for those before it.
        key: The job's secret.
    """

    def __init__(self, group: Membership, endpoint: Endpoint, key: Key = NO_SECRET) -> None:
        super().__init__()
        self.rank = rank = group.rank
        self.world_size = group.size
        self.names = group.names
        self.waiting = Waiting(rank, group.names)
        self._liveness = LivenessCheck(group)
        self._scratch = torch.empty(0, dtype=torch.uint8)
        found = connect_all(group.under("sockets"), endpoint, key)
        self._connections = Connections(rank, found, self.waiting, group.timeout, _Alarm(self))
        self._connections.moved = lambda: self.moved()
        self.peers = self._connections.peers
        try:
            self.barrier()
        except BaseException:
            self.close()
            raise

    @property
    def timeout(self) -> float:
        """Seconds that a wait for another task may take."""
        return self._connections.timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self._connections.timeout = seconds

    def _all_reduce(self, tensor: Tensor) -> Tensor:
        return self._in_place(tensor, self.reduce_all)

    def _all_gather(self, tensor: Tensor) -> list[Tensor]:
        flat = _flat(tensor)
        parts = [torch.empty_like(flat) for _ in range(self.world_size)]
        parts[self.rank].copy_(flat)
        self._swap(lambda _: [flat], lambda peer: [parts[peer]])
        return [part.view(tensor.shape) for part in parts]

    def _all_gather_into(self, output: Tensor, tensor: Tensor) -> None:
        own = [_memory(tensor)] if tensor.numel() else []
        self.exchange(
            dict.fromkeys(self.peers, own),
            {peer: [_memory(output[peer])] if own else [] for peer in self.peers},
        )
        if output[self.rank].data_ptr() != tensor.data_ptr():
            output[self.rank] = tensor

    def _reduce_scatter(self, rows: Tensor) -> Tensor:
        return added(self._all_to_all(rows))

    def _all_to_all(self, rows: Tensor) -> Tensor:
        out = rows.contiguous().view(self.world_size, -1)
        came = torch.empty_like(out)
        came[self.rank] = out[self.rank]
        self._swap(lambda peer: [out[peer]], lambda peer: [came[peer]])
        return came.view(rows.shape)

    def _broadcast(self, tensor: Tensor, source: int) -> Tensor:
        def send(flat: Tensor) -> None:
            mine = self.rank == source
            self._swap(
                lambda _: [flat] if mine else [], lambda peer: [flat] if peer == source else []
            )

        return self._in_place(tensor, send)

    def _barrier(self) -> None:
        self._swap(lambda _: [], lambda _: [])

    def _reducer(self, numel: int, dtype: torch.dtype, device: torch.device) -> Reducer:
        if device.type != "cpu":
            raise UserError(f"sockets cannot reduce tensors on {device}", "Use the CPU.")
        return SocketReducer(self, torch.zeros(numel, dtype=dtype))

    def reduce_all(self, *tensors: Tensor) -> None:
        """Sum several tensors at once, in place."""
        self.summing(*tensors)()

    def summing(self, *tensors: Tensor) -> Callable[[], None]:
        return Sum(self, [tensor.detach().view(-1) for tensor in tensors]).run

    def close(self) -> None:
        self._connections.close()
        self._liveness.close()

    def interrupt(self) -> None:
        self._liveness.close()
        self._connections.interrupt()

    def abort(self, error: SpartitoError) -> None:
        self._connections.leave(error)
        self._liveness.leave(error, self.close)

    def exchange(self, out: Mapping[int, Views], into: Mapping[int, Views]) -> None:
        """Send a row to each rank of ``out``, and wait for those of the ranks of ``into``.

        All tasks call this together; who has nothing to exchange gives two empty ones.

        Raises `MismatchedCallsError` if a peer is at another call, and `TaskLostError` that names
        a peer which closes its connection, or with which nothing moves within the limit while
        nothing else does.
        """
        began, before = time.perf_counter(), waits()
        try:
            self._connections.begin(self.current_call.tag)
            sent, received = self._connections.swap(out, into)
        except MismatchedCallsError as error:
            self.abort(error)
            raise
        resume(before)
        traffic = self.traffic
        traffic.sent += sent
        traffic.received += received
        traffic.waited += time.perf_counter() - began

    def _swap(
        self,
        out: Callable[[int], Sequence[Tensor]],
        into: Callable[[int], Sequence[Tensor]],
    ) -> None:
        """Swap flat tensors with each peer, which are functions of its rank."""
        self.exchange(
            {peer: views(out(peer)) for peer in self.peers},
            {peer: views(into(peer)) for peer in self.peers},
        )

    def send(self, tensor: Tensor, target: int, tag: int) -> None:
        """Leave ``tensor`` for rank ``target``, without waiting for it."""
        flat = _flat(tensor)
        row = views([flat])[0] if flat.numel() else memoryview(b"")
        self._connections.send(row, target, tag, encode("send", flat.numel(), flat.dtype))

    def receive(self, tensor: Tensor, source: int, tag: int) -> None:
        """Fill ``tensor``, one block of memory, with what rank ``source`` sends by this tag."""
        into = views([tensor.view(-1)])

        def take(row: memoryview, _: int) -> None:
            for view in into:
                view[:] = row

        wanted = Wanted(source, tag, encode("send", tensor.numel(), tensor.dtype), take)
        self._connections.want(wanted)
        self._connections.wait_for(wanted)

    def scratch(self, sizes: Sequence[int]) -> list[Tensor]:
        """Memory of so many bytes each, which the next call gets too."""
        starts = [0]
        for size in sizes:
            starts.append(starts[-1] + -(-size // ALIGNED) * ALIGNED)
        if starts[-1] > len(self._scratch):
            self._scratch = torch.empty(starts[-1], dtype=torch.uint8)
        return [self._scratch[start:][:size] for start, size in zip(starts, sizes, strict=False)]

    def _in_place(self, tensor: Tensor, call: Callable[[Tensor], object]) -> Tensor:
        flat = _flat(tensor)
        call(flat)
        if flat.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(flat.view(tensor.shape))
        return tensor


class Sum:
    """The sum of flat tensors over the group, in place, as often as it is run."""

    def __init__(self, group: SocketCollective, tensors: Sequence[Tensor]) -> None:
        self._group = group
        mine, peers, world_size = group.rank, group.peers, group.world_size
        cut = [tensor.nbytes * len(peers) > SMALL for tensor in tensors]

        def owned(rank: int, large: bool = False) -> list[Tensor]:
            """What ``rank`` adds up; ``large``: what nobody else does."""
            return [
                tensor[slices(tensor.numel(), world_size)[rank]] if is_cut else tensor
                for tensor, is_cut in zip(tensors, cut, strict=True)
                if is_cut or not large
            ]

        self._sums = owned(mine)
        memory = iter(group.scratch([own.nbytes for _ in peers for own in self._sums]))
        come = {peer: [next(memory).view(own.dtype) for own in self._sums] for peer in peers}
        come[mine] = self._sums
        self._parts = list(zip(*(come[rank] for rank in range(world_size)), strict=True))
        self._scatter = (
            {peer: views(owned(peer)) for peer in peers},
            {peer: views(come[peer]) for peer in peers},
        )
        results = views(owned(mine, large=True))
        gathered = {peer: views(owned(peer, large=True)) for peer in peers}
        self._gather = (
            dict.fromkeys(peers, results) if results else {},
            {peer: found for peer, found in gathered.items() if found},
        )
        self._is_whole = not any(cut)

    def run(self) -> None:
        """Replace what is in the tensors by the sums."""
        self._group.exchange(*self._scatter)
        for (first, *others, last), own in zip(self._parts, self._sums, strict=True):
            if first.dtype in HALF and others:  # rounded once, not with each part
                own.copy_(sum((part.float() for part in (*others, last)), first.float()))
                continue
            for part in others:  # one of the parts is our own, which is read before it is written
                first.add_(part)
            torch.add(first, last, out=own)
        if not self._is_whole:
            self._group.exchange(*self._gather)


class SocketReducer:
    """The sum of a flat tensor, with the piggybacked scalars in double precision at its side."""

    def __init__(self, group: SocketCollective, flat: Tensor) -> None:
        self._group = group
        self.input = self.output = flat
        self._beside = torch.empty(0, dtype=torch.float64)
        self._add = group.summing()

    def reduce(self, piggybacked: Piggybacked, loss_divisor: float) -> Piggybacked:
        """As `Reducer.reduce`; the piggybacked scalars go along in the same messages."""
        if len(piggybacked) != len(self._beside):
            self._beside = torch.empty(len(piggybacked), dtype=torch.float64)
            self._add = self._group.summing(self.input, self._beside)
        self._beside.copy_(torch.tensor(piggybacked, dtype=torch.float64))
        self._add()
        total = tuple(self._beside.tolist())
        if total[0] and total[0] != loss_divisor:
            self.output.mul_(loss_divisor / total[0])
        return total


def _flat(tensor: Tensor) -> Tensor:
    """The values in a row: where they lie if they are one block, else a copy."""
    check_device(tensor)
    return tensor.detach().contiguous().view(-1)


def _memory(tensor: Tensor) -> memoryview:
    """The bytes of a flat tensor, whose storage can still be resized: NumPy would forbid that."""
    check_device(tensor)
    memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    return memoryview(memory).cast("B")


def views(tensors: Sequence[Tensor]) -> Views:
    """The bytes of flat tensors where they lie."""
    return [tensor.view(torch.uint8).numpy().data for tensor in tensors if tensor.numel()]
