"""A live server hears anything at all: it replies or closes, and serves the next client."""

from __future__ import annotations

import contextlib
import logging
import random
import socket
import tracemalloc
from collections.abc import Iterator
from typing import Any, get_args

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import inspect
from msgspec.structs import replace

from spartito.collectives.membership.versions import Versions
from spartito.notes import RareWarnings
from spartito.ps.protocol import work
from spartito.ps.protocol.fields import MOST
from spartito.ps.protocol.memory import allocate
from spartito.ps.protocol.messages import (
    Done,
    End,
    Fence,
    Flush,
    GetApplied,
    GetState,
    Load,
    LoadState,
    Lost,
    Pull,
    Refused,
    Release,
    Reply,
    Request,
    Schedule,
    Status,
    Values,
    Welcome,
)
from spartito.ps.protocol.rules import Rules
from spartito.ps.server.norms import KNOWN
from spartito.system import host_key
from tests.ps.live import JOB, Live, frame, hear, push_of, reply_or_close
from tests.skips import shares_memory


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    found = Live(tmp_path_factory.mktemp("server"), Rules(2))
    yield found
    found.close()


@pytest.fixture
def steps(live: Live) -> Iterator[None]:
    """After the test the server serves a proper client."""
    yield
    live.serves(live.store.work_items)


@settings(max_examples=40, suppress_health_check=list(HealthCheck))
@given(data=st.binary(max_size=300), proper=st.booleans())
def test_any_bytes(live: Live, data: bytes, proper: bool) -> None:
    hear(live, (b"SPTO\x01" if proper else b"") + data)


def test_it_serves_after_any_bytes(live: Live, steps: None) -> None:
    generator = random.Random(5)
    for size in (1, 31, 32, 33, 5000):
        hear(live, generator.randbytes(size))


@pytest.mark.parametrize("cut_off", [0, 1, 8, 31, 32, 40])
def test_truncated_frames(live: Live, steps: None, cut_off: int) -> None:
    hear(live, frame(live.hello)[:cut_off])


@pytest.mark.parametrize(
    "facts",
    [{"version": 1}, {"version": 0}, {"flags": 2}, {"header": (1 << 32) - 1}, {"size": 1 << 62},
     {"size": 1 << 40, "header": 0}, {"sum": 7, "size": 8}],
)  # fmt: skip
def test_wrong_versions_and_huge_lengths(live: Live, steps: None, facts: dict[str, int]) -> None:
    hear(live, frame(live.hello, **facts))
    in_job = live.wire(live.hello)
    in_job._sock.sendall(frame(Pull(False), **facts))
    if facts != {"sum": 7, "size": 8}:  # that one waits for the eight bytes
        found = reply_or_close(in_job)
        assert found is None or isinstance(found, Refused)
    in_job.close()


@pytest.mark.parametrize(
    "first",
    [push_of(), LoadState(0, "x", "float32", [8]), Load(JOB, [{}], 0), Pull(True), GetState(),
     Status(), End()],
    ids=lambda message: type(message).__name__,
)  # fmt: skip
def test_what_comes_before_a_hello(live: Live, steps: None, first: msgspec.Struct) -> None:
    wire = live.unknown_peer()
    wire.send(first)
    assert isinstance(reply_or_close(wire), Refused)


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"versions": Versions("0.0.1", "1.0.0")}, "0.0.1 on worker 1"),
        ({"digest": "other"}, "has model other"),
        ({"rules": "{}"}, "has rules {}"),
        ({"job": "another"}, "is of job another"),
        ({"worker": 2}, "is worker 2 of 2"),
        ({"worker": -2}, "Expected `int` >= -1"),
        ({"task": "worker 1\nspartito: all is well"}, "matching regex"),
        ({"task": "w" * 201}, "length <= 200"),
        ({"generation": -1}, "Expected `int` >= 0"),
    ],
)
def test_a_hello_that_does_not_fit(
    live: Live, steps: None, facts: dict[str, Any], why: str
) -> None:
    wire = live.unknown_peer()
    wire.send(replace(live.hello, **facts))
    reply = reply_or_close(wire)
    assert isinstance(reply, Refused)
    assert why in reply.why


@pytest.mark.parametrize(
    "message",
    [
        push_of(),  # without its gradients
        push_of(dropped=True, keys=[]),
        push_of(dropped=True, keys=[(1, 0, -1, 0)]),
        push_of(dropped=True, keys=[(1, 0, 0, 2)]),
        push_of(dropped=True, keys=[(1, 0, MOST, 0)]),
        push_of(dropped=True, keys=[(1 << 62, 0, 0, 0)]),
        push_of(dropped=True, absent=[99]),
        push_of(dropped=True, absent=[-1]),
        push_of(dropped=True, weight=float("nan")),
        push_of(dropped=True, weight=-1.0),
        push_of(dropped=True, examples=-5),
        push_of(dropped=True, group=1, parties=2),
        Schedule(),
        Fence({1: 7}),
        push_of(dropped=True, weight=float("inf")),
        push_of(dropped=True, weight=1e300),
        push_of(dropped=True, examples=1 << 40),
        push_of(dropped=True, pulled=-1),
        push_of(dropped=True, pulled=1 << 40),
        push_of(dropped=True, parties=-1),
        Load(JOB, [{}], 0),
        LoadState(0, "momentum_buffer", "float32", [8]),
        Lost(0, 1, 1),
        Flush(),
        GetState(),
        GetApplied(),
        End(),
    ],
    ids=str,
)
def test_what_a_worker_may_not_say(live: Live, steps: None, message: msgspec.Struct) -> None:
    before = live.store.values()
    wire = live.wire(live.hello)
    wire.send(message)
    assert isinstance(reply_or_close(wire), Refused)
    assert live.store.values() == before


def test_every_field_has_a_range() -> None:
    """What a number or a text may be is said where the message is, and held as it is read."""
    settings = {"Load.settings", "Push.settings", "State.settings", "Update.options"}
    free = {
        "Arrival.loss",
        "Reached.sums",
        "Report.sums",
        "Record.figures",
        *settings,
    }  # `Shard.accepts` looks at settings
    for union in (Request, Reply, work.ToCoordinator, work.ToWorker):
        for kind in get_args(union):
            for target, found in fields_of(inspect.type_info(kind), kind.__name__):
                assert target in free or has_range(found), target


def fields_of(info: inspect.Type, target: str) -> Iterator[tuple[str, inspect.Type]]:
    """Every type without parts that a message is made of, and the field where it is."""
    if isinstance(info, inspect.StructType | inspect.DataclassType):
        for field in info.fields:
            yield from fields_of(field.type, f"{info.cls.__name__}.{field.name}")
    elif isinstance(info, inspect.UnionType):
        for part in info.types:
            yield from fields_of(part, target)
    elif isinstance(info, inspect.TupleType):
        for part in info.item_types:
            yield from fields_of(part, target)
    elif isinstance(info, inspect.ListType | inspect.VarTupleType):
        yield from fields_of(info.item_type, target)
    elif isinstance(info, inspect.DictType):
        yield from fields_of(info.key_type, target)
        yield from fields_of(info.value_type, target)
    else:
        yield target, info


def has_range(info: inspect.Type) -> bool:
    if isinstance(info, inspect.IntType | inspect.FloatType):
        return info.ge is not None and (info.lt is not None or info.le is not None)
    if isinstance(info, inspect.StrType | inspect.BytesType):
        return info.max_length is not None
    return isinstance(info, inspect.BoolType | inspect.NoneType | inspect.EnumType)


def test_a_frame_takes_no_more_memory_than_it_is_long(live: Live, steps: None) -> None:
    """One of 200 bytes took 786 MB: bits up to the last work item of six passes."""
    before = live.store.work_items
    keys = [(1, number, MOST // 2 - 1, 1) for number in range(6)]
    wire = live.wire(live.hello)
    tracemalloc.start()
    try:
        wire.send(push_of(dropped=True, keys=keys))
        reply = wire.receive()
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        wire.close()
    assert isinstance(reply, Values)
    assert live.store.work_items == before + 6
    assert most < 1 << 20


def test_a_state_without_an_end(live: Live, steps: None) -> None:
    """As many tensors as one likes: what they take together has a limit."""
    wire = live.wire(replace(live.hello, chief=True))
    wire.send(Load(JOB, [{}], 1 << 20), live.store.shard.values.numpy().data)
    with contextlib.suppress(ConnectionError):
        for number in range(40):
            wire.send(LoadState(0, f"tensor {number}", "uint8", [1 << 18]), bytes(1 << 18))
    assert isinstance(reply_or_close(wire), Refused)


def test_a_gradient_out_of_all_proportion_is_told(
    live: Live, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(KNOWN):
        live.serves(live.store.work_items)
    live.server.seldom = RareWarnings()
    wire = live.wire(live.hello)
    version = live.store.version
    with caplog.at_level(logging.WARNING):
        gradient = torch.full((live.span.size // 4,), 1e6)
        push = push_of(keys=[(2, 0, 0, 1)], pulled=version, norm=float(gradient.norm()))
        wire.send(push, gradient.numpy().data)
        assert isinstance(wire.receive(), Values)
        wire.close()
    assert "ps 0: worker 1 pushed a gradient with a norm of 4e+06; 2 is usual" in caplog.text
    assert live.server.record()["largest_gradient"] == pytest.approx(4e6)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite(live: Live, steps: None, number: float) -> None:
    before = live.store.values()
    wire = live.wire(live.hello)
    gradient = torch.zeros(live.span.size // 4)
    gradient[3] = number
    push = push_of(keys=[(3, 0, 0, 1)], pulled=live.store.version, norm=number)
    wire.send(push, gradient.numpy().data)
    assert isinstance(reply_or_close(wire), Refused)
    assert live.store.values() == before


@pytest.mark.parametrize("size", [1, 8, 31, 33, 4096, 200_000])
def test_gradients_of_another_size(live: Live, steps: None, size: int) -> None:
    before = live.store.values()
    wire = live.wire(live.hello)
    wire.send(push_of(), bytes(size))
    assert isinstance(reply_or_close(wire), Refused)
    wire = live.wire(live.hello)
    wire.send(push_of(dropped=True), bytes(size))
    assert isinstance(reply_or_close(wire), Refused)
    assert live.store.values() == before


@pytest.mark.parametrize(
    ("message", "payload"),
    [
        (LoadState(0, "x", "float32", [8]), b""),
        (LoadState(0, "x", "float32", [0]), b""),
        (LoadState(0, "x", "float32", [-1, -8]), bytes(32)),
        (LoadState(9, "x", "float32", [8]), bytes(32)),
        (LoadState(-1, "x", "float32", [8]), bytes(32)),
        (LoadState(0, "x", "Tensor", [8]), bytes(32)),
        (LoadState(0, "x", "float32", [8]), bytes(31)),
        (LoadState(0, "x", "float32", []), bytes(8)),
    ],
    ids=str,
)
def test_a_state_that_does_not_fit(
    live: Live, steps: None, message: LoadState, payload: bytes
) -> None:
    wire = live.wire(replace(live.hello, chief=True))
    values = live.store.shard.values.clone()
    wire.send(Load(JOB, [{}], 1), values.numpy().data)
    wire.send(message, payload)
    assert isinstance(reply_or_close(wire), Refused)


@pytest.mark.parametrize(
    "load", [Load(JOB, [{"params": 1}], 0), Load(JOB, [{}, {}], 0)], ids=["params", "groups"]
)
def test_a_load_that_does_not_fit(live: Live, steps: None, load: Load) -> None:
    before = live.store.shard.values.clone()
    wire = live.wire(replace(live.hello, chief=True))
    wire.send(load, allocate(live.span).numpy().data)
    assert isinstance(reply_or_close(wire), Refused)
    wire = live.wire(replace(live.hello, chief=True))
    wire.send(Load(JOB, [{}], 0), b"too short")
    assert isinstance(reply_or_close(wire), Refused)
    assert torch.equal(live.store.shard.values, before)


@pytest.mark.parametrize(
    "timetable",
    [
        b"",
        b"\x00" * 40,
        msgspec.msgpack.encode({"first": -1, "rows": [[{}]]}),
        msgspec.msgpack.encode({"first": 0, "rows": [[{"lr": 0.1}], []]}),
        msgspec.msgpack.encode({"first": 0, "rows": [[{"lr": "fast"}]]}),
        msgspec.msgpack.encode({"first": 1 << 60, "rows": [[{}]]}),
        msgspec.msgpack.encode({"first": 0, "rows": [[{"params": []}]]}),
        msgspec.msgpack.encode({"first": 0, "rows": [[{"lr": []}]]}),
        msgspec.msgpack.encode({"first": 0, "rows": [[{"lr": float("nan")}]]}),
        msgspec.msgpack.encode({"first": 0, "rows": [[{"lr": float("inf")}]]}),
        msgspec.msgpack.encode({"first": 0, "rows": [[{"lr": True}]]}),
        msgspec.msgpack.encode({"first": 0, "rows": [[{"nesterov": True}]]}),
        msgspec.msgpack.encode({"first": 0, "rows": [[{"initial_lr": float("nan")}]]}),
    ],
)
def test_a_timetable_that_does_not_fit(live: Live, steps: None, timetable: bytes) -> None:
    wire = live.wire(replace(live.hello, chief=True))
    wire.send(Schedule(), timetable)
    assert isinstance(reply_or_close(wire), Refused)


def test_a_fence_for_workers_that_are_not_there(live: Live, steps: None) -> None:
    wire = live.wire(replace(live.hello, chief=True))
    wire.send(Fence({2: 1}))
    assert isinstance(reply_or_close(wire), Refused)


def test_a_second_hello_and_a_release(live: Live, steps: None) -> None:
    wire = live.wire(live.hello)
    wire.send(Release())
    assert isinstance(wire.receive(), Done)
    wire.send(live.hello)
    assert isinstance(reply_or_close(wire), Refused)


def test_a_task_that_computes_nothing_pushes_nothing(live: Live, steps: None) -> None:
    wire = live.wire(replace(live.hello, worker=-1))
    wire.send(push_of(dropped=True))
    assert isinstance(reply_or_close(wire), Refused)


@shares_memory
def test_a_worker_that_dies_while_it_is_let_in(live: Live, steps: None) -> None:
    wire = live.unknown_peer()
    wire.send(replace(live.hello, host=host_key()))
    welcome = wire.receive()
    assert isinstance(welcome, Welcome)
    with socket.socket(socket.AF_UNIX) as local:
        local.connect(welcome.socket)
    wire.close()
