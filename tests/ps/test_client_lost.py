"""Links whose connections break, whose server is another, or silent."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import resource
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from copy import deepcopy
from typing import Any

import pytest

from spartito.collectives.membership.versions import Versions
from spartito.errors import SpartitoError, TaskLostError, UserError
from spartito.ps.client.link import BREAKS, Address, Link, Restarted
from spartito.ps.client.vector import SpanCopies, Vector
from spartito.ps.protocol.layout import cut
from spartito.ps.protocol.messages import (
    PURPOSE,
    Hello,
    Lost,
    Outcome,
    Pull,
    Status,
    Values,
    Welcome,
)
from spartito.ps.protocol.rules import Rules
from spartito.ps.server.store import Store
from spartito.wire.frames import Wire
from tests.callers import accept as reply
from tests.ps.coordination import eventually
from tests.ps.served import (
    HOST,
    LIMIT,
    SHORT,
    WAYS,
    Start,
    assert_close,
    compute,
    exchange,
    make,
    net,
    push,
)
from tests.skips import shares_memory

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
        SpanCopies(run.vector, span, values).load()
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


@shares_memory
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
