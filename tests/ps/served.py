"""Servers and clients of a job in this process, for tests of links."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import nn
from torch.optim import SGD, Optimizer

from spartito.collectives.membership.versions import Versions
from spartito.errors import SpartitoError
from spartito.ps.client.control import Control
from spartito.ps.client.link import Address, Link
from spartito.ps.client.servers import Servers
from spartito.ps.client.vector import SpanCopies, Vector
from spartito.ps.protocol.layout import cut
from spartito.ps.protocol.memory import allocate
from spartito.ps.protocol.messages import (
    Hello,
    Push,
    Values,
)
from spartito.ps.protocol.options import settings
from spartito.ps.protocol.rules import Rules
from spartito.ps.protocol.slots import State, is_elementwise
from spartito.ps.server.server import Server
from spartito.ps.server.shard import Shard
from spartito.ps.server.snapshot import Snapshot
from spartito.ps.server.store import Store
from spartito.system import host_key
from spartito.wire.addresses import Endpoint
from spartito.wire.listening import listen
from tests.skips import shares_memory

HOST = "127.0.0.1"
LIMIT = 30.0  # seconds that no passing test comes near
SHORT = 0.3  # seconds after which a silent server is given up
WAYS = [
    pytest.param({"shares": False}, id="tcp"),
    pytest.param(
        {"shares": True},
        id="memory",
        marks=shares_memory,
    ),
]


def net() -> nn.Module:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(30, 20), nn.BatchNorm1d(20), nn.Linear(20, 4))
    return model.double()


def make(model: nn.Module, kind: type[Optimizer] = SGD) -> Optimizer:
    options: dict[str, Any] = {"lr": 0.1}
    return kind(model.parameters(), **options)


class Job:
    """Servers that share a model, each in a thread, and links to them."""

    def __init__(
        self, folder: Path, count: int, rules: Rules, *, shares: bool = False,
        kind: type[Optimizer] = SGD, wire_dtype: str | None = None,
        build: Callable[[], nn.Module] = net,
    ) -> None:  # fmt: skip
        self.folder, self.rules, self.shares, self.kind = folder, rules, shares, kind
        self.wire_dtype, self.build = wire_dtype, build
        self.model = build()
        self.optimizer = make(self.model, kind)
        self.vector = Vector(self.model, self.optimizer)
        self.spans = cut(self.vector.layout, count, 1, not is_elementwise(self.optimizer))
        self.ends = ExitStack()
        self.pool = self.ends.enter_context(ThreadPoolExecutor(8))
        self.servers: list[Server] = []
        self.serving: list[Future[None]] = []
        self.ports = [0] * count
        for number in range(count):
            self.start(number)

    def start(self, number: int) -> Server:
        """Server ``number``, at the port that it had before."""
        model = self.build()
        optimizer = make(model, self.kind)
        vector = Vector(model, optimizer)
        shard = Shard(vector.layout, self.spans[number], optimizer, vector.tensors)
        listener = listen(Endpoint("ps", HOST, (self.ports[number],)), LIMIT)
        self.ports[number] = listener.getsockname()[1]
        server = Server(
            Store(shard, self.rules, gates=number == 0, log=None),
            listener,
            name=f"ps {number}",
            chief="chief 0",
            wire_dtype=self.wire_dtype,
            timeout=LIMIT,
            snapshot=Snapshot(self.folder / f"ps-{number}", f"ps {number}"),
            seconds=1000.0,
            shares=self.shares,
        )
        self.servers[number:] = [server, *self.servers[number + 1 :]]
        self.serving[number:] = [self.pool.submit(server.serve), *self.serving[number + 1 :]]
        return server

    def kill(self, number: int) -> None:
        """End a server as if its process died: its snapshot stays."""
        self.servers[number].fail(SpartitoError("killed"))
        with pytest.raises(SpartitoError, match="killed"):
            self.serving[number].result(LIMIT)

    def hello(self, worker: int = 0, chief: bool = False, **facts: Any) -> Hello:
        given = Hello(
            task="chief 0" if chief else f"worker {worker}",
            worker=worker,
            chief=chief,
            job="job",
            digest=self.vector.layout.digest,
            versions=Versions.own(),
            rules=str(self.rules),
            host=host_key() if self.shares and not chief else "",
        )
        return replace(given, **facts)

    def link(
        self, number: int = 0, hello: Hello | None = None, vector: Vector | None = None,
        timeout: float = LIMIT,
    ) -> Link:  # fmt: skip
        link = Link(
            [Address.of(number, f"{HOST}:{self.ports[number]}")], hello or self.hello(),
            self.spans[number], vector or self.vector, self.wire_dtype, timeout,
        )  # fmt: skip
        self.ends.callback(link.close)
        return link

    def control(self) -> Control:
        """The chief, which gives the servers their values."""
        links = [self.link(n, self.hello(chief=True)) for n in range(len(self.spans))]
        control = Control(links)
        values, states = [], list[State]()
        for span in self.spans:
            memory = allocate(span)
            SpanCopies(self.vector, span, memory).store()
            values.append(memory)
            states.append({})
        control.load("job", values, states, settings(self.optimizer))
        return control

    def worker(self, number: int = 0) -> tuple[Servers, nn.Module, Vector]:
        """A worker with a model of its own."""
        model = self.build()
        vector = Vector(model, make(model, self.kind))
        links = [self.link(n, self.hello(number), vector) for n in range(len(self.spans))]
        return Servers(links, vector, self.rules.waits), model, vector

    def close(self) -> None:
        for server in self.servers:
            server.end()
        self.ends.close()


Start = Callable[..., Job]


def push(step: int, **facts: Any) -> Push:
    given: dict[str, Any] = {
        "keys": [(1, 0, step, 0)], "pulled": 0, "weight": 1.0, "examples": 4,
        "absent": [],
    }  # fmt: skip
    return Push(**(given | facts))


def exchange(servers: Servers, push: Push, absent: list[list[int]]) -> list[Values]:
    servers.push(push, absent)
    return servers.replies()


def compute(models: list[nn.Module], step: int) -> None:
    """The same gradients on all of them, and new statistics."""
    for model in models:
        dice = torch.Generator().manual_seed(step)
        model.zero_grad()
        rows = torch.randn(16, 30, generator=dice, dtype=torch.float64)
        model(rows).square().mean().backward()


def assert_close(one: nn.Module, other: nn.Module, buffer: float = 1e-12) -> None:
    for name, tensor in one.state_dict().items():
        twin = other.state_dict()[name]
        assert torch.allclose(tensor.double(), twin.double(), rtol=buffer, atol=buffer), name
