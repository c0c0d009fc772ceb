"""What is built without values is made later, bit for bit as it would have been."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

import spartito as sp
from spartito.engine.meta import value_recipes
from spartito.engine.meta.meta_models import make_all, making, plan_values


class Odd(nn.Module):
    """All that a constructor may do: it draws, computes, copies, looks at values."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        nn.init.trunc_normal_(self.first.weight, std=0.02)
        self.second = nn.Linear(7, 7)
        nn.init.orthogonal_(self.second.weight)
        self.copy = copy.deepcopy(self.second)
        self.embedding = nn.Embedding(9, 7, padding_idx=2)
        inverse = 1.0 / (10000 ** (torch.arange(0, 8, 2).float() / 8))
        turns = torch.outer(torch.arange(6).float(), inverse).cos()
        self.register_buffer("turns", turns, persistent=False)
        self.register_buffer("mask", torch.tril(torch.ones(6, 6)).bool(), persistent=False)
        self.register_buffer("given", torch.tensor([1.0, 2.0]) + turns[0, :2])
        self.register_buffer("counted", torch.from_numpy(np.arange(3.0)))
        self.rates = [x.item() for x in torch.linspace(0, 0.5, 4)]
        self.list = torch.arange(3).tolist()
        self.lstm = nn.LSTM(4, 4, 2)
        self.chosen = nn.Parameter(torch.rand(9)[torch.rand(9) > 0.5])
        self.own = nn.Parameter(torch.randn(4, generator=torch.Generator().manual_seed(3)))
        self.normed = nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 4, 3))
        self.double_ = nn.Linear(3, 3).double()
        self.order = nn.Parameter(torch.randperm(6).float())
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 5))
        self.filled = nn.Parameter(torch.rand(3, 2, out=torch.empty(3, 2)))
        one = torch.randn(3)
        self.same = nn.Parameter(one.to("cpu"))
        marks = torch.zeros(4, 4)
        marks[torch.rand(4, 4) > 0.5] = 3.0
        self.register_buffer("marks", marks)
        with torch.no_grad():
            self.first.weight[0] *= 2
            one.mul_(2)
            self.first.bias.copy_(self.first.weight.sum(1))
        if float(self.own.detach().mean()) > 9:
            self.last = nn.Linear(1, 1)


BUILDS: dict[str, Callable[[], nn.Module]] = {
    "odd": Odd,
    "gpt": lambda: sp.models.GPT.small(72),
    "transformer": lambda: nn.Transformer(16, 2, 1, 1, 32, batch_first=True),
    "channels last": lambda: nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last),  # type: ignore[call-overload]
    "normed": lambda: nn.Sequential(nn.BatchNorm1d(3), nn.GRU(3, 3), nn.PReLU()).double(),
}


@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
@pytest.mark.parametrize("precision", ["fp32", "bf16-true"])
def test_values_come_as_they_would_have(build: Callable[[], nn.Module], precision: str) -> None:
    torch.manual_seed(5)
    plain, after = build(), torch.rand(2)
    torch.manual_seed(5)
    with sp.meta():
        net = build()
    assert torch.equal(torch.rand(2), after)
    assert any(parameter.is_meta for parameter in net.parameters())
    objects = [id(parameter) for parameter in net.parameters()]
    known = len(value_recipes._NOTES.steps)
    plan_values(net, precision)
    with making(net):
        make_all(net)
    if precision == "bf16-true":
        plain.to(torch.bfloat16)
    assert objects == [id(parameter) for parameter in net.parameters()]
    assert precision != "fp32" or len(value_recipes._NOTES.steps) < known
    found = dict(net.named_parameters()) | dict(net.named_buffers())
    expected = dict(plain.named_parameters()) | dict(plain.named_buffers())
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
        assert found[name].stride() == tensor.stride(), name
        assert found[name].requires_grad == tensor.requires_grad, name
        assert type(found[name]) is type(tensor), name
    if isinstance(plain, Odd) and isinstance(net, Odd):
        assert (net.rates, net.list) == (plain.rates, plain.list)


def test_what_would_be_lost_is_refused() -> None:
    with sp.meta(), pytest.raises(sp.UserError, match="a lazy LazyLinear"):
        nn.LazyLinear(3)
    with sp.meta(), pytest.raises(ValueError, match="read-only"):
        torch.zeros(3).numpy()[:] = 1
