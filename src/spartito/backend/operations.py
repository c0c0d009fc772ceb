"""What a group needs of the ranks' connection: an interface, and that of a group of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from spartito.backend.work import Done, Receive
from spartito.collectives.arithmetic import Arithmetic
from spartito.collectives.memory.rank_memory import Bytes
from spartito.errors import RefusedCallError


class Operations(Protocol):
    """The operations of a group, on rows of bytes. Each is preceded by `begin`.

    Attributes:
        address: Where ranks on other machines reach this one; "" where all are on one.
    """

    address: str

    def begin(self, tag: int) -> None:
        """Begin the call that ``tag`` says: ranks in different ones get an error."""

    def barrier(self) -> None:
        """Wait until all ranks are here."""

    def all_reduce(self, row: Bytes, way: Arithmetic) -> None:
        """Replace ``row`` by the reduction of all ranks' rows, in rank order."""

    def reduce(self, row: Bytes, root: int, way: Arithmetic) -> None:
        """As `all_reduce`; only rank ``root`` gets the result."""

    def broadcast(self, row: Bytes, root: int) -> None:
        """Give all ranks the row of rank ``root``."""

    def all_gather(self, row: Bytes, into: Sequence[Bytes]) -> None:
        """Put the row of each rank into its entry of ``into``."""

    def reduce_scatter(self, rows: Sequence[Bytes], into: Bytes, way: Arithmetic) -> None:
        """Reduce the ``rows``, one for each rank: ``into`` becomes the result of our own."""

    def exchange(self, out: Sequence[Bytes], into: Sequence[Bytes], largest: int) -> None:
        """Send row ``out[r]`` to each rank ``r``, and put what it sends into ``into[r]``.

        ``largest`` is the size of the largest row of any two ranks, which all ranks know.
        """

    def send(self, tensor: Tensor, target: int, tag: int) -> Done:
        """Leave ``tensor`` for rank ``target``; does not wait for it."""

    def receive(self, tensor: Tensor, source: int | None, tag: int) -> Receive:
        """Want a message of this size from rank ``source``, None is any."""

    def limit_to(self, seconds: float) -> None:
        """Let each wait for another rank take no longer than ``seconds`` from now on."""

    def leave(self, error: BaseException) -> None:
        """Make no more calls: who waits for this rank raises ``error``."""

    def close(self) -> None:
        """Leave the group. May be called again."""


class Alone:
    """The operations of a group of one rank."""

    address = ""

    def begin(self, tag: int) -> None:
        """Do nothing."""

    def barrier(self) -> None:
        """Do nothing."""

    def all_reduce(self, row: Bytes, way: Arithmetic) -> None:
        """Leave ``row``, which is the result."""

    def reduce(self, row: Bytes, root: int, way: Arithmetic) -> None:
        """Leave ``row``, which is the result."""

    def broadcast(self, row: Bytes, root: int) -> None:
        """Leave ``row``, which is ours."""

    def all_gather(self, row: Bytes, into: Sequence[Bytes]) -> None:
        """Copy the row."""
        into[0][:] = row

    def reduce_scatter(self, rows: Sequence[Bytes], into: Bytes, way: Arithmetic) -> None:
        """Copy the row."""
        into[:] = rows[0]

    def exchange(self, out: Sequence[Bytes], into: Sequence[Bytes], largest: int) -> None:
        """Copy the row."""
        into[0][:] = out[0]

    def send(self, tensor: Tensor, target: int, tag: int) -> Done:
        """Refuse: there is nobody."""
        raise RefusedCallError("a message in a group of one rank", "There is nobody to send to.")

    def receive(self, tensor: Tensor, source: int | None, tag: int) -> Receive:
        """Refuse: there is nobody."""
        raise RefusedCallError("a message in a group of one rank", "There is nobody to wait for.")

    def limit_to(self, seconds: float) -> None:
        """Do nothing."""

    def leave(self, error: BaseException) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""
