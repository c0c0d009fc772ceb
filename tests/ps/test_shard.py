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

from spartito.engine.updates.optimizers import fuse
from spartito.ps.client.vector import SpanCopies, Vector
from spartito.ps.protocol.layout import cut
from spartito.ps.protocol.memory import allocate, flat
from spartito.ps.protocol.options import settings as options_of
from spartito.ps.protocol.slots import (
    ELEMENTWISE,
    State,
    is_elementwise,
    merge_state,
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
            SpanCopies(self.vector, span, shard.values).store()
            self.shards.append(shard)

    def push(self, rate: float = 1.0) -> None:
        """The model's gradients as one update of each shard."""
        for shard in self.shards:
            memory = allocate(shard.span)
            absent = SpanCopies(self.vector, shard.span, memory).store_gradients()
            shard.update(memory, absent, rate)

    def pull(self) -> None:
        for shard in self.shards:
            SpanCopies(self.vector, shard.span, shard.values).load()

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
