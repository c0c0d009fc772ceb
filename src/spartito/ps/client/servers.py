"""All parameter servers of a job as one, for a task that computes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from math import isfinite

import torch
from msgspec.structs import replace
from torch import Tensor

from spartito.collectives.collective import Traffic
from spartito.heartbeat import resume, waits
from spartito.ps.client.link import Link, Restarted
from spartito.ps.client.pulled_values import PulledValues
from spartito.ps.client.vector import Vector
from spartito.ps.protocol.layout import unused
from spartito.ps.protocol.messages import Message, Outcome, Pull, Push, Release, Values

WORST_FIRST = (Outcome.EXPIRED, Outcome.STALE)


class Servers:
    """All servers of a job as one: what they hold together is the whole vector.

    One push at a time. Its replies are awaited when the values are needed (`result`); until then
    the task does what needs no values: metrics, callbacks, the next batch.

    ``waits`` holds where a pull may have to wait, so that no push gets too stale. Of several
    servers the first then decides for all: it is asked first for values and gets a push last, so
    that no push gets staler on the others than on it. ``apart`` says that the model changes between
    two looks at the servers.
    """

    def __init__(
        self, links: Sequence[Link], vector: Vector, waits: bool, apart: bool = False
    ) -> None:
        self.links, self.vector = list(links), vector
        self.progress = Values(0, 0, 0, 0)
        """The counts of the first server, as of its last reply."""
        self.waited = 0.0
        """Seconds that this task waited for the servers."""
        self.pulled: PulledValues | None = None
        """Looks after the values in the model, which nothing but the servers may change."""
        self._waits, self._ordered = waits, waits and len(links) > 1
        self._apart = apart
        self._sent: list[Push] = []
        self._norms = [0.0] * len(self.links)  # of what lies in the links' memory
        self._early: list[Values] = []  # what all but the first replied to an ordered push
        self._versions = [0] * len(self.links)
        self._awaiting = False  # replies to the last push
        self._forgotten = False  # by a server that was restarted when it was sent
        self._admitted = False  # the values in the model may be computed with

    @property
    def traffic(self) -> Traffic:
        """What was sent to the servers and received, through shared memory too."""
        sent = sum(link.sent for link in self.links)
        received = sum(link.received for link in self.links)
        return Traffic(sent, received, self.waited)

    @property
    def push_bytes(self) -> int:
        """What all gradients and buffers take, as they are sent."""
        return sum(link.push_bytes for link in self.links)

    def fill(self, starts: Sequence[Tensor] | None = None) -> tuple[list[list[int]], bool]:
        """The model's gradients into the links' memory, and how its buffers changed.

        With ``starts``, values by entry, gradients are how far parameters moved from there.
        Returns per server the entries without a gradient or a change, and whether all
        numbers are finite.
        """
        absent, self._norms = [], []
        learns = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)  # torch.no_grad() is many calls of Python
        try:
            for link in self.links:
                out = link.outgoing
                missing = out.store_gradients() if starts is None else []
                if starts is not None:
                    out.store_moves(starts)
                missing += out.store_changes(link.incoming)
                self._norms.append(out.norm(unused(link.runs, missing)))
                absent.append(missing)
        finally:
            torch._C._set_grad_enabled(learns)
        return absent, all(map(isfinite, self._norms))

    def push(self, push: Push, absent: Sequence[Sequence[int]]) -> None:
        """Send what `fill` stored, and ask for new values."""
        self._admitted = False  # until the replies are there
        self._sent = [
            replace(push, pulled=version, absent=list(missing), norm=0.0 if push.dropped else norm)
            for version, missing, norm in zip(self._versions, absent, self._norms, strict=True)
        ]
        try:
            if self._ordered:
                others = [replace(push, pull=False) for push in self._sent[1:]]
                self._early = self._ask(self.links[1:], others)
                self.links[0].send(self._sent[0])
            else:
                self._send(self.links, self._sent)
            self._awaiting = True
        except Restarted:
            self._forgotten = True

    def replies(self) -> list[Values]:
        """The servers' replies to the last `push`; the new values are in the model then.

        Raises `Restarted` when a server has forgotten what it knew.
        """
        awaiting, forgotten = self._awaiting, self._forgotten
        self._awaiting = self._forgotten = False
        if forgotten:
            raise Restarted
        if not awaiting:
            return []
        began, before = time.perf_counter(), waits()
        try:
            if self._ordered:
                first, *rest = self.links[0].receive(self._sent[0]), *self._look(self.links[1:])
                early = zip(rest, self._early, strict=True)
                found = [first, *(replace(now, outcome=was.outcome) for now, was in early)]
            else:
                found = self._receive(self.links, self._sent)
        finally:
            self.waited += time.perf_counter() - began
        resume(before)
        self._take(found)
        self._admitted = True
        return found

    def came(self, seconds: float) -> bool:
        """Whether within so many seconds there is a reply to the last push, or none to await."""
        return not self._awaiting or self.links[0].came(seconds)

    def result(self) -> Outcome | None:
        """What became of the last push, None if there was none since the last call.

        A push counts as expired where a server was restarted and has forgotten the lease.
        """
        try:
            found = [reply.outcome for reply in self.replies()]
        except Restarted:
            return Outcome.EXPIRED
        if len(found) < 2:
            return found[0] if found else None
        return next((outcome for outcome in WORST_FIRST if outcome in found), found[0])

    def admit(self) -> None:
        """Have values to compute with; waits where a push might get too stale."""
        if self._admitted:
            return
        began, before = time.perf_counter(), waits()
        try:
            while not self._admitted:
                with suppress(Restarted):  # it knows nothing of this task yet: ask again
                    self.pull(admit=True)
        finally:
            self.waited += time.perf_counter() - began
            resume(before)

    def look(self) -> None:
        """Have the newest values, to evaluate or to save."""
        self.release()
        while True:
            with suppress(Restarted):
                return self.pull(admit=False)

    def look_together(self) -> None:
        """As `look`, with others who have a model between them."""
        self.look()

    def pull(self, admit: bool) -> None:
        """The newest values into the model; ``admit`` to compute with, so it may have to wait."""
        first = self.links[0].ask(Pull(admit))
        self._take([first, *self._look(self.links[1:])])
        self._admitted = admit

    def release(self) -> None:
        """There is nothing to compute for now: nobody needs to wait for this task."""
        if self._admitted and self._waits:
            with suppress(Restarted):  # then it knows of nobody
                self.links[0].ask(Release())
        self._admitted = False

    def close(self) -> None:
        """Close the connections to all."""
        for link in self.links:
            link.close()

    def _look(self, links: Sequence[Link]) -> list[Values]:
        return self._ask(links, [Pull(admit=False)] * len(links))

    def _ask(self, links: Sequence[Link], messages: Sequence[Message]) -> list[Values]:
        self._send(links, messages)
        return self._receive(links, messages)

    def _send(self, links: Sequence[Link], messages: Sequence[Message]) -> None:
        """Send to all; if one was restarted receive the others' replies, which are of no use."""
        sent: list[tuple[Link, Message]] = []
        restarted: Restarted | None = None
        for link, message in zip(links, messages, strict=True):
            try:
                link.send(message)
                sent.append((link, message))
            except Restarted as error:
                restarted = error
        if restarted is not None:
            with suppress(Restarted):
                self._receive(*zip(*sent, strict=True) if sent else ((), ()))
            raise restarted

    def _receive(self, links: Sequence[Link], messages: Sequence[Message]) -> list[Values]:
        """The replies of all; every one is received before `Restarted` is raised."""
        found: list[Values] = []
        restarted: Restarted | None = None
        for link, message in zip(links, messages, strict=True):
            try:
                found.append(link.receive(message))
            except Restarted as error:
                restarted = error
        if restarted is not None:
            raise restarted
        return found

    def _take(self, found: Sequence[Values]) -> None:
        self._versions = [values.version for values in found]
        self.progress = found[0]
        if self.pulled is not None:
            self.pulled.check()
        for link in self.links:
            link.fill_model(self._apart)
        if self.pulled is not None:
            self.pulled.came()
