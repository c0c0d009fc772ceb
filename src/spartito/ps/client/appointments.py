"""The chief's decision which of two servers is the primary of a span."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from spartito.errors import SpartitoError, TaskLostError, UserError
from spartito.notes import warn
from spartito.ps.protocol.messages import (
    Appoint,
    Copying,
    End,
    Hello,
    Message,
    Refused,
    Stand,
    Standing,
)
from spartito.ps.protocol.runtime import SYSTEM, Channel, Joinable, Runtime

LOOK_SECONDS = 0.2
"""Between two looks at the servers."""
SILENT_SECONDS = 2.0
"""A server that says nothing for so long is taken for lost; it cannot do harm if it is not."""
WAIT_SECONDS = 10.0
"""How long a backup that has all is waited for, before a snapshot is gone back to."""


@dataclass(frozen=True, slots=True)
class View:
    """Who is the primary of a span in ``term``, and who its backup, by number."""

    term: int
    primary: int
    backup: int | None = None
    fresh: bool = False
    restore: bool = False
    refused: frozenset[int] = frozenset()
    """Who has no snapshot to go on from."""


def decide(view: View, found: Sequence[Standing | None], loaded: bool, waited: bool) -> View | None:
    """Who shall be primary and backup now; None: all stays as it is.

    Args:
        view: What was decided last.
        found: What each server says that it is; None for one that says nothing.
        loaded: Whether the servers were given values: from then on somebody must have them.
        waited: Whether a lost backup was waited for long enough.
    """
    primary, backup, term = found[view.primary], view.backup, view.term + 1
    if primary is not None and primary.primary and primary.term <= view.term:
        if primary.term < view.term:
            return view  # it does not know yet
        if backup is not None:
            lost = primary.copying is Copying.LOST
            return View(term, view.primary) if lost else None
        there = [n for n, one in enumerate(found) if one is not None and n != view.primary]
        return View(term, view.primary, there[0]) if there else None
    other = None if backup is None else found[backup]
    if backup is not None and other is not None and other.whole and other.term == view.term:
        return View(term, backup)
    if backup is not None and other is None and not waited:
        return None  # it may have what nobody else has
    there = [n for n in (view.primary, 1 - view.primary) if found[n] is not None]
    able = [n for n in there if n not in view.refused]
    if not able or (not waited and primary is None):
        return None
    return View(term, able[0], None, not loaded, loaded, view.refused)


class Server:
    """One server, as the chief looks at it; ``dial`` connects to it until a time."""

    def __init__(self, name: str, address: str, hello: Hello, dial: Callable[[float], Channel]):
        self.name, self.address = name, address
        self._hello, self._dial = hello, dial
        self._wire: Channel | None = None

    def ask(self, message: Message, end: float, seconds: float = SILENT_SECONDS) -> Any:
        """Its reply; None if it has none within so many ``seconds``. It is dialled until ``end``.

        Raises `UserError` and `TaskLostError` where it refuses us.
        """
        try:
            if self._wire is None:
                self._wire = self._dial(end)
                self._wire.timeout = seconds
                self._wire.send(self._hello)
            self._wire.send(message)
            reply = self._wire.receive()
        except (OSError, TaskLostError):
            self.close()
            return None
        if isinstance(reply, Refused):
            self.close()
            raise (TaskLostError if reply.lost else UserError)(reply.why, reply.advice)
        return reply

    def close(self) -> None:
        """Close the connection; the next question opens another."""
        if self._wire is not None:
            self._wire.close()
            self._wire = None


class Appointments:
    """Who is the primary of each span; none, where every server is one.

    ``spans`` are the servers of each span, ``job`` is the job's name.
    """

    def __init__(
        self, spans: Sequence[Sequence[Server]], job: str, runtime: Runtime = SYSTEM
    ) -> None:
        self._spans, self._job, self._runtime = spans, job, runtime
        self._views = [View(0, 0) for _ in spans]
        self._over = runtime.event()
        self._threads: list[Joinable] = []
        self.fail: Callable[[SpartitoError], None] = lambda error: warn("%s", error)
        """Is told what cannot be helped."""
        self.loaded: Container[int] = ()
        """The spans whose servers were given their values."""
        self._note: Callable[[int, View], None] = lambda span, view: None

    def follow(self, note: Callable[[int, View], None]) -> None:
        """Tell ``note`` of all decisions, before servers hear of them."""
        self._note = note
        for span, view in enumerate(self._views):
            note(span, view)

    def begin(self, timeout: float, views: Sequence[View] = ()) -> None:
        """Wait for all servers, appoint the first of each span, and look after them from now on.

        Where there are primaries of this job already they stay; ``views`` are what another chief
        had decided before, which holds. Raises `TaskLostError`.
        """
        end = self._runtime.now() + timeout
        if views:
            self._views, self.loaded = list(views), range(len(views))
        for number, servers in enumerate(() if views else self._spans):
            found = [self._meet(server, end) for server in servers]
            there = [n for n, one in enumerate(found) if one.primary]
            if there:
                first = max(there, key=lambda n: found[n].term)
                self._views[number] = View(found[first].term, first)
                if found[first].copying is not Copying.ALONE:
                    self._views[number] = replace(self._views[number], backup=1 - first)
                continue
            term = max(one.term for one in found) + 1
            self._views[number] = View(term, 0, 1, fresh=True)
            self._appoint(number)
        self._threads = [
            self._runtime.start(partial(self._look_after, n), "spartito-appointments")
            for n in range(len(self._spans))
        ]

    def close(self, end: bool, why: str = "") -> None:
        """Appoint nobody any more; with ``end`` tell all servers that the job has ended."""
        self._over.set()
        for thread in self._threads:
            thread.join()
        for servers in self._spans:
            for server in servers:
                if end:
                    server.ask(End(why), self._runtime.now())
                server.close()

    def _meet(self, server: Server, end: float) -> Standing:
        while True:
            found = server.ask(Stand(), end)
            if isinstance(found, Standing):
                return found
            if self._runtime.now() >= end:
                raise TaskLostError(f"{server.name} did not come", "Look at its last lines.")
            self._runtime.sleep(LOOK_SECONDS)

    def _look_after(self, number: int) -> None:
        since = self._runtime.now()
        while not self._over.wait(LOOK_SECONDS):
            view, servers = self._views[number], self._spans[number]
            try:
                found = [server.ask(Stand(), self._runtime.now()) for server in servers]
                if found[view.primary] is not None and found[view.primary].primary:
                    since = self._runtime.now()
                waited = self._runtime.now() - since > WAIT_SECONDS
                decided = decide(view, found, number in self.loaded, waited)
                if decided is not None and not self._over.is_set():
                    self._say(number, decided)
                    self._note(number, decided)
                    self._views[number] = decided
                    self._appoint(number)
            except SpartitoError as error:
                if not self._over.is_set():
                    self.fail(error)
                return

    def _appoint(self, number: int) -> None:
        """Tell who is the primary now."""
        view, servers = self._views[number], self._spans[number]
        backup = "" if view.backup is None else servers[view.backup].address
        asked = Appoint(view.term, self._job, backup, view.fresh, view.restore)
        reply = servers[view.primary].ask(asked, self._runtime.now())
        if view.restore and isinstance(reply, Standing) and not reply.primary:
            refused = view.refused | {view.primary}
            self._views[number] = replace(view, refused=refused)
            if len(refused) == len(servers):
                raise TaskLostError(
                    f"{' and '.join(server.name for server in servers)} were lost together, and "
                    "have no snapshot of this job",
                    "Their part of the model is lost: start the job again; it can go on from its "
                    "last checkpoint. Snapshots must outlive the servers: SPARTITO_SNAPSHOT_DIR "
                    "says where they lie.",
                )

    def _say(self, number: int, now: View) -> None:
        before, servers = self._views[number], self._spans[number]
        if now.primary != before.primary:
            name, instead = servers[before.primary].name, servers[now.primary].name
            warn("%s is lost: %s goes on with the same values", name, instead)
        elif now.restore:
            warn("%s was lost, and so was its backup: it goes on from its snapshot",
                 servers[now.primary].name)  # fmt: skip
        elif now.backup is None and before.backup is not None:
            name, gone = servers[now.primary].name, servers[before.backup].name
            warn("%s is lost: %s goes on alone", gone, name)
