"""One task of a job with parameter servers: who it is, and its connections to the others."""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from msgspec import structs
from torch import Tensor, nn
from torch.optim import Optimizer

from spartito.cluster.endpoints import job_key, rendezvous_endpoint, server_endpoint, warn_if_open
from spartito.cluster.recovery import Recovery
from spartito.cluster.spec import ClusterSpec, Task
from spartito.collectives.membership.placement import note_sockets
from spartito.collectives.membership.versions import Versions
from spartito.errors import SpartitoError, UserError
from spartito.names import ENV_SNAPSHOT_DIR, listed, nearest, size
from spartito.notes import note
from spartito.numeric import is_number
from spartito.ps.chief import JOB, Chief, OnCame, OnLost, views_of
from spartito.ps.client.appointments import SILENT_SECONDS, Appointments
from spartito.ps.client.appointments import Server as Watched
from spartito.ps.client.control import Control
from spartito.ps.client.link import Address, Link
from spartito.ps.client.servers import Servers
from spartito.ps.client.vector import SpanCopies, Vector
from spartito.ps.client.work_source import WorkerLink
from spartito.ps.protocol.codec import check_wire_dtype
from spartito.ps.protocol.layout import Layout, Span, cut, table
from spartito.ps.protocol.memory import allocate, flat
from spartito.ps.protocol.messages import PURPOSE, Errand, Hello, Reply
from spartito.ps.protocol.options import settings
from spartito.ps.protocol.rules import Rules
from spartito.ps.protocol.runtime import Channel
from spartito.ps.protocol.slots import is_elementwise, merge_state, slots, split_state
from spartito.ps.protocol.work import WorkSource
from spartito.ps.scheduler.coordinator import Coordinator
from spartito.ps.scheduler.journal import FileJournal, Journal, NoJournal
from spartito.ps.scheduler.ledger import Book
from spartito.ps.scheduler.listener import WorkerListener
from spartito.ps.scheduler.local import LocalLink
from spartito.ps.server.compensation import check_compensation
from spartito.ps.server.server import Server
from spartito.ps.server.shard import Shard
from spartito.ps.server.snapshot import Snapshot
from spartito.ps.server.store import Store
from spartito.ps.server.update_log import PushLog
from spartito.storage.private import private_directory
from spartito.system import host_key, shares_memory
from spartito.system.files import temporary_folder
from spartito.wire.addresses import split_address
from spartito.wire.dialing import dial
from spartito.wire.frames import Wire
from spartito.wire.handshake import prove
from spartito.wire.listening import listen


@dataclass(frozen=True, slots=True)
class Options:
    """How servers are run, and the work of workers is watched; times in seconds.

    Args:
        replicas: On how many servers each value is.
        min_shard_bytes: Each part of a tensor that is cut over servers keeps so many bytes.
        wire_dtype: Of what is sent over a network; None is the model's own.
        lease_seconds: A worker that is silent so long is given up.
        snapshot_seconds: From one snapshot of a server to the next.
        snapshot_dir: Where; None is ``SPARTITO_SNAPSHOT_DIR``, else a folder in ``/tmp``.
        nan_limit: More pushes than so many that are not finite end the training.
        push_log: Where servers record all their updates; None: nowhere.
        shared_memory: Whether those of one machine share memory.
        timeout: That a wait for another task may take.
        recovery: How the job goes on without its chief; None: it ends.
    """

    replicas: int = 1
    min_shard_bytes: int = 256 << 10
    wire_dtype: str | None = None
    lease_seconds: float = 10.0
    snapshot_seconds: float = 10.0
    snapshot_dir: str | None = None
    nan_limit: int = 100
    push_log: str | None = None
    shared_memory: bool = True
    timeout: float = 600.0
    recovery: Recovery | None = None

    @classmethod
    def of(cls, given: object) -> Options:
        """What a user has said of servers.

        Args:
            given: A mapping of the fields above, but the last two; None: nothing.

        Raises:
            UserError: It names the key, and what it can be.
        """
        said = {} if given is None else given
        kinds = {each.name: each.type for each in fields(cls) if each.name not in _OF_THE_JOB}
        if not isinstance(said, Mapping):
            do = 'Give them by name: servers={"snapshot_seconds": 30}.'
            raise UserError(f"servers={said!r} is no dictionary", do)
        for name, value in said.items():
            if name not in kinds:
                raise UserError(f"servers={{{name!r}: ...}}", nearest(str(name), kinds))
            _check(name, value, str(kinds[name]))
        found = cls(**said)
        return replace(found, wire_dtype=check_wire_dtype(found.wire_dtype))

    @property
    def patience(self) -> float:
        """Seconds that the others wait for another process that is the chief."""
        return 0.0 if self.recovery is None else self.recovery.patience


_OF_THE_JOB = ("timeout", "recovery")
_LEAST = {"min_shard_bytes": (1, "A part has at least one byte."), "nan_limit": (0, "0 or more.")}


def _check(name: str, value: Any, kind: str) -> None:
    """Refuse a value that a field of `Options` cannot have; ``kind`` is its annotation."""
    said = f"servers={{{name!r}: {value!r}}}"
    if kind == "float":
        if not (is_number(value) and isfinite(value) and value > 0):
            raise UserError(said, "Seconds: a number above 0.")
        return
    kinds: dict[str, tuple[type, ...]] = {"int": (int,), "bool": (bool,)}
    if type(value) not in kinds.get(kind, (str, type(None))):
        raise UserError(said, f"It is of type {kind}.")
    least, do = _LEAST.get(name, (None, ""))
    if least is not None and value < least:
        raise UserError(said, do)


class Job:
    """One model and its optimizer, divided over the servers of ``cluster``."""

    def __init__(
        self,
        cluster: ClusterSpec,
        rules: Rules,
        options: Options,
        model: nn.Module,
        optimizer: Optimizer,
        workers: Sequence[Task],
        wholes: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Pure; raises `UserError` when there are more servers than the model can fill.

        ``workers`` ask for work and push: of each group the first member. ``wholes`` are as for
        `Vector`.
        """
        self.cluster, self.options = cluster, options
        self._key = job_key(cluster)
        warn_if_open(cluster)
        if options.shared_memory:
            note_sockets(cluster)
        self.workers = list(workers)
        self.vector = Vector(model, optimizer, wholes)
        self._optimizer = optimizer
        self._addresses = cluster.addresses["ps"]
        self.rules = replace(
            rules,
            servers=len(self._addresses),
            min_shard_bytes=options.min_shard_bytes,
            wire_dtype=options.wire_dtype,
            replicas=options.replicas,
        )
        check_compensation(self.rules, self.vector.layout.learned_dtypes)
        self._whole = not is_elementwise(optimizer)
        self._spans = cut(
            self.vector.layout, self.rules.spans, options.min_shard_bytes, self._whole
        )
        self._book = Book("")
        # A chief that computes nothing is nobody among them, and who only looks at values.
        self._index = self.workers.index(cluster.task) if cluster.task in self.workers else -1

    def server(self) -> Server:
        """What a ps is: it listens, and is to serve until the job ends."""
        cluster, options, number = self.cluster, self.options, self.cluster.task.index
        host, port = split_address(self._addresses[number])
        folder = self._folder()
        listener = listen(server_endpoint(cluster), options.timeout)
        log = PushLog(Path(options.push_log) / f"ps-{number}.log") if options.push_log else None
        part, layout = number // self.rules.replicas, self.vector.layout
        span = self._spans[part]
        shard = Shard(layout, span, self._optimizer, self.vector.tensors)
        name = f"{cluster.task} ({host}:{port})"
        return Server(
            Store(shard, self.rules, gates=part == 0, log=log),
            listener,
            name=name,
            chief=cluster.name_of(0),
            wire_dtype=options.wire_dtype,
            timeout=options.timeout,
            snapshot=Snapshot(Path(folder) / f"ps-{number}-{port}.safetensors", name),
            seconds=options.snapshot_seconds,
            patience=options.patience,
            shares=options.shared_memory,
            key=self._key,
        )

    def begin(self) -> Chief:
        """As the chief: give the servers our values, and let the workers come."""
        listener = listen(rendezvous_endpoint(self.cluster), self.options.timeout)
        self._book = book = Book(
            secrets.token_hex(8), self._journal(), f"{self.vector.layout.digest} {self.rules}"
        )
        name, links = book.ledger.job, list[Link]()
        appointments = Appointments(self._watched(name), name)
        try:
            appointments.begin(self.options.timeout, views_of(book.ledger.primaries))
            for number in range(len(self._spans)):
                links.append(self._link(number, name, control=True))
        except SpartitoError as error:
            book.remove()  # whoever comes next begins anew
            if isinstance(error, UserError):
                Control(links).end()  # the others would wait for us
            appointments.close(end=isinstance(error, UserError))
            raise
        control = Control(links, scheduled=not self.rules.every)
        chief = Chief(
            self._coordinator, control, name, len(self.workers), appointments, self.rules.together
        )
        if not book.goes_on:
            self.give(chief)
        chief.begin()
        WorkerListener(chief.coordinator).listen(listener, self._key)
        if book.goes_on:
            self._go_on(chief)
            return chief
        for line in shares(self.vector.layout, self._spans, [link.address.name for link in links]):
            note("%s", line)
        return chief

    def _go_on(self, chief: Chief) -> None:
        """Say that another process was the chief; the job ends if it had ended all the same."""
        if self._book.ledger.ended:
            note("the job was done when its chief was lost")
            chief.close()
            sys.exit(0)
        note("%s goes on with the job", self.cluster.name_of(0))

    def _journal(self) -> Journal:
        """What another process goes on from if this one is lost."""
        if self.options.recovery is None:
            return NoJournal()
        port = split_address(self.cluster.rendezvous or "")[1]
        return FileJournal(Path(self._folder()) / f"chief-{port}.journal")

    def _folder(self) -> str | Path:
        """Where lies what tasks go on from that are started again."""
        named = self.options.snapshot_dir or os.environ.get(ENV_SNAPSHOT_DIR)
        return named or _private_folder()

    def work(self, chief: Chief | None) -> tuple[WorkSource | None, str]:
        """Where our work comes from, None if we compute nothing, and the job's name."""
        if chief is not None:
            local = LocalLink(chief.coordinator, self._index) if self._index >= 0 else None
            return local, chief.job
        host, port = split_address(self.cluster.rendezvous or "")
        name = self.cluster.name_of(0)
        link = WorkerLink.connect(
            host, port, name, self._index, timeout=self.options.timeout, key=self._key,
            patience=self.options.patience,
        )  # fmt: skip
        return link, link.published(JOB).decode()

    def connect(
        self, name: str, work: WorkSource | None, kind: Callable[..., Servers] = Servers
    ) -> Servers:
        """Connections to all servers, as the generation that the coordinator gave this process."""
        generation = work.generation if work is not None else 0
        links = [
            self._link(number, name, control=False, generation=generation)
            for number in range(len(self._spans))
        ]
        return kind(links, self.vector, self.rules.waits, self.rules.every > 0)

    def without_servers(self, kind: Callable[..., Servers]) -> Servers:
        """As `connect`, of a task that sees them by another one."""
        return kind([], self.vector, self.rules.waits, self.rules.every > 0)

    def give(self, chief: Chief) -> None:
        """Our values and the state of our optimizer to the servers."""
        begun = self._optimizer.state
        by_entry = [dict(begun.get(tensor, {})) for tensor in self.vector.tensors]
        values, states = [], []
        for span in self._spans:
            memory = allocate(span)
            SpanCopies(self.vector, span, memory).store()
            values.append(memory)
            states.append(merge_state(slots(self.vector.layout, span, self._whole), by_entry))
        chief.control.load(chief.job, values, states, settings(self._optimizer))

    @torch.no_grad()
    def fetch(self, chief: Chief) -> list[dict[str, Any]]:
        """The servers' values into the model, and the state of their optimizers into ours.

        Returns the options of the first server's optimizer.
        """
        states = chief.control.states()
        for span, (values, state, _) in zip(self._spans, states, strict=True):
            SpanCopies(self.vector, span, values).load()
            found = slots(self.vector.layout, span, self._whole)
            for part, key, value in split_state(found, state):
                tensor = self.vector.tensors[part.entry]
                own = self._optimizer.state[tensor]
                if value.numel() != part.end - part.begin or not value.dim():
                    own[key] = value
                    continue
                if key not in own:
                    own[key] = torch.zeros_like(tensor.detach(), dtype=value.dtype)
                flat(own[key])[part.begin : part.end] = value
        return states[0][2]

    def table(self) -> list[tuple[str, str, str, str]]:
        """Which server holds what: rows of server, tensor, which part of it, size."""
        numbers = [self._numbers(part) for part in range(len(self._spans))]
        names = [f"ps {' and '.join(map(str, own))}" for own in numbers]
        return table(self.vector.layout, self._spans, names)

    def _names(self) -> list[str]:
        """What messages call those who ask for work: one of several speaks for its group."""
        if len(self.workers) == len(workers_of(self.cluster)):
            return [str(task) for task in self.workers]
        return [f"{task} of group {number}" for number, task in enumerate(self.workers)]

    def _coordinator(self, on_lost: OnLost, on_came: OnCame) -> Coordinator:
        return Coordinator(
            self._names(),
            lease_seconds=self.options.lease_seconds,
            timeout=self.options.timeout,
            on_lost=on_lost,
            on_came=on_came,
            expect_all=self.rules.in_step,
            bad_limit=self.options.nan_limit,
            book=self._book,
            rules=self.rules,
        )

    def _link(self, part: int, job: str, *, control: bool, generation: int = 0) -> Link:
        options, span = self.options, self._spans[part]
        hello = self._hello(job, control, generation)
        if options.shared_memory and shares_memory() and not control:
            hello = structs.replace(hello, host=host_key())
        return Link(
            [self._address(number) for number in self._numbers(part)],
            hello, span, self.vector, options.wire_dtype, options.timeout, self._key,
        )  # fmt: skip

    def _hello(self, job: str, control: bool, generation: int = 0) -> Hello:
        return Hello(
            task=str(self.cluster.task),
            worker=self._index,
            chief=control,
            job=job,
            digest=self.vector.layout.digest,
            versions=Versions.own(),
            rules=str(self.rules),
            host="",
            generation=self._book.ledger.reign if control else generation,
            loaded=not control or self._book.goes_on,
        )

    def _address(self, number: int) -> Address:
        return Address.of(number, self._addresses[number])

    def _numbers(self, part: int) -> range:
        """The servers of a span."""
        return range(part * self.rules.replicas, (part + 1) * self.rules.replicas)

    def _watched(self, job: str) -> list[list[Watched]]:
        """The servers of each span that has several."""
        if self.rules.replicas == 1:
            return []
        hello = structs.replace(self._hello(job, True), errand=Errand.WATCH)
        return [
            [
                Watched(
                    self._address(number).name, self._addresses[number], hello,
                    partial(self._dial, self._address(number)),
                )
                for number in self._numbers(part)
            ]
            for part in range(len(self._spans))
        ]  # fmt: skip

    def _dial(self, where: Address, end: float) -> Channel:
        """A connection to a server that is asked what it is."""
        now = time.monotonic()
        sock = dial(where.host, where.port, where.name, self.options.timeout, end)
        try:
            limit = max(end, now + SILENT_SECONDS)
            known = prove(sock, where.name, self._key, PURPOSE, limit)
            return Wire(known, Reply, timeout=SILENT_SECONDS)
        except BaseException:
            sock.close()
            raise


def workers_of(cluster: ClusterSpec) -> list[Task]:
    """The tasks that compute: the workers, or a chief that is alone."""
    workers = [Task("worker", index) for index in range(len(cluster.addresses.get("worker", ())))]
    return workers or list(cluster.replica_tasks)


def shares(layout: Layout, spans: Sequence[Span], names: Sequence[str]) -> list[str]:
    """A line for each server: how much it holds, and of which tensors."""
    rows = table(layout, spans, names)
    lines = []
    for span, name in zip(spans, names, strict=True):
        held = [tensor if which == "all" else f"{tensor} ({which})"
                for server, tensor, which, _ in rows if server == name]  # fmt: skip
        lines.append(f"{name} holds {size(span.size)}: {listed(held, 5)}")
    return lines


def _private_folder() -> Path:
    """Where a server's snapshots lie when nobody says it: found again by this user alone."""
    folder = temporary_folder() / f"spartito-{os.getuid()}"
    return private_directory(folder, f"Name a folder for snapshots by {ENV_SNAPSHOT_DIR}.")
