"""Collectives on CPUs of several machines, by a TCP connection between each two tasks.

A sum has two parts: every rank owns a slice, gets that slice of all others and adds it up in rank
order; then it sends the result to all. A small tensor goes to all as a whole, and everyone adds it
up in the same order. Either way all have the same bits. Bytes move in both
directions at once.
"""

from __future__ import annotations

import ctypes
import select
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from spartito.collectives.collective import HALF, Collective, Piggybacked, Reducer, added, left
from spartito.collectives.liveness import LivenessCheck
from spartito.collectives.peers import close_all, connect_all
from spartito.collectives.store import Membership
from spartito.errors import SpartitoError, UserError
from spartito.heartbeat import resume, waits
from spartito.waiting import Waiting
from spartito.wire.addresses import Endpoint
from spartito.wire.flow import Flow, Views
from spartito.wire.secret import NO_SECRET, Key
from spartito.wire.streams import Connection, disconnect

SMALL = 64 << 10  # bytes that a rank may send to have a tensor added up as a whole by all
MAX_WAIT = 1e6  # seconds of one poll
HEAD = 8  # bytes in front of each message: the number of the call that it is part of
FIRST_LOOK, LOOK = 0.5, 0.25  # seconds of a wait until one looks who lives, and until the next
ALIGNED = 64  # bytes: where a part of the scratch memory may begin


def slices(numel: int, world_size: int) -> list[slice]:
    """The elements that each rank adds up: in order, without gaps, and nearly equal in number."""
    bounds = [numel * rank // world_size for rank in range(world_size + 1)]
    return [slice(start, stop) for start, stop in pairwise(bounds)]


@dataclass(frozen=True, slots=True)
class Swap:
    """What goes to a peer, and where that which it sends is to lie."""

    peer: int
    out: Views
    into: Views


class Swapped(Flow):
    """A swap on its way, behind the number of the call that it is part of."""

    __slots__ = ("_head", "peer")

    def __init__(self, swap: Swap, connection: Connection, head: bytes) -> None:
        self.peer = swap.peer
        self._head = bytearray(HEAD)
        out, into = [memoryview(head), *swap.out], [memoryview(self._head), *swap.into]
        super().__init__(connection, out, into)

    @property
    def head(self) -> bytearray | None:
        """The number that the peer sent, None before it is here."""
        return self._head if self.received >= HEAD else None

    def move(self) -> int:
        """Move what goes without waiting, and return the events to wait for: 0 when all is done.

        Raises `OSError` if the peer closed the connection.
        """
        try:
            self.send()
        finally:  # of a peer that has left too: what it sent before says why
            while self.into and self.receive():
                pass
        return (select.POLLOUT if self.out else 0) | (select.POLLIN if self.into else 0)


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
        self.timeout = group.timeout
        self.waiting = Waiting(rank, group.names)
        self._liveness = LivenessCheck(group)
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self.peers = [other for other in range(self.world_size) if other != rank]
        self._connections = connect_all(group.under("sockets"), endpoint, key)
        try:
            self.barrier()
        except BaseException:
            self.close()
            raise

    def _all_reduce(self, tensor: Tensor) -> Tensor:
        return self._in_place(tensor, self.reduce_all)

    def _all_gather(self, tensor: Tensor) -> list[Tensor]:
        flat = _flat(tensor)
        parts = [torch.empty_like(flat) for _ in range(self.world_size)]
        parts[self.rank].copy_(flat)
        self.exchange(self.swaps(lambda _: [flat], lambda peer: [parts[peer]]))
        return [part.view(tensor.shape) for part in parts]

    def _all_gather_into(self, output: Tensor, tensor: Tensor) -> None:
        own = _memory(tensor)
        self.exchange([Swap(peer, [own], [_memory(output[peer])]) for peer in self.peers])
        if output[self.rank].data_ptr() != tensor.data_ptr():
            output[self.rank] = tensor

    def _reduce_scatter(self, rows: Tensor) -> Tensor:
        return added(self._all_to_all(rows))

    def _all_to_all(self, rows: Tensor) -> Tensor:
        out = rows.contiguous().view(self.world_size, -1)
        came = torch.empty_like(out)
        came[self.rank] = out[self.rank]
        self.exchange(self.swaps(lambda peer: [out[peer]], lambda peer: [came[peer]]))
        return came.view(rows.shape)

    def _broadcast(self, tensor: Tensor, source: int) -> Tensor:
        def send(flat: Tensor) -> None:
            mine = self.rank == source
            self.exchange(
                self.swaps(
                    lambda _: [flat] if mine else [],
                    lambda peer: [flat] if peer == source else [],
                )
            )

        return self._in_place(tensor, send)

    def _barrier(self) -> None:
        self.exchange(self.swaps(lambda _: [], lambda _: []))

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
        close_all(self._connections)
        self._liveness.close()

    def interrupt(self) -> None:
        self._liveness.close()
        for connection in self._connections.values():
            disconnect(connection)

    def abort(self, error: SpartitoError) -> None:
        self._liveness.leave(error, self.close)

    def swaps(
        self,
        out: Callable[[int], Sequence[Tensor]],
        into: Callable[[int], Sequence[Tensor]],
    ) -> list[Swap]:
        """A swap with each peer, of flat tensors, which are functions of its rank."""
        return [Swap(peer, _views(out(peer)), _views(into(peer))) for peer in self.peers]

    def exchange(self, swaps: Sequence[Swap]) -> None:
        """Make all ``swaps`` at the same time; each is a message in both directions.

        Raises `MismatchedCallsError` if a peer is at another call, and `TaskLostError` that names
        a peer which closes its connection, or with which nothing moves within the limit while
        nothing else does.
        """
        if swaps and not self._connections:
            raise left()
        began, before = time.perf_counter(), waits()
        head = self.current_call.tag.to_bytes(HEAD, "little")
        flows = {
            self._connections[swap.peer].fileno(): Swapped(swap, self._connections[swap.peer], head)
            for swap in swaps
        }
        waiter = select.poll()
        for number in flows:
            waiter.register(number)
        ready = list(flows)
        while ready:
            moved = [flows[number] for number in ready]
            gone: dict[int, OSError] = {}
            for number in ready:
                flow = flows[number]
                try:
                    events = flow.move()
                except OSError as error:
                    gone[flow.peer] = error
                    continue
                if events:
                    waiter.register(number, events)
                else:
                    waiter.unregister(number)
                    del flows[number]
            for flow in moved:  # all peers have our call before we leave because of one
                if (received := flow.head) is not None and received != head:
                    self._compare(flow.peer, int.from_bytes(received, "little"))
            for peer, why in gone.items():  # without another call of its own
                what = f"is gone: {why.strerror}"
                raise self._liveness.lost(why, [self.names[peer]], what) from why
            ready = self._wait(waiter, flows) if flows else []
            if flows and not ready:
                late = [self.names[flow.peer] for flow in flows.values()]
                what = f"did not come within {self.timeout:g} s"
                raise self._liveness.lost(TimeoutError(what), late, what)
            self.moved()
        for swap in swaps:
            self.traffic.sent += sum(map(len, swap.out))
            self.traffic.received += sum(map(len, swap.into))
        resume(before)
        self.traffic.waited += time.perf_counter() - began

    def scratch(self, sizes: Sequence[int]) -> list[Tensor]:
        """Memory of so many bytes each, which the next call gets too."""
        starts = [0]
        for size in sizes:
            starts.append(starts[-1] + -(-size // ALIGNED) * ALIGNED)
        if starts[-1] > len(self._scratch):
            self._scratch = torch.empty(starts[-1], dtype=torch.uint8)
        return [self._scratch[start:][:size] for start, size in zip(starts, sizes, strict=False)]

    def _wait(self, waiter: select.poll, flows: Mapping[int, Swapped]) -> list[int]:
        """The flows that can move; none after the time limit."""
        limit = min(self.timeout, MAX_WAIT)
        waited = 0.0
        while waited < limit:
            end = self.waiting.due(limit)
            if self._liveness.looks:
                end = min(end, max(FIRST_LOOK, waited + LOOK))
            if ready := waiter.poll((end - waited) * 1000):
                return [number for number, _ in ready]
            waited = end
            late = [flow.peer for flow in flows.values()]
            self.waiting.look(waited, late, self.timeout)
            if self._liveness.looks and (
                gone := self._liveness.gone([self.names[peer] for peer in late])
            ):
                raise self._liveness.lost(TimeoutError(), gone, "is out of reach")
        return []

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
        self._scatter = group.swaps(owned, lambda peer: come[peer])
        results = group.swaps(
            lambda _: owned(mine, large=True), lambda peer: owned(peer, large=True)
        )
        self._gather = [swap for swap in results if swap.out or swap.into]

    def run(self) -> None:
        """Replace what is in the tensors by the sums."""
        self._group.exchange(self._scatter)
        for (first, *others, last), own in zip(self._parts, self._sums, strict=True):
            if first.dtype in HALF and others:  # rounded once, not with each part
                own.copy_(sum((part.float() for part in (*others, last)), first.float()))
                continue
            for part in others:  # one of the parts is our own, which is read before it is written
                first.add_(part)
            torch.add(first, last, out=own)
        self._group.exchange(self._gather)


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
    return tensor.detach().contiguous().view(-1)


def _memory(tensor: Tensor) -> memoryview:
    """The bytes of a flat tensor, whose storage can still be resized: NumPy would forbid that."""
    memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    return memoryview(memory).cast("B")


def _views(tensors: Sequence[Tensor]) -> Views:
    """The bytes of flat tensors where they lie."""
    return [tensor.view(torch.uint8).numpy().data for tensor in tensors if tensor.numel()]
