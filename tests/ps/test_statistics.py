"""BatchNorm's running statistics stay within what the workers have seen, however stale."""

from __future__ import annotations

from copy import deepcopy
from itertools import product

import pytest
import torch
from torch import nn
from torch.optim import SGD

from spartito.ps.client.vector import SpanCopies, Vector
from spartito.ps.protocol.layout import Span
from spartito.ps.protocol.memory import allocate
from spartito.ps.protocol.messages import Outcome, Push
from spartito.ps.protocol.rules import Rules
from spartito.ps.server.shard import Shard
from spartito.ps.server.store import Store


class Worker:
    """A model of its own, and how it meets the server."""

    def __init__(self, model: nn.Module, store: Store, index: int) -> None:
        self.model, self._store, self._index, self._step = deepcopy(model), store, index, 0
        optimizer = SGD(self.model.parameters(), lr=0.0)
        vector, span = Vector(self.model, optimizer), store.shard.span
        self._in, self._out = allocate(span), allocate(span)
        self._incoming = SpanCopies(vector, span, self._in)
        self._outgoing = SpanCopies(vector, span, self._out)
        self.pull()

    def pull(self) -> None:
        self._in.copy_(self._store.shard.values)
        self._incoming.load()
        self._pulled = self._store.version

    def push(self, rows: torch.Tensor) -> None:
        """What a batch gives, with the statistics after it."""
        self.model.zero_grad()
        self.model(rows).sum().backward()
        absent = self._outgoing.store_gradients() + self._outgoing.store_changes(self._incoming)
        assert self._outgoing.norm() < float("inf")
        push = Push([(1, 0, self._step, self._index)], self._pulled, 1.0, len(rows), absent)
        with self._store.lock:
            assert self._store.push(self._index, push, self._out)[0] == Outcome.APPLIED
        self._step += 1


@pytest.mark.parametrize(("workers", "aggregate"), [(1, 1), (8, 1), (16, 1), (16, 4)])
def test_they_stay_within_what_was_seen_and_settle(workers: int, aggregate: int) -> None:
    """Everybody pulls, and then pushes: one after the other, so stale by up to ``workers`` - 1."""
    torch.manual_seed(0)
    model = nn.BatchNorm1d(3, dtype=torch.float64)
    model.register_buffer("mask", torch.tensor([float("-inf"), torch.finfo(torch.float64).min]))
    optimizer = SGD(model.parameters(), lr=0.0)
    vector = Vector(model, optimizer)
    shard = Shard(vector.layout, Span(0, vector.layout.size), optimizer, vector.tensors)
    served = SpanCopies(vector, shard.span, shard.values)
    served.store()
    store = Store(shard, Rules(workers, aggregate=aggregate), gates=False, log=None)
    crowd = [Worker(model, store, index) for index in range(workers)]
    low = [torch.zeros(3), torch.ones(3)]
    high = [torch.zeros(3), torch.ones(3)]
    mask = model.get_buffer("mask").clone()
    for _ in range(60):
        for worker in crowd:
            worker.pull()
        for worker in crowd:
            rows = 5 + torch.randn(32, 3, dtype=torch.float64) * (0.5 + torch.rand(3))
            for bound, pick in ((low, torch.minimum), (high, torch.maximum)):
                bound[0] = pick(bound[0].double(), rows.mean(0))
                bound[1] = pick(bound[1].double(), rows.var(0))
            worker.push(rows)
            served.load()
            for number, name in enumerate(("running_mean", "running_var")):
                value = model.get_buffer(name)
                assert bool((low[number] <= value).all()), (name, value)
                assert bool((value <= high[number]).all()), (name, value)
            assert torch.equal(model.get_buffer("mask"), mask)
    torch.testing.assert_close(model.running_mean, torch.full((3,), 5.0).double(), atol=0.3, rtol=0)
    assert model.num_batches_tracked == 60 * workers // aggregate


def test_one_worker_has_the_statistics_that_torch_has() -> None:
    model = nn.BatchNorm1d(3)
    alone = deepcopy(model)
    optimizer = SGD(model.parameters(), lr=0.0)
    vector = Vector(model, optimizer)
    shard = Shard(vector.layout, Span(0, vector.layout.size), optimizer, vector.tensors)
    served = SpanCopies(vector, shard.span, shard.values)
    served.store()
    worker = Worker(model, Store(shard, Rules(1), gates=False, log=None), 0)
    for _ in range(20):
        rows = torch.randn(16, 3)
        worker.pull()
        worker.push(rows)
        alone(rows)
    served.load()
    assert all(torch.equal(b, alone.get_buffer(name)) for name, b in model.named_buffers())


@pytest.mark.parametrize("changed", list(product([False, True], repeat=3)))
def test_a_mean_with_what_stayed_the_same(changed: tuple[bool, ...]) -> None:
    """A push without a run counts as one that has the server's own values there."""
    model = nn.ParameterDict({"weight": nn.Parameter(torch.ones(4))})
    model.register_buffer("mean", torch.full((5,), 2.0))
    model.register_buffer("count", torch.tensor(7))
    optimizer = SGD([model["weight"]], lr=1.0)
    vector = Vector(model, optimizer)
    shard = Shard(vector.layout, Span(0, vector.layout.size), optimizer, vector.tensors)
    SpanCopies(vector, shard.span, shard.values).store()
    old = allocate(shard.span).copy_(shard.values)
    before = SpanCopies(vector, shard.span, old)
    rules = Rules(3, aggregate=3)
    store = Store(shard, rules, gates=False, log=None)
    for worker, changes in enumerate(changed):
        before.load()
        model["weight"].grad = torch.full((4,), float(worker))
        model.get_buffer("mean").add_(3.0 * worker if changes else 0.0)
        model.get_buffer("count").add_(3 if changes else 0)
        memory = allocate(shard.span).fill_(255)  # nothing may be read where nothing is stored
        copies = SpanCopies(vector, shard.span, memory)
        absent = copies.store_gradients() + copies.store_changes(before)
        push = Push([(1, 0, worker, 0)], 0, 1.0, 1, absent)
        with store.lock:
            assert store.push(worker, push, memory)[0] == Outcome.APPLIED
    SpanCopies(vector, shard.span, shard.values).load()
    assert model["weight"].tolist() == [0.0] * 4
    moved = sum(worker * changes for worker, changes in enumerate(changed))
    assert model.get_buffer("mean").tolist() == pytest.approx([2.0 + moved] * 5)
    assert model.get_buffer("count").item() == 7 + sum(changed)
