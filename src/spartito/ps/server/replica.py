"""Which of the two servers of a span this one is: the primary, its backup, or neither yet."""

from __future__ import annotations

import secrets
from typing import Any, Protocol

import msgspec
from torch import Tensor

from spartito.collectives.membership.versions import Versions
from spartito.notes import note
from spartito.ps.protocol.codec import PlainCodec
from spartito.ps.protocol.layout import unused
from spartito.ps.protocol.memory import allocate
from spartito.ps.protocol.messages import (
    Appoint,
    Copy,
    Copying,
    Done,
    Elsewhere,
    Errand,
    Fence,
    Hello,
    Lost,
    Schedule,
    Standing,
    Update,
    Welcome,
    Whole,
)
from spartito.ps.protocol.runtime import Channel
from spartito.ps.protocol.timetable import decode_timetable
from spartito.ps.protocol.transfer import MOST_KEYS, state_limit
from spartito.ps.server.copies import BackupLink, read_copy
from spartito.ps.server.loading import read_timetable
from spartito.ps.server.store import Store
from spartito.wire.frames import Gone, ProtocolError, need
from spartito.wire.limits import LONG_HEADER


class Owner(Protocol):
    """The server that a `Replica` belongs to."""

    store: Store
    name: str
    timeout: float
    incarnation: str

    def reach(self, address: str) -> Channel:
        """A connection to another server, both ends of which know the secret."""
        ...

    def restore(self, job: str) -> bool:
        """Go on from the snapshot; False where there is none of this job."""
        ...

    def keep(self) -> None:
        """Write a snapshot of what is there now; a warning where there is no space for it."""

    def disconnect(self) -> None:
        """Close the connections of those who are served."""


class Replica:
    """What this server is, as the chief has appointed it; terms only grow.

    A primary says nothing that its backup does not have, and a backup obeys no primary of an
    earlier term: so one that was replaced can never reply to a push again.
    """

    def __init__(self, owner: Owner) -> None:
        self.term = 0
        self._owner, self._store = owner, owner.store
        self._whole = False  # as a backup: it has all that ever had a reply
        self._feed: object = None  # the primary's connection that is obeyed

    def standing(self) -> Standing:
        """What it is now."""
        with self._store.lock:
            copies = self._store.copies
            state = Copying.ALONE if copies is None else copies.state
            return Standing(self.term, self._store.primary, self._whole, state)

    def appoint(self, asked: Appoint) -> Standing:
        """Be the primary, if it has the values or is told to go on without; what it is then."""
        store = self._store
        with store.lock:
            if asked.term > self.term and self._is_able(asked):
                if not store.primary:
                    note("%s is the primary of its values now", self._owner.name)
                self.term, store.primary = asked.term, True
                self._whole, self._feed = False, None
                self._copy_to(asked.backup)
                store.lock.notify_all()
        return self.standing()

    def _is_able(self, asked: Appoint) -> bool:
        if self._store.primary or self._whole or asked.fresh:
            return True
        if not asked.restore:
            return False
        self._store.forget()
        self._owner.incarnation = secrets.token_hex(4)  # what was since the snapshot is lost
        return self._owner.restore(asked.job)

    def step_down(self, term: int) -> None:
        """Another server has become the primary since ``term``."""
        with self._store.lock:
            if not self._store.primary or self.term > term:
                return
            self._store.primary = False
            self._copy_to("")
            self._store.forget()
        note("%s is the primary of its values no more", self._owner.name)
        self._owner.disconnect()

    def close(self) -> None:
        """Tell the backup nothing more."""
        with self._store.lock:
            self._copy_to("")

    def obey(self, wire: Channel, term: int) -> None:
        """Do as the primary of ``term`` does, until its connection ends or another one comes."""
        store, feed = self._store, object()
        with store.lock:
            if term < self.term or (store.primary and term == self.term):
                wire.send(Elsewhere())
                return
            before = self.term
        self.step_down(before)
        with store.lock:
            if term < self.term:
                wire.send(Elsewhere())
                return
            self.term, self._whole, self._feed = term, False, feed
        span = store.shard.span
        wire.header_limit, wire.limit = LONG_HEADER, span.size + state_limit(span) + MOST_KEYS
        wire.set_timeouts(send=self._owner.timeout, receive=None)
        wire.send(Welcome(store.ready, self._owner.incarnation, term=term))
        codec, memory = PlainCodec(store.shard.layout, span), allocate(span)
        buffer = codec.buffer(memory)
        while True:
            message = wire.receive(buffer)
            if isinstance(message, Update) and message.changes:
                left_out = unused(store.shard.runs, message.absent)
                need(len(wire.payload) == codec.size_without(left_out), "another gradient came")
                codec.decode(memory, wire.payload, left_out)
            with store.lock:
                if self._feed is not feed:
                    wire.send(Elsewhere())
                    return
                self._follow(message, wire.payload, memory)
            wire.send(Done())

    def _follow(self, message: Any, payload: memoryview, gradient: Tensor) -> None:
        store = self._store
        match message:
            case Update():
                entries = len(store.shard.layout.entries)
                need(store.ready and all(map(store.keys.accepts, message.keys)), "no such work")
                need(all(entry < entries for entry in message.absent), "no such parameters")
                options = message.options
                need(options is None or store.shard.accepts(options), "no such options")
                store.make(message, gradient if message.changes else None)
            case Copy():
                self._take_over(*read_copy(message, payload))
            case Whole():
                self._whole = True
                store.runtime.start(self._owner.keep, "spartito-snapshot")
            case Schedule():
                store.schedule(read_timetable(payload, store.shard))
            case Fence(generations):
                store.fence(generations)
            case Lost(worker, group, size):
                store.lose(worker, group, size)
            case _:
                raise ProtocolError(f"{type(message).__name__.lower()} came to a backup")

    def _copy_to(self, backup: str) -> None:
        """From now on ``backup`` has to know all; nobody, if it is empty."""
        store, owner, term = self._store, self._owner, self.term
        if store.copies is not None:
            store.copies.end()
            store.copies = None
        if not backup:
            return
        store.copies = BackupLink(
            store,
            connect=lambda: self._open(backup, term),
            fenced=lambda: self.step_down(term),
            dump=self._dump,
            timeout=owner.timeout,
        )
        if store.ready:
            store.copies.all()
        store.runtime.start(store.copies.run, "spartito-copies")

    def _open(self, backup: str, term: int) -> Channel:
        """The way to the backup; `Gone` if it obeys another primary."""
        owner, store = self._owner, self._store
        wire = owner.reach(backup)
        try:
            wire.send(
                Hello(
                    task=owner.name, worker=-1, chief=False, job=store.job,
                    digest=store.shard.layout.digest, versions=Versions.own(),
                    rules=str(store.rules), host="", errand=Errand.COPY, term=term,
                )
            )  # fmt: skip
            reply = wire.receive()
            if isinstance(reply, Elsewhere):
                self.step_down(term)
            if not isinstance(reply, Welcome):
                raise Gone(f"the backup at {backup} does not obey")
        except BaseException:
            wire.close()
            raise
        wire.header_limit = LONG_HEADER
        return wire

    def _dump(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """As `Store.dump`, and what else a backup has to know."""
        store = self._store
        tensors, about = store.dump()
        known = {
            "timetable": msgspec.msgpack.encode(store.timetable),
            "generations": store.generations,
            "absent": store.absent,
            "ended": store.ended,
            "incarnation": self._owner.incarnation,
        }
        return tensors, {**about, **known}

    def _take_over(self, tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
        """Be what `_dump` described, whatever was here."""
        store = self._store
        store.forget()
        store.schedule(decode_timetable(about["timetable"]))
        store.generations, store.absent = about["generations"], about["absent"]
        store.ended = {worker: tuple(last) for worker, last in about["ended"].items()}
        self._owner.incarnation = about["incarnation"]
        if store.counter is not None:
            store.counter.value = about["counts"][0] + about["others"][3]
        store.restore(tensors, about)
