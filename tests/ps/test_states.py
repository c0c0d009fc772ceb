"""What groups that train apart go on from, over real connections that break."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from spartito.ps.client.work_source import WorkerLink
from spartito.ps.protocol.work import (
    MAX_PUBLISHED,
    NOWHERE,
    PART,
    PURPOSE,
    At,
    Fetch,
    OwnState,
    Pause,
    ToWorker,
)
from spartito.ps.scheduler.ledger import Book
from spartito.wire.dialing import reach
from spartito.wire.frames import Wire
from spartito.wire.secret import NO_SECRET
from tests.ps import coordination as co
from tests.ps.simulation.disks import MemoryJournal


class Kept(OwnState):
    """Takes what comes."""

    def __init__(self) -> None:
        self.loaded: list[bytes] = []

    def show(self) -> tuple[At, bytes]:
        return NOWHERE, b""

    def load(self, state: bytes) -> None:
        self.loaded.append(state)


class Losing(Wire):
    """A connection to a chief that ends once it has replied to a `Fetch` from ``begin`` on."""

    begin = -1

    def send(self, message: object, *payload: object) -> None:
        super().send(message, *payload)  # type: ignore[arg-type]
        if isinstance(message, Fetch) and message.begin == Losing.begin:
            Losing.begin = -1
            assert self.ready(co.LIMIT)
            self.close()


STATE = bytes(range(256)) * (9 * PART // 4 // 256)  # of three parts


@pytest.mark.parametrize(("state", "begin"), [(STATE, 2 * PART), (STATE, PART), (b"short", 0)])
def test_who_is_the_chief_after_another_has_its_states(state: bytes, begin: int) -> None:
    """The reply of the one before is lost with it, and the next one is asked the same."""
    kept, own, ports = MemoryJournal([]), Kept(), list[int]()

    def dial(seconds: float | None) -> Wire:
        sock = reach(co.HOST, ports[-1], "the chief", co.LIMIT, key=NO_SECRET, purpose=PURPOSE)
        return Losing(sock, ToWorker, limit=MAX_PUBLISHED, timeout=co.LIMIT)

    with ExitStack() as stack:
        first = Book("job", kept)
        coordinator, port = stack.enter_context(co.serving(2, book=first))
        ports.append(port)
        first.begin()
        coordinator.meetings.states.keep({1: state})
        link = WorkerLink(dial, "the chief", 1, patience=co.LIMIT)
        link.keep(own)
        second = Book("job", MemoryJournal(list(kept.read())))
        after, port = stack.enter_context(co.serving(2, book=second))
        ports.append(port)
        Losing.begin = begin
        assert link.take(0, 0, None, wait=False) == Pause()
        assert Losing.begin == -1  # it was lost
        assert own.loaded == [state]
        assert after.meetings.states.keeps(1)  # as far as it knows the reply may be lost
        assert link.take(0, 0, None, wait=False) == Pause()
        assert own.loaded == [state]
        assert not after.meetings.states.keeps(1)
        link.close()


def test_another_process_gets_it_too() -> None:
    """The one before was lost before it asked for work with it."""
    with co.serving(2) as (coordinator, port):
        coordinator.meetings.states.keep({1: STATE})
        found = []
        for _ in range(2):
            link, own = co.link(port, 1), Kept()
            link.keep(own)
            link.take(0, 0, None, wait=False)
            found += own.loaded
            link.close()
        assert found == [STATE, STATE]
