"""One task's requests to a parameter server, served one after the other in a thread."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from torch import Tensor

from spartito.collectives.membership.versions import Versions, check_versions
from spartito.errors import SpartitoError, TaskLostError, UserError
from spartito.failpoints import failpoint
from spartito.notes import shown
from spartito.ps.protocol.codec import Codec, make_codec
from spartito.ps.protocol.layout import unused
from spartito.ps.protocol.memory import allocate
from spartito.ps.protocol.messages import (
    Applied,
    Appoint,
    Done,
    Elsewhere,
    End,
    Errand,
    Fence,
    Flush,
    GetApplied,
    GetRecord,
    GetState,
    Hello,
    Load,
    LoadState,
    Lost,
    Pull,
    Push,
    Record,
    Refused,
    Release,
    Schedule,
    Stand,
    Status,
    Values,
    Welcome,
)
from spartito.ps.protocol.options import settings
from spartito.ps.protocol.runtime import Channel
from spartito.ps.protocol.slots import slot_of
from spartito.ps.protocol.timetable import Timetable
from spartito.ps.protocol.transfer import state_limit, state_messages
from spartito.ps.server.host import Host
from spartito.ps.server.loading import Loading, read_timetable
from spartito.ps.server.shared_link import share
from spartito.system import host_key
from spartito.wire.frames import Gone, ProtocolError, need
from spartito.wire.limits import GREETING_SECONDS, LONG_HEADER


class Connection:
    """One task's requests, one after the other; the task knows the job's key."""

    def __init__(self, server: Host, wire: Channel) -> None:
        self._server, self._store = server, server.store
        self._wire = wire
        self._worker, self._generation, self._chief = -1, 0, False
        self._errand = Errand.SERVE
        self._edition = -1  # of the values that the task has
        self._pulled = -1  # their version
        self._loading: Loading | None = None
        span = self._store.shard.span
        self._span = span
        self._shared = False
        self._inbox: Tensor | None = None
        self._outbox: Tensor | None = None
        self._codec: Codec = make_codec(self._store.shard.layout, span, server.wire_dtype)

    @property
    def sent(self) -> int:
        """Bytes."""
        return self._wire.sent

    @property
    def received(self) -> int:
        """Bytes."""
        return self._wire.received

    def close(self) -> None:
        """End it from another thread."""
        self._wire.close()

    def run(self) -> None:
        """Serve until the task leaves."""
        hello: Hello | None = None
        try:
            with self._coming():
                hello = self._greet()
                if hello is not None and hello.errand is Errand.SERVE:
                    self._welcome(hello)
            if hello is not None:
                self._run(hello)
        except ProtocolError as error:
            name, who, why = self._server.name, _who(hello), shown(str(error))
            self._server.seldom.warn("%s sends %s away: %s", name, who, why)
            self._refuse(error)
        except (Gone, TimeoutError):
            pass  # it left, and comes back or not
        except SpartitoError as error:
            self._refuse(error)
        except Exception as error:  # the user's optimizer, or a fault of ours: it ends the job
            what = f"{self._server.name} failed: {type(error).__name__}: {error}"
            self._refuse(SpartitoError(what, "Look at its last lines."))
            self._server.fail(error)
        finally:
            self._wire.close()
            if hello is not None:
                if self.serves:
                    self._release()
                self._server.left(self, hello.chief)

    def _run(self, hello: Hello) -> None:
        match hello.errand:
            case Errand.SERVE:
                self._serve()
            case Errand.COPY:
                self._server.replica.obey(self._wire, hello.term)
            case Errand.WATCH:
                self._show()

    def _show(self) -> None:
        """Say what this server is; the chief says what it shall be."""
        self._wire.set_timeouts(send=self._server.timeout, receive=None)
        while True:
            message = self._wire.receive()
            need(self._chief or isinstance(message, Stand), "that is the chief's to say")
            if self._chief:
                self._server.heard_from_chief(self._generation)
            match message:
                case Stand():
                    self._wire.send(self._server.replica.standing())
                case Appoint():
                    self._wire.send(self._server.replica.appoint(message))
                case End(why):
                    self._wire.send(Done())
                    self._server.end(why)
                    return
                case _:
                    raise ProtocolError(f"{type(message).__name__.lower()} came in the middle")

    @property
    def serves(self) -> bool:
        """Whether the task is served as by a primary alone."""
        return self._errand is Errand.SERVE

    def _release(self) -> None:
        """This process computes nothing any more, unless another has replaced it."""
        with self._store.lock, suppress(UserError):
            if self._inbox is not None:
                self._store.shard.forget(self._inbox)
            if not self._chief:
                self._store.check(self._worker, self._generation)
                self._store.release(self._worker)

    def _refuse(self, error: SpartitoError) -> None:
        with suppress(OSError, SpartitoError):
            why, _, advice = str(error).partition("\n  ")
            self._wire.send(Refused(why, advice, isinstance(error, TaskLostError)))

    def _greet(self) -> Hello | None:
        """Who comes, once it is let in; None if it was refused."""
        hello = self._wire.receive()
        if not isinstance(hello, Hello):
            raise ProtocolError(f"hello was expected, {type(hello).__name__.lower()} came")
        if not self._fits(hello):
            return None
        try:
            refusal = self._server.greet(hello)
        except TaskLostError as error:  # our values are: who comes is told, and the chief last
            self._refuse(error)
            if hello.chief:
                self._server.fail(error)
            return None
        if refusal is not None:
            self._wire.send(refusal)
            return None
        self._worker, self._chief = hello.worker, hello.chief
        self._generation, self._errand = hello.generation, hello.errand
        if self.serves and not self._store.primary:
            self._wire.send(Elsewhere())
            return None
        if self.serves and not self._chief:
            with self._store.lock:
                self._store.wait_for_fence(self._worker, self._generation, GREETING_SECONDS)
        self._server.came(self, hello.chief)
        return hello

    @contextmanager
    def _coming(self) -> Iterator[None]:
        """`Gone` where the system has no descriptor or memory for a task: it comes again."""
        try:
            yield
        except (Gone, TimeoutError):
            raise
        except OSError as error:
            name, why = self._server.name, error.strerror
            self._server.seldom.warn("%s cannot let a task in: %s", name, why)
            raise Gone(*error.args) from error

    def _welcome(self, hello: Hello) -> None:
        """Go on with shared memory where the task is on this machine."""
        server = self._server
        welcome = Welcome(self._store.ready, server.incarnation, term=server.replica.term)
        same_host = bool(hello.host) and hello.host == host_key()
        if self._server.shares and same_host:
            self._wire, self._inbox, self._outbox = share(
                self._wire, self._span, welcome, self._server.key
            )
            self._shared = True
        else:
            self._inbox, self._outbox = allocate(self._span), allocate(self._span)
            self._wire.send(welcome)
        self._wire.set_timeouts(send=self._server.timeout, receive=None)
        self._wire.header_limit = LONG_HEADER
        self._wire.limit = state_limit(self._span) if hello.chief else self._codec.size

    def _fits(self, hello: Hello) -> bool:
        """Whether the task runs what we run; else it is refused."""
        try:
            check_versions({hello.task: hello.versions, self._server.name: Versions.own()})
        except UserError as error:
            self._refuse(error)
            if hello.chief and not self._store.ready:  # nobody else has values for us
                self._server.fail(error)
            return False
        return True

    def _serve(self) -> None:
        inbox, outbox, store = self._inbox, self._outbox, self._store
        assert inbox is not None
        assert outbox is not None
        buffer = None if self._shared else self._codec.buffer(inbox)
        while True:
            message = self._wire.receive(buffer)
            if self._chief:
                self._server.heard_from_chief(self._generation)
            if isinstance(message, Push):
                left_out = unused(store.shard.runs, message.absent)
                self._check_push(message, left_out)
                if not self._shared and not message.dropped:
                    self._codec.decode(inbox, self._wire.payload, left_out)
                with store.lock:
                    self._need_values()
                    store.check(self._worker, self._generation)
                    self._watch(message.norm)
                    pulled = outbox if message.pulled == self._pulled else None
                    outcome, staleness = store.push(self._worker, message, inbox, pulled)
                    store.check(self._worker, self._generation)  # a round takes its time
                    if message.pull:
                        store.admit(self._worker)
                    unchanged = self._bring(outbox) if message.pull else None
                    reply = store.values(outcome, staleness, unchanged)
                    store.settle()
                self._reply(reply, outbox)
            elif isinstance(message, Pull):
                with store.lock:
                    self._need_values()
                    store.check(self._worker, self._generation)
                    if message.admit:
                        store.admit(self._worker)
                    reply = store.values(unchanged=self._bring(outbox))
                    store.settle()
                self._reply(reply, outbox)
            elif isinstance(message, End) and self._chief:
                self._wire.send(Done())
                self._server.end(message.why)
                return
            else:
                self._control(message)

    def _watch(self, norm: float) -> None:
        """Say so if a gradient is out of all proportion; it counts as any other."""
        norms = self._store.norms
        if norms.is_absurd(norm):
            self._server.seldom.warn(
                "%s: %s pushed a gradient with a norm of %.3g; %.3g is usual",
                self._server.name, self._store.rules.name_of(self._worker), norm, norms.usual,
            )  # fmt: skip
        norms.add(norm)

    def _bring(self, outbox: Tensor) -> list[int]:
        """The values into ``outbox``; returns the runs that it had already."""
        store = self._store
        unchanged = store.editions.unchanged(self._edition)
        self._edition, self._pulled = store.editions.now, store.version
        if not unchanged:
            outbox.copy_(store.shard.values)
            return []
        for number, run in enumerate(store.shard.runs):
            if number not in unchanged:
                here = slice(run.start - self._span.start, run.stop - self._span.start)
                outbox[here].copy_(store.shard.values[here])
        return sorted(unchanged)

    def _reply(self, reply: Values, values: Tensor) -> None:
        if reply.unchanged is None or self._shared:
            self._wire.send(reply)
        else:
            self._wire.send(reply, *self._codec.encode(values, frozenset(reply.unchanged)))

    def _need_values(self) -> None:
        self._store.check_primary()
        if not self._store.ready:
            raise SpartitoError(
                f"{self._server.name} has no values yet", "The chief gives them when it comes."
            )

    def _check_push(self, push: Push, left_out: frozenset[int]) -> None:
        """Raise `ProtocolError` unless the push is one that this shard can take."""
        store, wire, rules = self._store, self._wire, self._store.rules
        size = 0 if self._shared or push.dropped else self._codec.size_without(left_out)
        entries = len(store.shard.layout.entries)
        rounds = (push.group > 0, 0 < push.parties <= rules.workers)
        need(self._worker >= 0, "a push came from a task that computes nothing")
        if len(wire.payload) != size:
            raise ProtocolError(
                f"{size} bytes of gradients were expected, {len(wire.payload)} came"
            )
        need(bool(push.keys) and all(map(store.keys.accepts, push.keys)), "no such work items")
        need(all(entry < entries for entry in push.absent), "no such parameters")
        need(push.pulled <= store.version, "a gradient of values that are not there yet")
        need(all(rounds) if rules.in_rounds else not push.group, "a round was not expected")

    def _control(self, message: Any) -> None:
        """What comes seldom: of the chief, and of workers that rest.

        Nothing is sent with the lock held: who does not read keeps nobody else waiting.
        """
        allowed = self._chief or isinstance(message, Status | Release)
        need(allowed, f"{type(message).__name__.lower()} came, which is the chief's to say")
        if isinstance(message, GetState):
            self._send_state()
            return
        with self._store.lock:
            self._store.check_primary()
            replies = self._replies(message)
            whole = self._loading is not None and self._loading.is_whole
            if whole or not isinstance(message, Status | GetRecord | Load | LoadState):
                self._store.settle(whole)
        if whole:
            self._loading = None
            failpoint("ps.server.loaded")
            try:
                self._server.snapshot()
            except UserError as error:
                self._refuse(error)
                self._server.fail(error)
                return
            replies = [(Done(),)]
        if isinstance(message, Flush) and message.keep:
            self._server.keep()
        for reply in replies:
            self._wire.send(*reply)

    def _send_state(self) -> None:
        store = self._store
        with store.lock:
            self._need_values()
            copies, options = store.copy(), settings(store.shard.optimizer)
        state = {slot_of(name): value for name, value in copies.items() if name != "values"}
        for message in state_messages(copies["values"], state, options):
            self._wire.send(*message)
        store.buffers.give_back(copies)

    def _replies(self, message: Any) -> Sequence[tuple[Any, ...]]:
        """Do what is asked, with the lock held; the replies, each with its payload."""
        store = self._store
        match message:
            case Status():
                return [(store.values(),)]
            case GetRecord():
                return [(Record(self._server.record()),)]
            case GetApplied():
                return [(Applied(), store.keys.dump())]
            case Load() | LoadState():
                self._load(message)
                return []
            case Release():
                store.check(self._worker, self._generation)
                store.release(self._worker)
            case Fence(generations):
                known = all(worker < store.rules.workers for worker in generations)
                need(known, "no such workers")
                store.fence(generations)
            case Lost(worker, group, size):
                need(worker < store.rules.workers, "no such worker")
                store.lose(worker, group, size)
            case Flush(_):
                store.flush()
            case Schedule():
                store.schedule(read_timetable(self._wire.payload, store.shard))
            case _:
                raise ProtocolError(f"{type(message).__name__.lower()} came in the middle")
        return [(Done(),)]

    def _load(self, message: Load | LoadState) -> None:
        payload = self._wire.payload
        if isinstance(message, Load):
            self._loading = Loading(self._store.shard, message, payload)
        else:
            need(self._loading is not None, "the optimizer's state came where it was not expected")
            assert self._loading is not None
            self._loading.add(message, payload)
        if self._loading.is_whole:
            self._loading.finish()
            self._store.schedule(Timetable())
            self._store.begin(self._loading.job)


def _who(hello: Hello | None) -> str:
    return "an unknown peer" if hello is None else hello.task
