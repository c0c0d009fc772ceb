"""Connections between all ranks of a group: they swap parts of calls, and send each other messages.

A rank reads from those for which it waits, and from no other: what it does not read stays at the
sender, in whose process a thread sends on where the system does not take a message at once.
"""

from __future__ import annotations

import select
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from spartito.backend.calls import different, encode
from spartito.backend.errors import (
    DifferentCallsError,
    LostRankError,
    RefusedCallError,
    gone,
    heard,
    last_words,
    late,
)
from spartito.backend.links import (
    FAREWELL,
    MESSAGE,
    MOST,
    PART,
    BrokenFrameError,
    Frame,
    Link,
    Want,
)
from spartito.backend.memory import Bytes
from spartito.backend.rows import row_to_read, written
from spartito.backend.work import Done, Receive
from spartito.collectives.peers import connect_all
from spartito.collectives.store import Membership
from spartito.errors import TaskLostError
from spartito.waiting import Waiting
from spartito.wire.addresses import Endpoint
from spartito.wire.secret import Key

CHECK_SECONDS = 0.5  # of one sleep: then it is asked whether the limit is over
NOTHING: Bytes = np.empty(0, dtype=np.uint8)


@dataclass(slots=True, eq=False)
class _Wanted:
    """A receive that was asked for: from rank ``source``, None is any."""

    work: Receive
    tensor: Tensor
    source: int | None
    tag: int


class Wire:
    """The connections of a group.

    Args:
        group: The ranks, and the store where they meet.
        endpoint: Where this one listens for those before it.
        key: The secret that the ranks know; empty is none.
    """

    def __init__(self, group: Membership, endpoint: Endpoint, key: Key) -> None:
        self.rank, self.size, self.names = group.rank, group.size, group.names
        self.timeout, self.patience = group.timeout, 0.0
        self.address = endpoint.host
        self.peers = [peer for peer in range(self.size) if peer != self.rank]
        self._waiting = Waiting(group.rank, group.names)
        self._step = self._tag = 0
        self._begins = False
        self._broken: BaseException | None = None
        self._wanted: deque[_Wanted] = deque()
        self._writer: threading.Thread | None = None
        self._writing = threading.Lock()
        try:
            connections = connect_all(group, endpoint, key)
        except TaskLostError as error:
            what, _, do = str(error).partition("\n  ")
            raise LostRankError(what, do) from error
        self._links = {peer: Link(connections[peer]) for peer in self.peers}
        try:
            self.begin(encode("barrier", 0))
            self.meet()
        except BaseException:
            self.close()
            raise

    def begin(self, tag: int) -> None:
        """Begin a call, which ``tag`` says."""
        if self._broken is not None:
            raise self._broken
        self._tag, self._begins = tag, True

    def meet(self) -> None:
        """Wait until all are here, at the same call."""
        self.swap(dict.fromkeys(self.peers, NOTHING), dict.fromkeys(self.peers, NOTHING))

    def swap(self, out: Mapping[int, Bytes], into: Mapping[int, Bytes]) -> None:
        """Send a row to each rank of ``out``, and wait for those of the ranks of ``into``.

        A row may have no bytes. The first swap of a call counts it: all ranks make one, who has
        nothing to swap an empty one.
        """
        if self._broken is not None:
            raise self._broken
        self._step += self._begins
        self._begins = False
        links, step, tag = self._links, self._step, self._tag
        for peer, row in out.items():
            links[peer].push(PART, step, 0, tag, row)
        for peer, row in into.items():
            links[peer].expect(Want(step, tag, row))
        self._move(
            lambda: [peer for peer in into if links[peer].want is not None],
            list(out),
            self.patience,
        )

    def send(self, tensor: Tensor, target: int, tag: int) -> Done:
        """Leave the elements of ``tensor`` for rank ``target``."""
        if self._broken is not None:
            raise self._broken
        row, link = row_to_read(tensor), self._links[target]
        if link.unsent + len(row) > MOST:
            raise RefusedCallError(
                f"messages of more than {MOST >> 30} GiB that nobody received",
                "Receive them before more are sent.",
            )
        link.push(MESSAGE, 0, tag, encode("send", tensor.numel(), tensor.dtype), row, keep=True)
        if not link.is_sent:
            with self._writing:
                if self._writer is None:
                    # No daemon: what was sent leaves the process before it ends.
                    self._writer = threading.Thread(target=self._write, name="spartito-send")
                    self._writer.start()
        return Done([tensor])

    def receive(self, tensor: Tensor, source: int | None, tag: int) -> Receive:
        """Want a message of this size from rank ``source``, None is any."""
        row_to_read(tensor)
        work = Receive(tensor, self._progress)
        self._wanted.append(_Wanted(work, tensor, source, tag))
        self._take_all()
        return work

    def close(self) -> None:
        """Leave the group: the others see that we are gone. May be called again."""
        writer, works = self._writer, self._broken is None
        self._broken = self._broken or LostRankError(
            "a call of a group that was destroyed", "Make a new group."
        )
        if writer is not None and works:
            writer.join(self.timeout)
        for link in self._links.values():
            link.close()
        self._links = {}

    def _move(
        self, waited: Callable[[], list[int]], to: Sequence[int] = (), patience: float = 0.0
    ) -> None:
        """Move bytes until the ranks ``waited()`` are none, and those ``to`` ranks are sent.

        The limit is ``patience`` seconds longer.
        """
        links, limit = self._links, self.timeout + patience
        start, moved = time.monotonic(), -1
        while True:
            sending = [peer for peer in to if self._is_late(peer)]
            here = sorted({*sending, *(peer for peer in waited() if self._read(peer, waited))})
            if not here:
                return
            if lost := [peer for peer in here if links[peer].is_gone]:
                raise self._fail(gone([self.names[peer] for peer in lost], self.names[self.rank]))
            now, total = time.monotonic(), sum(links[peer].moved for peer in here)
            if total != moved:
                start, moved = now, total
            elif now - start > limit:
                raise self._fail(late([self.names[peer] for peer in here], self.timeout))
            else:
                self._waiting.look(now - start, here, self.timeout)
            waiter = select.poll()
            for peer in here:
                events = select.POLLIN | (select.POLLOUT if peer in sending else 0)
                waiter.register(links[peer].number, events)
            waiter.poll(1000 * max(0.001, min(CHECK_SECONDS, start + limit - now)))

    def _read(self, peer: int, waited: Callable[[], list[int]]) -> bool:
        """Read what is here from ``peer``; whether it is still waited for."""
        while peer in waited():
            self._check(peer)
            if not self._pull(peer):
                return True
        return False

    def _is_late(self, peer: int) -> bool:
        """Whether ``peer`` has not taken what we send; it may say why, so that we read."""
        while not self._links[peer].flush():
            self._check(peer)
            if not self._pull(peer):
                return True
        return False

    def _pull(self, peer: int) -> bool:
        try:
            return self._links[peer].pull()
        except BrokenFrameError as error:
            name = self.names[peer]
            broken = LostRankError(f"{name} sent what is no frame", f"End {name}.")
            raise self._fail(broken) from error

    def _check(self, peer: int) -> None:
        """Raise an error where the rank is at another call, or said why it makes no more."""
        link = self._links[peer]
        want, first = link.want, link.parts[0] if link.parts else None
        if want is not None and first is not None and not want.fits(first):
            raise self._fail(self._different(peer, first, want))
        if link.farewell is not None and link.farewell.is_whole:
            raise self._fail(heard(bytes(link.farewell.row)))

    def _different(self, peer: int, frame: Frame, want: Want) -> DifferentCallsError:
        names = {self.rank: self.names[self.rank], peer: self.names[peer]}
        calls = {self.rank: want.call, peer: frame.call}
        if frame.call == want.call:
            names[self.rank] += f" (step {want.step}, {len(want.row)} bytes)"
            names[peer] += f" (step {frame.step}, {len(frame.row)} bytes)"
        return different({names[who]: calls[who] for who in sorted(calls)})

    def leave(self, error: BaseException) -> None:
        """Every later call of the group raises ``error`` too, and so do all other ranks."""
        if self._broken is None:
            self._broken = error
            text = np.frombuffer(last_words(error), dtype=np.uint8)
            for link in self._links.values():
                link.push(FAREWELL, self._step, 0, self._tag, text, keep=True)

    def _fail(self, error: BaseException) -> BaseException:
        self.leave(error)
        return error

    def _write(self) -> None:
        """As a thread: send what the system did not take, until there is nothing."""
        start, moved = time.monotonic(), -1
        while True:
            with self._writing:
                links = [link for link in list(self._links.values()) if not link.is_sent]
                if not links:
                    self._writer = None
                    return
            waiter = select.poll()
            for link in links:
                waiter.register(link.number, select.POLLOUT)
            waiter.poll(1000 * CHECK_SECONDS)
            for link in links:
                link.flush()
            now, total = time.monotonic(), sum(link.moved for link in links)
            if total != moved:
                start, moved = now, total
            elif now - start > self.timeout:
                with self._writing:
                    self._writer = None
                return

    def _progress(self, work: Receive, wait: bool) -> bool:
        self._take_all()
        if not work.came and (wait or self._broken is None):
            wanted = next(one for one in self._wanted if one.work is work)
            if wait:
                if self._broken is not None:
                    raise self._broken
                self._move(lambda: self._could_send(wanted))
            else:
                for source in self._could_send(wanted):
                    self._read(source, lambda: self._could_send(wanted))
        return work.came

    def _could_send(self, wanted: _Wanted) -> list[int]:
        """The ranks whose message may be what is wanted; none when it came."""
        self._take_all()
        if wanted.work.came:
            return []
        if wanted.source is not None:
            return [wanted.source]
        return [peer for peer in self.peers if not self._links[peer].is_gone] or self.peers

    def _take_all(self) -> None:
        """Take all messages that are there for those who want them, in the order of wanting."""
        for wanted in list(self._wanted):
            sources = self.peers if wanted.source is None else [wanted.source]
            for source in sources:
                if self._take(wanted, source):
                    self._wanted.remove(wanted)
                    break

    def _take(self, wanted: _Wanted, source: int) -> bool:
        """Take the first message of ``source`` that has the tag, if it is here."""
        messages = self._links[source].messages if self._links else []
        frame = next((one for one in messages if one.tag == wanted.tag), None)
        if frame is None or not frame.is_whole:
            return False
        own = encode("send", wanted.tensor.numel(), wanted.tensor.dtype)
        if frame.call != own:
            own_name = f"{self.names[self.rank]}, which receives,"
            raise different({self.names[source]: frame.call, own_name: own})
        with written([wanted.tensor]) as (row,):
            row[:] = frame.row
        messages.remove(frame)
        wanted.work.take(source)
        return True
