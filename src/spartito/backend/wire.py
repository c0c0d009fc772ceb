"""The connections of the ranks of a group on several machines: parts of calls, and messages."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from torch import Tensor

from spartito.backend.alarm import RankAlarm
from spartito.backend.calls import encode
from spartito.backend.errors import LostRankError
from spartito.backend.work import Done, Receive
from spartito.collectives.membership.store import Membership
from spartito.collectives.memory.rank_memory import Bytes
from spartito.collectives.rows import row_to_read, written
from spartito.collectives.sockets.connections import Connections, Wanted
from spartito.collectives.sockets.links import MOST, Views
from spartito.collectives.sockets.peers import connect_all
from spartito.errors import RefusedCallError, TaskLostError
from spartito.waiting import Waiting
from spartito.wire.addresses import Endpoint
from spartito.wire.secret import Key

NOTHING: Bytes = np.empty(0, dtype=np.uint8)


class Wire:
    """The connections of a group.

    Args:
        group: The ranks, and the store where they meet.
        endpoint: Where this one listens for those before it.
        key: The secret that the ranks know; empty is none.
    """

    def __init__(self, group: Membership, endpoint: Endpoint, key: Key) -> None:
        self.rank, self.size, self.names = group.rank, group.size, group.names
        self.address = endpoint.host
        try:
            found = connect_all(group, endpoint, key)
        except TaskLostError as error:
            what, _, do = str(error).partition("\n  ")
            raise LostRankError(what, do) from error
        waiting = Waiting(group.rank, group.names)
        self._all = Connections(group.rank, found, waiting, group.timeout, RankAlarm(group))
        self.peers = self._all.peers
        self.begin, self.leave, self.close = self._all.begin, self._all.leave, self._all.close
        try:
            self.begin(encode("barrier", 0))
            self.meet()
        except BaseException:
            self.close()
            raise

    def limit_to(self, seconds: float, patience: float | None = None) -> None:
        """Let each wait take no longer than ``seconds``, and ``patience`` more."""
        self._all.timeout = seconds
        self._all.patience = self._all.patience if patience is None else patience

    def meet(self) -> None:
        """Wait until all are here, at the same call."""
        self.swap(dict.fromkeys(self.peers, NOTHING), dict.fromkeys(self.peers, NOTHING))

    def swap(self, out: Mapping[int, Bytes], into: Mapping[int, Bytes]) -> None:
        """As `Connections.swap`, of rows of bytes."""
        self._all.swap(_views(out), _views(into))

    def send(self, tensor: Tensor, target: int, tag: int) -> Done:
        """Leave the elements of ``tensor`` for rank ``target``."""
        row = row_to_read(tensor)
        if self._all.unsent(target) + len(row) > MOST:
            raise RefusedCallError(
                f"messages of more than {MOST >> 30} GiB that nobody received",
                "Receive them before more are sent.",
            )
        self._all.send(row.data, target, tag, encode("send", tensor.numel(), tensor.dtype))
        return Done([tensor])

    def receive(self, tensor: Tensor, source: int | None, tag: int) -> Receive:
        """Want a message of this size from rank ``source``, None is any."""
        row_to_read(tensor)

        def take(row: memoryview, sender: int) -> None:
            with written([tensor]) as (target,):
                target[:] = row
            work.take(sender)

        def progress(_: Receive, wait: bool) -> bool:
            if wait:
                self._all.wait_for(wanted)
                return True
            return self._all.look_for(wanted)

        work = Receive(tensor, progress)
        wanted = Wanted(source, tag, encode("send", tensor.numel(), tensor.dtype), take)
        self._all.want(wanted)
        return work


def _views(rows: Mapping[int, Bytes]) -> dict[int, Views]:
    return {peer: [row.data] if len(row) else [] for peer, row in rows.items()}
