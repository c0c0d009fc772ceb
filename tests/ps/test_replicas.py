"""Two servers with the same values: real ones in threads, by sockets and shared memory."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import nn
from torch.optim import Adam

from spartito.errors import UserError
from spartito.ps.client.appointments import Appointments, View, decide
from spartito.ps.client.appointments import Server as Watched
from spartito.ps.client.control import Control
from spartito.ps.client.link import Address, Link
from spartito.ps.client.servers import Servers
from spartito.ps.client.vector import SpanCopies, Vector
from spartito.ps.protocol.layout import cut
from spartito.ps.protocol.memory import allocate
from spartito.ps.protocol.messages import (
    PURPOSE,
    Copying,
    Errand,
    Outcome,
    Reply,
    Standing,
    Status,
)
from spartito.ps.protocol.options import settings
from spartito.ps.protocol.rules import Rules
from spartito.ps.server.server import Server
from spartito.wire.dialing import reach
from spartito.wire.frames import Wire
from spartito.wire.secret import NO_SECRET
from tests.ps.coordination import eventually
from tests.ps.served import HOST, LIMIT, WAYS, Job, compute, make, push


class Pair(Job):
    """Two servers of one span, which the chief watches."""

    def __init__(self, folder: Path, **options: Any) -> None:
        super().__init__(folder, 2, Rules(1, servers=2, replicas=2), kind=Adam, **options)
        hello = replace(self.hello(chief=True), errand=Errand.WATCH)
        watched = [
            Watched(f"ps {n}", f"{HOST}:{port}", hello, partial(self.dial, port))
            for n, port in enumerate(self.ports)
        ]
        self.appointments = Appointments([watched], "job")
        self.appointments.begin(LIMIT)
        self.ends.callback(self.appointments.close, end=True)
        self.chief = Control([self.both(self.hello(chief=True), self.vector)])
        self.ends.callback(self.chief.close)
        values = allocate(self.spans[0])
        SpanCopies(self.vector, self.spans[0], values).store()
        self.appointments.loaded = self.chief.loaded
        self.chief.load("job", [values], [{}], settings(self.optimizer))

    def start(self, number: int) -> Server:
        self.spans = cut(self.vector.layout, 1, 1, False) * 2
        return super().start(number)

    def dial(self, port: int, end: float) -> Wire:
        left = max(0.1, end - time.monotonic())
        sock = reach(HOST, port, "ps", left, key=NO_SECRET, purpose=PURPOSE)
        return Wire(sock, Reply, timeout=2.0)

    def both(self, hello: Any, vector: Vector) -> Link:
        addresses = [Address.of(n, f"{HOST}:{port}") for n, port in enumerate(self.ports)]
        return Link(addresses, hello, self.spans[0], vector, None, LIMIT)

    def pusher(self) -> tuple[Servers, nn.Module]:
        model = self.build()
        vector = Vector(model, make(model, Adam))
        servers = Servers([self.both(self.hello(), vector)], vector, False)
        self.ends.callback(servers.close)
        return servers, model

    def alike(self) -> bool:
        """Whether both servers hold the same, bit for bit."""
        one, other = (server.store for server in self.servers)
        states = [store.shard.state() for store in (one, other)]
        return (
            torch.equal(one.shard.values, other.shard.values)
            and all(torch.equal(value, states[1][key]) for key, value in states[0].items())
            and set(one.keys) == set(other.keys)
            and one.values() == other.values()
        )


@pytest.fixture(params=WAYS)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path, **request.param)
    yield made
    made.close()


def train(servers: Servers, model: nn.Module, step: int) -> Outcome | None:
    servers.admit()
    compute([model], step)
    absent, _ = servers.fill()
    servers.push(push(step), absent)
    return servers.result()


def test_the_other_goes_on_with_the_same_bits_and_a_new_one_copies(pair: Pair) -> None:
    servers, model = pair.pusher()
    for step in range(4):
        assert train(servers, model, step) is Outcome.APPLIED
        assert pair.alike()  # at the moment of the reply
    pair.kill(0)
    assert train(servers, model, 3) is Outcome.DUPLICATE  # it is known there
    assert train(servers, model, 4) is Outcome.APPLIED
    before = pair.servers[1].store.shard.values.clone()
    pair.start(0)
    eventually(lambda: pair.servers[0].replica.standing().whole)
    assert torch.equal(pair.servers[0].store.shard.values, before)
    assert train(servers, model, 5) is Outcome.APPLIED
    assert pair.alike()
    pair.kill(1)  # the one that copied has all
    assert train(servers, model, 5) is Outcome.DUPLICATE
    assert pair.chief.tell(Status())[0].work_items == 6
    assert pair.chief.restarted == set()  # nothing is to be computed again


def test_a_primary_that_was_replaced_replies_to_nothing(pair: Pair) -> None:
    servers, model = pair.pusher()
    assert train(servers, model, 0) is Outcome.APPLIED
    old, new = pair.servers
    with old.store.lock:  # it stands still, and is taken for lost
        eventually(lambda: new.replica.standing().primary)
    eventually(lambda: not old.replica.standing().primary)
    assert train(servers, model, 1) is Outcome.APPLIED
    assert new.store.version == 2
    eventually(lambda: old.replica.standing().whole)  # as a backup
    assert pair.alike()


PRIMARY = Standing(3, True, False, Copying.WHOLE)
BACKUP = Standing(3, False, True, Copying.ALONE)
FRESH = Standing(0, False, False, Copying.ALONE)


def found(*standings: Standing | None, waited: bool = False, backup: int | None = 1) -> View | None:
    return decide(View(3, 0, backup), standings, True, waited)


def test_who_is_appointed() -> None:
    assert found(PRIMARY, BACKUP) is None
    assert found(None, BACKUP) == found(FRESH, BACKUP) == View(4, 1)
    assert found(replace(PRIMARY, copying=Copying.LOST), BACKUP) == View(4, 0)
    assert found(PRIMARY, FRESH, backup=None) == View(4, 0, 1)
    assert found(PRIMARY, None, backup=None) is None
    restored = View(4, 0, restore=True)
    assert found(FRESH, replace(BACKUP, whole=False)) == restored  # nobody has all
    assert found(FRESH, replace(BACKUP, term=2)) == restored  # it was one before
    assert found(FRESH, None) is None  # who has all may come back
    assert found(FRESH, None, waited=True) == restored
    assert found(None, BACKUP, backup=None) is None  # it is not known what was replied since
    assert found(None, None, waited=True) is None


@pytest.mark.parametrize("options", [{"servers": 3}, {"servers": 1}, {"replicas": 3, "servers": 3},
                                     {"servers": 2, "aggregate": 2}])  # fmt: skip
def test_what_cannot_be_is_refused(options: dict[str, int]) -> None:
    with pytest.raises(UserError, match="replicas="):
        Rules(**{"workers": 2, "replicas": 2, **options})  # type: ignore[arg-type]
