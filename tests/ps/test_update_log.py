"""A log of updates, made again from nothing, gives the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer, RMSprop

from spartito.ps.client.vector import SpanCopies, Vector
from spartito.ps.protocol.layout import Span
from spartito.ps.protocol.memory import allocate
from spartito.ps.protocol.messages import Push
from spartito.ps.protocol.rules import Rules
from spartito.ps.protocol.timetable import Timetable
from spartito.ps.server.shard import Shard
from spartito.ps.server.store import Store
from spartito.ps.server.update_log import PushLog, entries, replay

Opened = Callable[[], PushLog]
KINDS = pytest.mark.parametrize("kind", [SGD, Adam, RMSprop])


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(20, 9), nn.BatchNorm1d(9), nn.Linear(9, 3))


def shard_of(model: nn.Module, kind: type[Optimizer]) -> tuple[Shard, Vector]:
    options: dict[str, Any] = {"momentum": 0.9} if kind is not Adam else {}
    model = deepcopy(model)
    options["lr"] = 0.1
    optimizer = kind(model.parameters(), **options)
    vector = Vector(model, optimizer)
    shard = Shard(vector.layout, Span(0, vector.layout.size), optimizer, vector.tensors)
    SpanCopies(vector, shard.span, shard.values).store()
    return shard, vector


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opened]:
    """Opens the log of the test, as often as wanted."""
    with ExitStack() as stack:

        def make() -> PushLog:
            log = PushLog(tmp_path / "deep" / "ps-0.log")
            stack.callback(log.close)
            return log

        yield make


def gradient(vector: Vector, span: Span, seed: int) -> tuple[torch.Tensor, list[int]]:
    dice, memory = torch.Generator().manual_seed(seed), allocate(span)
    for number, tensor in enumerate(vector.tensors):
        if tensor.requires_grad:
            tensor.grad = None if number == seed % 4 else torch.randn(tensor.shape, generator=dice)
    return memory, SpanCopies(vector, span, memory).store_gradients()


def same_state(one: Shard, other: Shard) -> bool:
    a, b = one.state(), other.state()
    return a.keys() == b.keys() and all(torch.equal(a[target], b[target]) for target in a)


@KINDS
@pytest.mark.parametrize("rules", [Rules(2), Rules(2, 1, "scale"), Rules(2, aggregate=2)])
def test_a_replay_gives_the_same_bits(
    kind: type[Optimizer], rules: Rules, opened: Opened, tmp_path: Path
) -> None:
    (shard, vector), (again, _) = shard_of(net(), kind), shard_of(net(), kind)
    store = Store(shard, rules, gates=False, log=opened())
    store.schedule(Timetable(1, [[{"lr": 0.1 / (1 + step)}] for step in range(3)]))
    for step in range(9):
        memory, absent = gradient(vector, shard.span, step)
        push = Push(
            keys=[(1, 0, step, 0)], pulled=max(0, store.version - step % 4), weight=1.0 + step,
            examples=4, absent=absent, dropped=step == 5,
        )  # fmt: skip
        with store.lock:
            store.push(0, push, memory)
    with store.lock:
        store.flush()
    assert store.version == 8 // rules.aggregate
    assert not torch.equal(shard.values, again.values)
    assert replay(tmp_path / "deep" / "ps-0.log", again) == store.version
    assert torch.equal(shard.values, again.values)
    assert same_state(shard, again)


@KINDS
def test_what_a_snapshot_lacks_is_cut_off(
    kind: type[Optimizer], opened: Opened, tmp_path: Path
) -> None:
    path = tmp_path / "deep" / "ps-0.log"
    shard, vector = shard_of(net(), kind)
    store = Store(shard, Rules(1), gates=False, log=opened())

    def push(to: Store, step: int) -> None:
        memory, absent = gradient(vector, shard.span, step)
        with to.lock:
            to.push(0, Push([(1, 0, step, 0)], to.version, 1.0, 1, absent), memory)

    for step in range(3):
        push(store, step)
    with store.lock:
        saved = store.dump()
    for step in range(3, 6):
        push(store, step)
    fresh, _ = shard_of(net(), kind)
    restarted = Store(fresh, Rules(1), gates=False, log=opened())
    restarted.restore(*saved)
    assert sum(1 for _ in entries(path)) == 3
    for step in range(6, 8):
        push(restarted, step)
    again, _ = shard_of(net(), kind)
    assert replay(path, again) == 5
    assert torch.equal(again.values, fresh.values)
    assert same_state(again, fresh)


def test_the_log_of_nothing(opened: Opened, tmp_path: Path) -> None:
    shard, _ = shard_of(net(), SGD)
    assert opened().position == 0
    before = shard.values.clone()
    assert replay(tmp_path / "deep" / "ps-0.log", shard) == 0
    assert torch.equal(before, shard.values)
