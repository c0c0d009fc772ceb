"""Servers of a test's own: replies that nobody reads, and an optimizer that fails."""

from __future__ import annotations

import contextlib
import select
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from msgspec.structs import replace
from torch import nn

from spartito.collectives.membership.versions import Versions
from spartito.ps.client.vector import Vector
from spartito.ps.protocol.layout import cut
from spartito.ps.protocol.memory import allocate
from spartito.ps.protocol.messages import (
    PURPOSE,
    Done,
    GetState,
    Hello,
    Load,
    Pull,
    Refused,
    Reply,
    Status,
    Welcome,
)
from spartito.ps.protocol.rules import Rules
from spartito.ps.server.server import Server
from spartito.ps.server.shard import Shard
from spartito.ps.server.snapshot import Snapshot
from spartito.ps.server.store import Store
from spartito.wire.addresses import DRAWN, Endpoint
from spartito.wire.frames import Wire
from spartito.wire.listening import listen
from tests.callers import call, read_to_end
from tests.ps.live import HOST, JOB, LIMIT, Live, push_of, reply_or_close

LARGE = (1500, 1500)  # 9 MB: more than the buffers of a connection hold


@pytest.mark.parametrize(
    ("chief", "message"), [(True, GetState()), (False, Pull(admit=True))], ids=["state", "values"]
)
def test_who_reads_no_reply_keeps_nobody_waiting(
    chief: bool, message: msgspec.Struct, tmp_path: Path
) -> None:
    live = Live(tmp_path, Rules(2), LARGE)
    hello = replace(live.hello, task="worker 0", worker=0, chief=chief)
    with contextlib.closing(live), live.deaf(hello, message) as deaf:
        assert select.select([deaf], [], [], LIMIT)[0]  # the reply has begun
        for step in range(2):
            live.serves(step)
        assert live.store.version == 2


def test_a_reply_that_nobody_reads_ends(tmp_path: Path) -> None:
    live = Live(tmp_path, Rules(2), LARGE, timeout=2.0)
    with contextlib.closing(live), live.deaf(live.hello, Pull(admit=True)) as deaf:
        end = time.monotonic() + LIMIT
        while len(live.server._connections) > 1:
            live.chief.send(Status())  # the chief is heard of
            live.chief.receive()
            assert time.monotonic() < end, "the server waits for a reader"
            time.sleep(0.05)
        assert read_to_end(deaf)  # what had been sent, and then the end
        live.serves(0)


class Breaking(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        raise RuntimeError("the optimizer is broken")


def test_an_optimizer_that_fails_ends_the_server_and_is_told(tmp_path: Path) -> None:
    net = nn.Linear(2, 2)
    optimizer = Breaking(net.parameters(), 0.1)
    vector = Vector(net, optimizer)
    (span,) = cut(vector.layout, 1, 16, True)
    rules = Rules(1)
    store = Store(
        Shard(vector.layout, span, optimizer, vector.tensors), rules, gates=True, log=None
    )
    listener = listen(Endpoint("ps 0", HOST, (DRAWN,)), 30.0)
    port = listener.getsockname()[1]
    server = Server(
        store, listener, name="ps 0", chief="worker 0", wire_dtype=None, timeout=60,
        snapshot=Snapshot(tmp_path / "ps-0.safetensors", "ps 0"), seconds=1000,
    )  # fmt: skip
    raised: list[BaseException] = []

    def serve() -> None:
        try:
            server.serve()
        except RuntimeError as error:
            raised.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    wire = Wire(call(port, PURPOSE), Reply, timeout=LIMIT)
    wire.send(Hello("worker 0", 0, True, JOB, vector.layout.digest, Versions.own(), str(rules), ""))
    assert isinstance(wire.receive(), Welcome)
    wire.send(Load(JOB, [{}], 0), allocate(span).numpy().data)
    assert isinstance(wire.receive(), Done)
    wire.send(push_of(keys=[(1, 0, 0, 0)]), allocate(span).numpy().data)
    reply = reply_or_close(wire)
    thread.join(LIMIT)
    assert isinstance(reply, Refused)
    assert "the optimizer is broken" in reply.why
    assert [str(error) for error in raised] == ["the optimizer is broken"]
