"""Links to real servers in threads of the test: what is said is heard once, or an error tells."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import resource
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from spartito.cluster.endpoints import Endpoint
from spartito.collectives.shared_memory import host_key, supported
from spartito.collectives.sockets import listen
from spartito.collectives.versions import Versions
from spartito.errors import SpartitoError, TaskLostError, UserError
from spartito.ps.client.control import Control
from spartito.ps.client.link import BREAKS, Address, Link, Restarted
from spartito.ps.client.servers import Servers
from spartito.ps.client.vector import Copies, Vector
from spartito.ps.protocol.layout import LINE, Span, cut
from spartito.ps.protocol.memory import allocate, areas
from spartito.ps.protocol.messages import (
    PURPOSE,
    Hello,
    Lost,
    Outcome,
    Pull,
    Push,
    Status,
    Values,
    Welcome,
)
from spartito.ps.protocol.options import settings
from spartito.ps.protocol.rules import Rules
from spartito.ps.protocol.slots import State, is_elementwise
from spartito.ps.protocol.timetable import Timetable
from spartito.ps.protocol.wire import Wire
from spartito.ps.server.server import Server
from spartito.ps.server.shard import Shard
from spartito.ps.server.snapshot import Snapshot
from spartito.ps.server.store import Store
from tests.callers import accept as reply
from tests.ps.coordination import eventually
from tests.skips import skip_if

HOST = "127.0.0.1"
LIMIT = 30.0  # seconds that no passing test comes near
SHORT = 0.3  # seconds after which a silent server is given up
WAYS = [
    pytest.param({"shares": False}, id="tcp"),
    pytest.param(
        {"shares": True},
        id="memory",
        marks=skip_if(not supported(), "memory", "this system shares none"),
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
            Copies(self.vector, span, memory).store()
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


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    made: list[Job] = []

    def start(count: int = 1, rules: Rules | None = None, **options: Any) -> Job:
        made.append(Job(tmp_path, count, rules or Rules(2), **options))
        return made[-1]

    yield start
    for one in made:
        one.close()


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


# Values and gradients


@given(st.integers(0, 300), st.integers(1, 5000))
def test_the_two_areas_of_a_segment_lie_apart_and_within_it(start: int, lines: int) -> None:
    span = Span(8 * start, 8 * start + 8 * lines)
    push_at, pull_at, size = areas(span)
    assert push_at % LINE == pull_at % LINE == span.phase
    assert push_at + span.size <= pull_at
    assert pull_at + span.size <= size


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [SGD, Adam])
@pytest.mark.parametrize(("count", "rules"), [(1, Rules(2)), (3, Rules(2)), (3, Rules(2, 1))])
def test_training_over_links_is_training(
    job: Start, way: dict[str, Any], kind: type[Optimizer], count: int, rules: Rules
) -> None:
    run = job(count, rules, kind=kind, **way)
    control = run.control()
    servers, model, vector = run.worker()
    assert [link.shared for link in servers.links] == [way["shares"]] * count
    expected = deepcopy(run.model)
    optimizer = make(expected, kind)
    with torch.no_grad():
        for tensor in vector.tensors:
            tensor.zero_()
    servers.pull(admit=True)
    assert_close(model, expected)
    for step in range(4):
        compute([model, expected], step)
        absent, finite = servers.fill()
        assert finite
        servers.push(push(step), absent)
        replies = servers.replies()
        optimizer.step()
        assert_close(model, expected)
        assert {reply.outcome for reply in replies} == {Outcome.APPLIED}
        assert servers.progress.version == step + 1
    servers.release()
    size = sum(span.size for span in run.spans)
    assert 4 * size <= sum(link.sent for link in servers.links) <= 4 * size + 20_000
    states = control.states()
    for span, (values, state, _) in zip(run.spans, states, strict=True):
        Copies(run.vector, span, values).load()
        assert bool(state) == (kind is Adam)
    assert_close(run.model, expected)
    servers.close()
    servers.close()


UNKNOWN = 777  # elements of a parameter that the optimizer is not given


class Picky(Adam):
    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__([p for p in parameters if p.numel() != UNKNOWN], lr=lr)


def frozen() -> nn.Module:
    """A large part that learns nothing, a small one that does, and one that nobody steps."""
    torch.manual_seed(5)
    parts = {
        "back": nn.Linear(30, 20_000 // 30),
        "norm": nn.BatchNorm1d(20_000 // 30),
        "head": nn.Linear(20_000 // 30, 2),
    }
    model = nn.Sequential(*parts.values()).double()
    model.register_parameter("average", nn.Parameter(torch.ones(UNKNOWN, dtype=torch.float64)))
    model[0].requires_grad_(False)
    return model


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("rules", [Rules(1), Rules(1, 0)])
@pytest.mark.parametrize("kind", [Adam, Picky])
def test_what_is_frozen_does_not_travel(
    job: Start, way: dict[str, Any], count: int, rules: Rules, kind: type[Optimizer]
) -> None:
    """Until it changes: by being unfrozen, by the user's own hand, by a checkpoint."""
    run = job(count, rules, kind=kind, build=frozen, **way)
    control = run.control()
    servers, model, vector = run.worker()
    expected = frozen()
    stepped = make(expected, run.kind)
    with torch.no_grad():
        for tensor in vector.tensors:
            tensor.zero_()
    servers.pull(admit=True)
    assert_close(model, expected, 0.0)

    def moved() -> int:
        return sum(link.sent + link.received for link in servers.links)

    def train(steps: range) -> int:
        before = moved()
        for step in steps:
            compute([model, expected], step)
            absent, finite = servers.fill()
            assert finite
            more = {"group": step + 1, "index": 0, "parties": 1} if rules.together else {}
            exchange(servers, push(step, **more), absent)
            stepped.step()
            assert_close(model, expected)
        return moved() - before

    whole = 2 * sum(span.size for span in run.spans)
    assert train(range(5)) < 5 * whole / 4
    model[0].requires_grad_(True)  # type: ignore[index]
    expected[0].requires_grad_(True)  # type: ignore[index]
    assert train(range(5, 8)) > 3 * whole / 2
    with torch.no_grad():
        for twin in (model, expected) if kind is Picky else ():
            twin.average.mul_(0.5)  # type: ignore[operator]
    train(range(8, 9))
    for span, (values, *_) in zip(run.spans, control.states(), strict=True):
        Copies(run.vector, span, values).load()
    assert_close(run.model, expected)
    other = frozen()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1)
    loaded = [allocate(span) for span in run.spans]
    for span, memory in zip(run.spans, loaded, strict=True):
        Copies(Vector(other, make(other, run.kind)), span, memory).store()
    control.load("job", loaded, [{} for _ in loaded], settings(run.optimizer))
    servers.pull(admit=True)
    assert_close(model, other, 0.0)


class Crowded(SGD):
    """As many groups as a large model has parameters."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr=lr)
        for _ in range(3000):
            self.add_param_group({"params": []})


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_thousands_of_groups_and_passes_fit_into_a_message(job: Start, way: dict[str, Any]) -> None:
    run = job(kind=Crowded, **way)
    control = run.control()
    servers, model, _ = run.worker()
    servers.pull(admit=True)
    control.schedule(Timetable(0, [settings(make(model, Crowded))]))
    for step in range(9000):
        compute([model], 0) if not step else None
        absent, _ = servers.fill()
        key = (1, step, 0, 0)  # a pass of one work item
        exchange(servers, push(0, keys=[key], dropped=step > 0), absent)
    assert len(control.applied(0, 2)) == 9000
    assert len(control.states()) == 1


def test_half_the_bytes_arrive_nearly_right(job: Start) -> None:
    run = job(2, wire_dtype="bfloat16")
    run.control()
    servers, model, _ = run.worker()
    expected = deepcopy(run.model)
    servers.pull(admit=True)
    assert_close(model, expected, 2**-8)
    compute([model], 0)
    absent, _ = servers.fill()
    servers.push(push(0), absent)
    servers.replies()
    size = sum(span.size for span in run.spans)
    assert sum(link.sent for link in servers.links) < 0.3 * size + 10_000  # of doubles


@pytest.mark.parametrize("way", WAYS)
def test_a_state_that_was_given_comes_back(job: Start, way: dict[str, Any]) -> None:
    run = job(2, kind=Adam, **way)
    control = run.control()
    values: list[Tensor] = []
    states: list[State] = []
    for number, server in enumerate(run.servers):
        memory = allocate(run.spans[number])
        Copies(run.vector, run.spans[number], memory).store()
        values.append(memory)
        states.append({})
        for slot, cut_run in enumerate(server.store.shard.slots):
            size = (cut_run.stop - cut_run.start) // 8
            states[-1][slot, "exp_avg"] = torch.rand(size, dtype=torch.float64)
            states[-1][slot, "exp_avg_sq"] = torch.rand(size, dtype=torch.float64)
            states[-1][slot, "step"] = torch.tensor(7.0)
    control.load("job", values, states, settings(run.optimizer))
    for before, own, (after, found, _) in zip(values, states, control.states(), strict=True):
        assert torch.equal(before, after)
        assert found.keys() == own.keys()
        assert all(torch.equal(found[target], value) for target, value in own.items())


# Broken connections


@pytest.mark.parametrize("way", WAYS)
def test_a_push_whose_reply_is_lost_is_applied_once(job: Start, way: dict[str, Any]) -> None:
    run = job(**way)
    run.control()
    servers, model, _ = run.worker()
    servers.pull(admit=True)
    incarnation = servers.links[0].incarnation
    expected = deepcopy(model)
    optimizer = make(expected)
    compute([model, expected], 0)
    absent, _ = servers.fill()
    servers.push(push(0), absent)
    store = run.servers[0].store
    with store.lock:
        assert wait_for_push(store)
    assert servers.links[0]._wire is not None
    servers.links[0]._wire.close()
    (reply,) = servers.replies()
    optimizer.step()
    assert reply.outcome is Outcome.DUPLICATE
    assert (store.version, store.duplicates) == (1, 1)
    assert servers.links[0].incarnation == incarnation
    assert_close(model, expected)


def wait_for_push(store: Store) -> bool:
    """Whether a push was applied; `lock` is held, and given up meanwhile."""
    for _ in range(int(LIMIT / 0.01)):
        if store.pushes:
            return True
        store.lock.wait(0.01)
    return False


@pytest.mark.parametrize("way", WAYS)
def test_a_server_that_closes_connections_is_asked_again(job: Start, way: dict[str, Any]) -> None:
    run = job(2, **way)
    control = run.control()
    servers, model, _ = run.worker()
    servers.pull(admit=True)
    expected = deepcopy(model)
    optimizer = make(expected)
    for step in range(3):
        compute([model, expected], step)
        absent, _ = servers.fill()
        for server in run.servers:
            for connection in list(server._connections):
                connection.close()
        servers.push(push(step), absent)
        replies = servers.replies()
        optimizer.step()
        assert {reply.outcome for reply in replies} <= {Outcome.APPLIED, Outcome.DUPLICATE}
        assert_close(model, expected)
        assert [values.version for values in control.tell(Status())] == [step + 1] * 2


def test_a_server_with_another_life_has_forgotten(job: Start) -> None:
    run = job(2)
    control = run.control()
    servers, model, _ = run.worker()
    servers.pull(admit=True)
    for step in range(2):
        compute([model], step)
        absent, _ = servers.fill()
        servers.push(push(step), absent)
        if step == 0:
            servers.replies()
            run.servers[1].snapshot()
    servers.replies()
    control.lose(Lost(1, 3, 4))
    run.kill(1)
    run.start(1)
    compute([model], 2)
    absent, _ = servers.fill()
    with pytest.raises(Restarted):
        exchange(servers, push(2), absent)
    assert [values.version for values in control.tell(Status())] == [3, 1]
    assert control.restarted == {1}
    applied = control.applied(1, 2)
    assert [(1, 0, step, 0) in applied for step in range(3)] == [True, False, False]
    assert 1 in run.servers[1].store.absent[3]  # it was told of the lost worker again
    servers.pull(admit=True)  # the links stand
    assert servers.links[1].ask(Status()).version == 1
    # What server 0 had brought before the other was found to be another is in the model too.
    for span, (values, *_) in zip(run.spans, control.states(), strict=True):
        Copies(run.vector, span, values).load()
    assert_close(model, run.model, 0.0)


# Refusals


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"digest": "0123"}, "worker 0 has model 0123, ps 0 has [0-9a-f]{16}"),
        ({"rules": "{}"}, r"worker 0 has rules \{\}, ps 0 has"),
        (
            {"versions": Versions("0.0.0", "1.0.0")},
            r"different versions of Spartito: 0.0.0 on worker 0, .* on ps 0",
        ),
        ({"job": "another"}, "is of job another, ps 0 serves job"),
        ({"worker": 7, "task": "worker 7"}, "worker 7 of 2"),
    ],
)
def test_a_task_of_another_kind_is_refused(job: Start, facts: dict[str, Any], message: str) -> None:
    run = job()
    run.control()
    with pytest.raises(UserError, match=message):
        run.link(hello=run.hello(**facts))
    assert isinstance(run.link().ask(Status()), Values)


def test_values_that_nobody_gave_cannot_be_had(job: Start) -> None:
    run = job()
    link = run.link()
    assert not link.ready
    with pytest.raises(SpartitoError, match="ps 0 has no values yet"):
        link.ask(Pull(admit=True))


def test_a_link_that_was_closed_says_so(job: Start) -> None:
    run = job()
    run.control()
    link = run.link()
    link.close()
    with pytest.raises(TaskLostError, match=r"ps 0 \(127.0.0.1:\d+\) was closed already"):
        link.ask(Status())


# Silence


def test_a_server_that_does_not_come_is_named() -> None:
    with socket.socket() as taken:
        taken.bind((HOST, 0))  # nobody listens there
        port = taken.getsockname()[1]
        address = Address.of(3, f"{HOST}:{port}")
        with pytest.raises(TaskLostError, match=rf"ps 3 \({HOST}:{port}\).*within 0.\d+ s"):
            unmet(address)


def test_a_server_that_never_says_welcome_is_named() -> None:
    with socket.create_server((HOST, 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(TaskLostError, match=rf"ps 2 \({HOST}:{port}\) did not reply"):
            unmet(Address.of(2, f"{HOST}:{port}"))


def unmet(address: Address, timeout: float = SHORT) -> Link:
    model = net()
    vector = Vector(model, make(model))
    (span,) = cut(vector.layout, 1, 1, False)
    hello = Hello("worker 0", 0, False, "job", vector.layout.digest, Versions.own(), "{}", "")
    return Link([address], hello, span, vector, None, timeout)


@pytest.mark.parametrize("way", WAYS)
def test_a_server_that_stops_replying_is_named(job: Start, way: dict[str, Any]) -> None:
    run = job(**way)
    run.control()
    link = run.link()
    link._timeout = link._open.timeout = SHORT  # the greeting had time
    with run.servers[0].store.lock, pytest.raises(TaskLostError) as caught:  # it cannot serve
        link.ask(Status())
    assert f"ps 0 ({HOST}:{run.ports[0]}) did not reply within {SHORT} s" in str(caught.value)
    assert "SPARTITO_TIMEOUT" in str(caught.value)


@skip_if(not supported(), "memory", "this system shares none")
def test_a_server_without_a_descriptor_for_a_task_lets_it_in_later(
    job: Start, caplog: pytest.LogCaptureFixture
) -> None:
    run = job(1, Rules(1), shares=True)
    gc.collect()  # what other tests left would be closed in the middle, and free descriptors
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(map(int, os.listdir("/proc/self/fd"))) + 1
    with caplog.at_level(logging.WARNING), ExitStack() as taken:
        taken.callback(resource.setrlimit, resource.RLIMIT_NOFILE, before)
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 8, before[1]))
        with contextlib.suppress(OSError):
            while True:
                taken.callback(os.close, os.dup(0))
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 10, before[1]))  # for both ends of one
        meeting = run.pool.submit(run.link)
        eventually(lambda: "ps 0 cannot let a task in: Too many open files" in caplog.text)
        taken.close()
        assert meeting.result(LIMIT).shared


def test_a_server_that_always_closes_is_named() -> None:
    with socket.create_server((HOST, 0)) as listener, ThreadPoolExecutor(1) as pool:
        listener.settimeout(LIMIT)

        def greet_only() -> None:
            for _ in range(BREAKS + 1):
                wire = Wire(reply(listener, PURPOSE), Hello, timeout=LIMIT)
                wire.receive()
                wire.send(Welcome(True, "first"))
                wire.close()

        greeting = pool.submit(greet_only)
        address = Address.of(1, f"{HOST}:{listener.getsockname()[1]}")
        link = unmet(address, LIMIT)
        with pytest.raises(TaskLostError, match=r"ps 1 .* broke the connection 6 times in a row"):
            link.ask(Status())
        greeting.result(LIMIT)
        link.close()
