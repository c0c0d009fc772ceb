"""The optimizer on the servers' parts does what it does on the user's own tensors."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adafactor,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)

from spartito.engine.optimizers import fuse
from spartito.ps.client.vector import Copies, Vector
from spartito.ps.protocol.layout import Span, cut
from spartito.ps.protocol.memory import allocate, flat
from spartito.ps.protocol.options import settings as options_of
from spartito.ps.protocol.slots import (
    ELEMENTWISE,
    State,
    is_elementwise,
    merge_state,
    slots,
    split_state,
)
from spartito.ps.server.shard import Shard

OPTIONS: dict[type[Optimizer], dict[str, Any]] = {
    ASGD: {"lambd": 0.01, "t0": 2.0},
    SGD: {"momentum": 0.9, "nesterov": True},
    Adadelta: {},
    Adagrad: {"initial_accumulator_value": 0.3, "lr_decay": 0.1},
    Adam: {"amsgrad": True},
    Adamax: {},
    AdamW: {},
    NAdam: {"momentum_decay": 0.01},
    RAdam: {},
    RMSprop: {"momentum": 0.5, "centered": True},
    Rprop: {},
}
COUNT_STEPS = {ASGD, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam}
"""What they do to an element depends on how often its parameter was updated before."""
CASES = [
    pytest.param(kind, fused, id=f"{kind.__name__}-{'as_trained' if fused else 'as_made'}")
    for kind in ELEMENTWISE
    for fused in (False, True)
]


class Net(nn.Module):
    """Parameters of several orders and sizes, in double precision unless said otherwise."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.a = nn.Parameter(torch.randn(30, 11).double())
        self.scale = nn.Parameter(torch.randn(()).double())
        image = torch.randn(8, 3, 4, 4).double()
        self.c = nn.Parameter(image.contiguous(memory_format=torch.channels_last))
        self.d = nn.Parameter(torch.randn(17).double())
        self.e = nn.Parameter(torch.randn(5, 9).t().double())
        self.unused = nn.Parameter(torch.randn(23).double())
        self.register_buffer("count", torch.tensor(0))


def make(kind: type[Optimizer], net: Net, **more: Any) -> Optimizer:
    """In three groups with options of their own; `unused` is in one with others."""
    decay = {} if kind is Rprop else {"weight_decay": 0.1}
    groups: list[dict[str, Any]] = [
        {"params": [net.scale, net.d], "lr": 0.02},
        {"params": [net.a, net.unused, net.e], "lr": 0.1, **decay},
        {"params": [net.c]},
    ]
    return kind(groups, **({"lr": 0.05} | OPTIONS.get(kind, {}) | more))


class Servers:
    """All shards of a model, with no network between."""

    def __init__(self, net: Net, optimizer: Optimizer, count: int) -> None:
        self.vector = Vector(net, optimizer)
        self.whole = not is_elementwise(optimizer)
        self.spans = cut(self.vector.layout, count, 1, self.whole)
        self.shards = []
        for span in self.spans:
            twin, own = deepcopy((net, optimizer))
            shard = Shard(self.vector.layout, span, own, Vector(twin, own).tensors)
            Copies(self.vector, span, shard.values).store()
            self.shards.append(shard)

    def push(self, rate: float = 1.0) -> None:
        """The model's gradients as one update of each shard."""
        for shard in self.shards:
            memory = allocate(shard.span)
            absent = Copies(self.vector, shard.span, memory).store_gradients()
            shard.update(memory, absent, rate)

    def pull(self) -> None:
        for shard in self.shards:
            Copies(self.vector, shard.span, shard.values).load()

    def state_into(self, optimizer: Optimizer, tensors: Sequence[Tensor]) -> None:
        """The shards' state as that of an optimizer of whole tensors."""
        optimizer.state.clear()
        for shard in self.shards:
            for part, key, value in split_state(shard.slots, shard.state()):
                own = optimizer.state[tensors[part.entry]]
                if not value.dim():
                    own[key] = value.clone()
                    continue
                if key not in own:
                    own[key] = torch.zeros_like(tensors[part.entry], dtype=value.dtype)
                flat(own[key])[part.begin : part.end] = value


def give(nets: Sequence[Net], step: int, leave_out: Sequence[str] = ("unused",)) -> None:
    """The same gradients to several models; none to some parameters."""
    for name, parameter in nets[0].named_parameters():
        dice = torch.Generator().manual_seed(1000 * step + len(name) + ord(name[0]))
        grad = torch.randn(parameter.shape, generator=dice, dtype=torch.float64)
        for net in nets:
            own = dict(net.named_parameters())[name]
            own.grad = None if name in leave_out else grad.to(own.dtype).clone()


def assert_equal(one: nn.Module, other: nn.Module) -> None:
    for (name, a), (_, b) in zip(one.named_parameters(), other.named_parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-12), name


@pytest.mark.parametrize(("kind", "fused"), CASES)
@settings(max_examples=5)
@given(count=st.integers(1, 5), seed=st.integers(0, 99))
def test_shards_of_any_cut_do_what_the_optimizer_does(
    kind: type[Optimizer], fused: bool, count: int, seed: int
) -> None:
    net, own = Net(), Net()
    optimizer, expected = make(kind, net), make(kind, own)
    if fused:
        fuse(optimizer, net)
    servers = Servers(net, optimizer, count)
    unused = net.unused.detach().clone()
    for step in range(seed, seed + 4):
        give([net, own], step)
        if step == seed + 2:  # as a schedule does
            for group in (*expected.param_groups, *optimizer.param_groups):
                group["lr"] = group["lr"] * 0.5
            for shard in servers.shards:
                shard.set(options_of(optimizer))
        servers.push()
        expected.step()
        servers.pull()
        assert_equal(net, own)
    assert torch.equal(net.unused, unused)


@pytest.mark.parametrize("kind", [kind for kind in ELEMENTWISE if kind not in COUNT_STEPS])
@pytest.mark.parametrize("count", [1, 3])
def test_parameters_that_have_a_gradient_only_at_times(kind: type[Optimizer], count: int) -> None:
    net, own = Net(), Net()
    servers, expected = Servers(net, make(kind, net), count), make(kind, own)
    for step in range(8):
        absent = [
            name for target, name in enumerate(["unused", "a", "scale", "c"]) if step >> target & 1
        ]
        give([net, own], step, absent)
        servers.push()
        expected.step()
        servers.pull()
        assert_equal(net, own)


@pytest.mark.parametrize("kind", ELEMENTWISE)
def test_what_has_no_gradient_keeps_its_values_and_its_state(kind: type[Optimizer]) -> None:
    net = Net()
    servers = Servers(net, make(kind, net), 3)
    give([net], 0, ())
    servers.push()
    servers.pull()
    servers.state_into(before := make(kind, Net()), servers.vector.tensors)
    unused = net.unused.detach().clone()
    give([net], 1)
    servers.push()
    servers.pull()
    servers.state_into(after := make(kind, Net()), servers.vector.tensors)
    assert torch.equal(net.unused, unused)
    for key, value in before.state[net.unused].items():
        if value.dim():
            assert torch.equal(after.state[net.unused][key], value), key
    changed = [
        key for key, value in before.state[net.a].items()
        if value.dim() and not torch.equal(after.state[net.a][key], value)
    ]  # fmt: skip
    assert changed


@pytest.mark.parametrize("kind", ELEMENTWISE)
@pytest.mark.parametrize("count", [1, 4])
def test_training_goes_on_with_a_plain_optimizer_and_back_on_servers(
    kind: type[Optimizer], count: int
) -> None:
    net, own = Net(), Net()
    servers, expected = Servers(net, make(kind, net), count), make(kind, own)
    for step in range(3):
        give([net, own], step)
        servers.push()
        expected.step()
    servers.pull()
    plain = make(kind, net)
    servers.state_into(plain, list(servers.vector.tensors))
    named = dict(own.named_parameters())
    for name, parameter in net.named_parameters():
        if name != "unused":  # its steps count as those of the tensors beside it
            for key, value in expected.state[named[name]].items():
                torch.testing.assert_close(plain.state[parameter][key].double(), value.double())
    for step in range(3, 5):
        give([net, own], step)
        plain.step()
        expected.step()
    assert_equal(net, own)
    again = Servers(net, make(kind, net), count + 1)
    by_entry = [dict(plain.state.get(tensor, {})) for tensor in again.vector.tensors]
    for shard in again.shards:
        shard.load_state(merge_state(shard.slots, by_entry))
    for step in range(5, 7):
        give([net, own], step)
        again.push()
        expected.step()
    again.pull()
    assert_equal(net, own)


@pytest.mark.parametrize("kind", ELEMENTWISE)
def test_the_state_of_a_shard_comes_back_as_it_was(kind: type[Optimizer]) -> None:
    net = Net()
    servers = Servers(net, make(kind, net), 2)
    for step in range(2):
        give([net], step)
        servers.push()
    for shard in servers.shards:
        state = {target: value.clone() for target, value in shard.state().items()}
        wired: State = {target: value.reshape(-1)[0] if not value.dim() else value.reshape(-1)
                        for target, value in state.items()}  # fmt: skip
        shard.load_state(wired)
        found = shard.state()
        assert found.keys() == state.keys()
        assert all(torch.equal(found[target], value) for target, value in state.items())
        assert all(found[target].dtype == value.dtype for target, value in state.items())


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
    zero = Copies(vector, span, before)
    zero.store()
    shard = Shard(vector.layout, span, optimizer, vector.tensors)
    mean = torch.zeros(50).double()
    for number, weight in enumerate(weights):
        push = allocate(span)
        copies = Copies(vector, span, push)
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
    copies = Copies(Vector(net, make(SGD, net)), shard.span, push)
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
