"""Connections between all tasks of a group: they swap parts of calls, and send each other messages.

A task reads from those for which it waits, and from no other: what it does not read stays at the
sender, in whose process a thread sends on where the system does not take a message at once.
"""

from __future__ import annotations

import select
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from spartito.collectives.alarm import LineAlarm
from spartito.collectives.sockets.links import (
    FAREWELL,
    MESSAGE,
    PART,
    BrokenFrameError,
    Link,
    Views,
    Want,
)
from spartito.waiting import Waiting
from spartito.wire.streams import Connection

CHECK_SECONDS = 0.25  # of one sleep: then it is asked whether the limit is over, and who lives


@dataclass(slots=True, eq=False)
class Wanted:
    """A message that was asked for: from rank ``source``, None is any."""

    source: int | None
    tag: int
    call: int
    take: Callable[[memoryview, int], object]
    """Gets the bytes, and who sent them."""
    came: bool = False


class Connections:
    """The connections of a group's task.

    Args:
        rank: This task's.
        given: A connection to every other rank, that does not block.
        waiting: Says for whom this task waits.
        timeout: Seconds that a wait may take in which nothing moves.
        alarm: What errors it ends with.
    """

    def __init__(
        self,
        rank: int,
        given: Mapping[int, Connection],
        waiting: Waiting,
        timeout: float,
        alarm: LineAlarm,
    ) -> None:
        self.rank, self.size = rank, len(given) + 1
        self.timeout, self.patience = timeout, 0.0
        self.peers = sorted(given)
        self.moved: Callable[[], None] = _nothing
        self._waiting, self._alarm = waiting, alarm
        self._step = self._tag = 0
        self._begins = False
        self._broken: BaseException | None = None
        self._wanted: deque[Wanted] = deque()
        self._writer: threading.Thread | None = None
        self._writing = threading.Lock()
        self._links = {peer: Link(given[peer]) for peer in self.peers}

    def begin(self, tag: int) -> None:
        """Begin a call, which ``tag`` says."""
        if self._broken is not None:
            raise self._broken
        self._tag, self._begins = tag, True

    def swap(self, out: Mapping[int, Views], into: Mapping[int, Views]) -> tuple[int, int]:
        """Send a row to each rank of ``out``, and wait for those of the ranks of ``into``.

        A row may have no bytes; its views have some. The first swap of a call counts it: all ranks
        make one, who has nothing to swap an empty one.

        Returns:
            The bytes that went out, and that came.
        """
        if self._broken is not None:
            raise self._broken
        self._step += self._begins
        self._begins = False
        links, step, tag = self._links, self._step, self._tag
        sent = received = 0
        for peer, views in out.items():
            size = sum(map(len, views))
            links[peer].push(PART, step, 0, tag, views, size)
            sent += size
        for peer, views in into.items():
            size = sum(map(len, views))
            links[peer].expect(Want(step, tag, views, size))
            received += size
        waited = list(into)
        is_waited = lambda peer: links[peer].want is not None  # noqa: E731
        self._move(lambda: waited, is_waited, list(out), self.patience)
        return sent, received

    def send(self, row: memoryview, target: int, tag: int, call: int) -> None:
        """Leave a message for rank ``target``: ``call`` says what it is, for who takes it."""
        if self._broken is not None:
            raise self._broken
        link = self._links[target]
        link.push(MESSAGE, 0, tag, call, [row] if len(row) else [], len(row), keep=True)
        if not link.is_sent:
            with self._writing:
                if self._writer is None:
                    # No daemon: what was sent leaves the process before it ends.
                    self._writer = threading.Thread(target=self._write, name="spartito-send")
                    self._writer.start()

    def unsent(self, target: int) -> int:
        """The bytes of messages to rank ``target`` that it has not taken."""
        return self._links[target].unsent

    def want(self, wanted: Wanted) -> None:
        """Take a message once it is here."""
        self._wanted.append(wanted)
        self._take_all()

    def wait_for(self, wanted: Wanted) -> None:
        """Return when a message that is wanted was taken."""
        self._take_all()
        if not wanted.came:
            if self._broken is not None:
                raise self._broken
            self._move(lambda: self._could_send(wanted), lambda _: self._is_missing(wanted))

    def look_for(self, wanted: Wanted) -> bool:
        """Whether a message that is wanted is here; it is taken then."""
        self._take_all()
        if not wanted.came and self._broken is None:
            for source in self._could_send(wanted):
                self._read(source, lambda _: self._is_missing(wanted))
        return wanted.came

    def leave(self, error: BaseException) -> None:
        """Every later call of the group raises ``error`` too, and so do all other ranks."""
        if self._broken is None:
            self._broken = error
            words = memoryview(self._alarm.said(error))
            for link in self._links.values():
                link.push(FAREWELL, self._step, 0, self._tag, [words], len(words), keep=True)

    def interrupt(self) -> None:
        """End a wait of another thread."""
        for link in list(self._links.values()):
            link.disconnect()

    def close(self) -> None:
        """Leave the group: the others see that we are gone. May be called again."""
        writer, works = self._writer, self._broken is None
        self._broken = self._broken or self._alarm.left()
        if writer is not None and works:
            writer.join(self.timeout)
        for link in self._links.values():
            link.close()
        self._links = {}

    def _move(
        self,
        waited: Callable[[], Sequence[int]],
        is_waited: Callable[[int], bool],
        to: Sequence[int] = (),
        patience: float = 0.0,
    ) -> None:
        """Move bytes until none ``is_waited`` of the ranks ``waited()``, and those to ``to`` went.

        The limit is ``patience`` seconds longer.
        """
        links, limit = self._links, self.timeout + patience
        start, before = time.monotonic(), -1
        while True:
            sending = [peer for peer in to if not links[peer].is_sent and self._is_late(peer)]
            here = [peer for peer in waited() if self._read(peer, is_waited)]
            if sending:
                here = sorted({*sending, *here})
            if not here:
                return
            total = 0
            for peer in here:
                link = links[peer]
                total += link.moved
                if link.is_gone:
                    lost = [peer for peer in here if links[peer].is_gone]
                    raise self._fail(self._alarm.gone(lost))
            now = time.monotonic()
            if total != before:
                start, before = now, total
                self.moved()
            elif now - start > limit:
                raise self._fail(self._alarm.late(here, self.timeout))
            else:
                self._waiting.look(now - start, here, self.timeout)
                self._alarm.look(here)
            waiter = select.poll()
            for peer in here:
                events = select.POLLIN | (select.POLLOUT if peer in sending else 0)
                waiter.register(links[peer].number, events)
            waiter.poll(1000 * max(0.001, min(CHECK_SECONDS, start + limit - now)))

    def _read(self, peer: int, is_waited: Callable[[int], bool]) -> bool:
        """Read what is here from ``peer``; whether it is still waited for."""
        link = self._links[peer]
        while is_waited(peer):
            if link.parts or link.farewell is not None:
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
        """Read what is here of one frame at most; whether there was anything."""
        try:
            return self._links[peer].pull()
        except BrokenFrameError as error:
            raise self._fail(self._alarm.broken(peer)) from error

    def _check(self, peer: int) -> None:
        """Raise an error where the rank is at another call, or said why it makes no more."""
        link = self._links[peer]
        want, first = link.want, link.parts[0] if link.parts else None
        if want is not None and first is not None and not want.fits(first):
            notes = {}
            if first.call == want.call:
                notes[self.rank] = f" (step {want.step}, {want.size} bytes)"
                notes[peer] = f" (step {first.step}, {first.size} bytes)"
            calls = {self.rank: want.call, peer: first.call}
            raise self._fail(self._alarm.different(dict(sorted(calls.items())), notes))
        if (farewell := link.farewell) is not None and farewell.is_whole:
            raise self._fail(self._alarm.heard(bytes(farewell.row or b"")))

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

    def _is_missing(self, wanted: Wanted) -> bool:
        self._take_all()
        return not wanted.came

    def _could_send(self, wanted: Wanted) -> Sequence[int]:
        """The ranks whose message may be what is wanted; none when it came."""
        if not self._is_missing(wanted):
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

    def _take(self, wanted: Wanted, source: int) -> bool:
        """Take the first message of ``source`` that has the tag, if it is here."""
        messages = self._links[source].messages if self._links else []
        frame = next((one for one in messages if one.tag == wanted.tag), None)
        if frame is None or not frame.is_whole:
            return False
        if frame.call != wanted.call:
            notes = {self.rank: ", which receives,"}
            raise self._alarm.different({source: frame.call, self.rank: wanted.call}, notes)
        assert frame.row is not None
        wanted.take(frame.row, source)
        wanted.came = True
        messages.remove(frame)
        return True


def _nothing() -> None:
    """Nobody wants to know."""
