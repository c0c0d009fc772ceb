"""The operations of ranks that each are on a machine of their own, by connections between all.

A large row is cut: each rank reduces a slice of it in rank order, and gives all the result. A small
one goes to all as a whole. Either way all ranks have the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from spartito.backend.wire import NOTHING, Wire
from spartito.collectives.arithmetic import Arithmetic
from spartito.collectives.memory.memory_operations import add_up, copy, slices
from spartito.collectives.memory.rank_memory import Bytes
from spartito.collectives.sockets.tcp import SMALL


class SeveralMachines:
    """Collective operations and messages, by TCP connections.

    Args:
        wire: The connections.
        ranks: The ranks that take part, this one included, as the wire numbers them; None is all.
            What follows numbers them by their index here.
    """

    def __init__(self, wire: Wire, ranks: Sequence[int] | None = None) -> None:
        self._wire = wire
        self._ranks = tuple(range(wire.size) if ranks is None else ranks)
        self._rank, self._size = self._ranks.index(wire.rank), len(self._ranks)
        self._peers = [peer for peer in range(self._size) if peer != self._rank]
        self._memory = np.empty(0, dtype=np.uint8)
        self.address = wire.address
        self.begin, self.leave, self.close = wire.begin, wire.leave, wire.close
        self.send, self.receive = wire.send, wire.receive

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        self.swap(dict.fromkeys(self._peers, NOTHING), dict.fromkeys(self._peers, NOTHING))

    def swap(self, out: Mapping[int, Bytes], into: Mapping[int, Bytes]) -> None:
        """Send a row to each rank of ``out``, and wait for those of the ranks of ``into``."""
        self._wire.swap(
            {self._ranks[peer]: row for peer, row in out.items()},
            {self._ranks[peer]: row for peer, row in into.items()},
        )

    def all_reduce(self, row: Bytes, way: Arithmetic) -> None:
        """Replace ``row`` by the reduction of all ranks' rows; in rank order, the same on all."""
        if len(row) * len(self._peers) > SMALL:
            self._reduce_by_slices(row, way, range(self._size))
            return
        into = self._scratch(len(row))
        self.swap(dict.fromkeys(self._peers, row), into)
        self._add(into, row, row, way)

    def reduce(self, row: Bytes, root: int, way: Arithmetic) -> None:
        """As `all_reduce`; only rank ``root`` gets the result."""
        if len(row) * len(self._peers) > SMALL:
            self._reduce_by_slices(row, way, [root])
        elif self._rank == root:
            into = self._scratch(len(row))
            self.swap({}, into)
            self._add(into, row, row, way)
        else:
            self.swap({root: row}, {})

    def broadcast(self, row: Bytes, root: int) -> None:
        """Give all ranks the row of rank ``root``: in slices, which they hand on to each other."""
        mine, peers = self._rank == root, self._peers
        if len(row) * len(peers) <= SMALL or self._size == 2:
            self.swap(dict.fromkeys(peers, row) if mine else {}, {} if mine else {root: row})
            return
        cut = [row[first:last] for first, last in slices(len(row), self._size, 1)]
        own = cut[self._rank]
        first = {peer: cut[peer] for peer in peers}
        self.swap(first if mine else {}, {} if mine else {root: own})
        to = [peer for peer in peers if peer != root]
        come = {} if mine else {peer: cut[peer] for peer in peers}
        self.swap(dict.fromkeys(to, own), come)

    def all_gather(self, row: Bytes, into: Sequence[Bytes]) -> None:
        """Put the row of each rank into its entry of ``into``."""
        if len(row):
            copy(into[self._rank], row)
        rows = {peer: into[peer] for peer in self._peers}
        self.swap(dict.fromkeys(self._peers, row), rows)

    def reduce_scatter(self, rows: Sequence[Bytes], into: Bytes, way: Arithmetic) -> None:
        """Reduce the ``rows``, one for each rank: ``into`` becomes the result of our own."""
        come = self._scratch(len(into))
        self.swap({peer: rows[peer] for peer in self._peers}, come)
        self._add(come, rows[self._rank], into, way)

    def exchange(self, out: Sequence[Bytes], into: Sequence[Bytes], largest: int) -> None:
        """Send row ``out[r]`` to each rank ``r``, and put what it sends into ``into[r]``.

        Rows of 0 bytes are not waited for.
        """
        if len(out[self._rank]):
            copy(into[self._rank], out[self._rank])
        self.swap(
            {peer: out[peer] for peer in self._peers if len(out[peer])},
            {peer: into[peer] for peer in self._peers if len(into[peer])},
        )

    def limit_to(self, seconds: float) -> None:
        """Let each wait for another rank take no longer than ``seconds`` from now on."""
        self._wire.limit_to(seconds)

    def _reduce_by_slices(self, row: Bytes, way: Arithmetic, to: Sequence[int]) -> None:
        """Each rank reduces a slice, and gives the ranks ``to`` the result."""
        rank, peers = self._rank, self._peers
        cut = [row[first:last] for first, last in slices(len(row), self._size, way.itemsize)]
        own = cut[rank]
        come = self._scratch(len(own))
        self.swap({peer: cut[peer] for peer in peers}, come)
        result = own if rank in to else np.empty_like(own)
        self._add(come, own, result, way)
        self.swap(
            {peer: result for peer in peers if peer in to},
            {peer: cut[peer] for peer in peers} if rank in to else {},
        )

    def _add(self, come: dict[int, Bytes], own: Bytes, into: Bytes, way: Arithmetic) -> None:
        """Reduce what came and our own in rank order."""
        add_up([come.get(rank, own) for rank in range(self._size)], into, way)

    def _scratch(self, size: int) -> dict[int, Bytes]:
        """Memory for a row of each other rank, which the next call gets too."""
        step = -(-size // 64) * 64
        if step * len(self._peers) > len(self._memory):
            self._memory = np.empty(step * len(self._peers), dtype=np.uint8)
        return {peer: self._memory[at * step :][:size] for at, peer in enumerate(self._peers)}
