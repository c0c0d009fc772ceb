"""Shards of optimizers that look at whole tensors; rates, means, clipping and settings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import (
    SGD,
    Adafactor,
    Adagrad,
    Adam,
    AdamW,
    Optimizer,
)

from spartito.ps.client.vector import SpanCopies, Vector
from spartito.ps.protocol.layout import Span, cut
from spartito.ps.protocol.memory import allocate
from spartito.ps.protocol.options import settings as options_of
from spartito.ps.protocol.slots import (
    slots,
)
from spartito.ps.server.shard import Shard
from tests.ps.test_shard import Net, Servers, assert_equal, give, make


class Norms(Optimizer):
    """Moves a tensor by its normed gradient, row by row: it has to see whole tensors."""

    def __init__(self, groups: Any, lr: float) -> None:
        super().__init__(groups, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["times"] = state.get("times", 0) + 1
                    state["sum"] = state.get("sum", torch.zeros_like(p)) + p.grad
                    rows = p.reshape(p.shape[0], -1).norm(dim=1) if p.dim() else p.norm()
                    rows = rows.view(-1, *[1] * (p.dim() - 1)) if p.dim() else rows
                    p.sub_(group["lr"] * rows * state["sum"] / p.grad.norm() / state["times"])


@pytest.mark.parametrize("count", [1, 3])
def test_an_unknown_optimizer_sees_whole_tensors_in_their_own_order(count: int) -> None:
    net, own = Net(), Net()
    net.e.data, own.e.data = net.e.data.t(), own.e.data.t()
    servers, expected = Servers(net, make(Norms, net), count), make(Norms, own)
    assert all(len(run.parts) == 1 for shard in servers.shards for run in shard.slots)
    for step in range(3):
        give([net, own], step, ())
        servers.push()
        expected.step()
        servers.pull()
        assert_equal(net, own)
    plain = make(Norms, net)
    servers.state_into(plain, list(servers.vector.tensors))
    named = dict(own.named_parameters())
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(
            plain.state[parameter]["sum"], expected.state[named[name]]["sum"]
        )
        assert int(plain.state[parameter]["times"]) == 3


def test_state_of_another_shape_than_its_parameter_is_taken_back() -> None:
    net, own = Net(), Net()
    servers, expected = Servers(net, make(Adafactor, net), 2), make(Adafactor, own)
    for step in range(4):
        give([net, own], step, ())
        servers.push()
        expected.step()
        for shard in servers.shards:
            shard.load_state({target: value.clone() for target, value in shard.state().items()})
    servers.pull()
    assert_equal(net, own)


def test_a_fresh_adagrad_begins_with_its_initial_sums() -> None:
    net = Net()
    for shard in Servers(net, make(Adagrad, net), 3).shards:
        sums = [value for (_, key), value in shard.state().items() if key == "sum"]
        assert sum(value.numel() for value in sums) == sum(
            part.end - part.begin for run in shard.slots for part in run.parts
        )
        assert all(bool((value == 0.3).all()) for value in sums)


@pytest.mark.parametrize("kind", [SGD, Adam, AdamW])
def test_a_rate_scales_this_update_alone(kind: type[Optimizer]) -> None:
    net, own = Net(), Net()
    servers, expected = Servers(net, make(kind, net), 2), make(kind, own)
    for step, rate in enumerate([1.0, 0.25, 1.0, 0.5]):
        give([net, own], step)
        servers.push(rate)
        rates = [group["lr"] for group in expected.param_groups]
        for group in expected.param_groups:
            group["lr"] *= rate
        expected.step()
        for group, lr in zip(expected.param_groups, rates, strict=True):
            group["lr"] = lr
        servers.pull()
        assert_equal(net, own)
    assert [g["lr"] for g in servers.shards[0].optimizer.param_groups] == rates


@settings(max_examples=40)
@given(weights=st.lists(st.sampled_from([0.5, 1.0, 3.0, 7.25]), min_size=1, max_size=4))
def test_a_mean_of_pushes(weights: list[float]) -> None:
    """Gradients by their weights, changes of numbers plainly, of others the last."""
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(50).double())
    model.register_buffer("mean", torch.zeros(6))
    model.register_buffer("seen", torch.tensor(0))
    model.register_buffer("mask", torch.zeros(3, dtype=torch.bool))
    optimizer = SGD([model.weight], lr=1.0)
    vector = Vector(model, optimizer)
    span = Span(0, vector.layout.size)
    before, total = allocate(span), allocate(span)
    zero = SpanCopies(vector, span, before)
    zero.store()
    shard = Shard(vector.layout, span, optimizer, vector.tensors)
    mean = torch.zeros(50).double()
    for number, weight in enumerate(weights):
        push = allocate(span)
        copies = SpanCopies(vector, span, push)
        grad = torch.randn(50, generator=torch.Generator().manual_seed(number)).double()
        model.weight.grad = grad
        mean += weight * grad / sum(weights)
        model.mean.fill_(number)  # type: ignore[operator]
        model.seen.fill_(1)  # type: ignore[operator]
        model.mask.copy_(torch.tensor([True, number % 2 == 0, False]))  # type: ignore[operator]
        copies.store_gradients()
        copies.store_changes(zero)
        shard.mix(total, push, weight, number + 1)
    shard.divide(total, sum(weights), len(weights))
    shard.update(total)
    before.copy_(shard.values)
    zero.load()
    torch.testing.assert_close(model.weight.detach(), -mean, rtol=1e-12, atol=1e-12)
    assert torch.allclose(model.mean, torch.full((6,), (len(weights) - 1) / 2))  # type: ignore[arg-type]
    assert model.seen == 1
    assert model.mask.tolist() == [True, len(weights) % 2 == 1, False]  # type: ignore[operator]


@pytest.mark.parametrize(("norm", "scale"), [(1.0, 0.1), (10.0, 1.0), (100.0, 1.0)])
def test_clipping_bounds_the_whole_gradient(norm: float, scale: float) -> None:
    net = Net()
    (shard,) = Servers(net, make(SGD, net), 1).shards
    net.d.grad = torch.zeros(17).double()
    net.d.grad[:2] = torch.tensor([6.0, -8.0])
    push = allocate(shard.span)
    copies = SpanCopies(Vector(net, make(SGD, net)), shard.span, push)
    copies.store_gradients()
    shard.clip(push, norm)
    copies.load()
    torch.testing.assert_close(
        net.d[:2].detach(), torch.tensor([6.0, -8.0]).double() * scale, rtol=1e-6, atol=0
    )


def test_slots_are_few_unless_tensors_must_stay_whole() -> None:
    net = Net()
    layout = Vector(net, make(SGD, net)).layout
    span = Span(0, layout.size)
    assert [len(run.parts) for run in slots(layout, span, False)] == [2, 3, 1]
    assert [len(run.parts) for run in slots(layout, span, True)] == [1] * 6
    assert sum(run.stop - run.start for run in slots(layout, span, True)) == sum(
        run.stop - run.start for run in slots(layout, span, False)
    )


def test_settings_are_plain_values_and_come_back() -> None:
    net = Net()
    sent = options_of(make(AdamW, net, lr=torch.tensor(0.25)))
    assert sent[2]["lr"] == 0.25
    assert all("params" not in group for group in sent)
    (shard,) = Servers(net, make(AdamW, net), 1).shards
    sent[2]["betas"] = list(sent[2]["betas"])  # as the wire brings them
    shard.set(sent)
    assert options_of(shard.optimizer)[2]["lr"] == 0.25
    assert shard.optimizer.param_groups[2]["betas"] == (0.9, 0.999)


@pytest.mark.parametrize(
    ("kind", "new", "accepted"),
    [
        (Adam, {"lr": 0.5, "betas": [0.5, 0.9], "initial_lr": 1.0}, True),
        (Adam, {"lr": 1}, True),
        (Adam, {"foreach": True, "fused": False}, True),  # this process keeps its own
        (Adam, {"betas": []}, False),
        (Adam, {"betas": [0.9, 0.99, 0.999]}, False),
        (Adam, {"betas": [0.9, 1.0]}, False),  # divides by zero
        (Adam, {"betas": [0.9, float("nan")]}, False),
        (Adam, {"betas": 0.9}, False),
        (Adam, {"lr": float("nan")}, False),
        (Adam, {"lr": []}, False),
        (Adam, {"eps": float("inf")}, False),
        (Adam, {"amsgrad": False}, False),  # it decides which state there is
        (SGD, {"momentum": 0.5}, True),
        (SGD, {"momentum": "much"}, False),
    ],
    ids=str,
)
def test_options_that_an_optimizer_may_get_in_training(
    kind: type[Optimizer], new: dict[str, Any], accepted: bool
) -> None:
    net = Net()
    optimizer = make(kind, net)
    vector = Vector(net, optimizer)
    (span,) = cut(vector.layout, 1, 16, False)
    shard = Shard(vector.layout, span, optimizer, vector.tensors)
    options = options_of(shard.optimizer)
    assert shard.accepts([own | new for own in options]) == accepted
    if accepted:
        shard.set([own | new for own in options])
        shard.update(allocate(span))
        assert shard.optimizer.param_groups[0]["fused"] == options[0]["fused"]
