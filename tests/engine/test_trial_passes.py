"""What a trial pass changes is put back."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from spartito.engine.modules.trial_passes import untouched


class Counting(nn.Module):
    """Changes all that a module may keep, in place and anew."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(2))
        self.steps, self.names, self.by_name = 0, ["a"], {"a": 1}
        self.known, self.last = {1}, deque([1, 2], maxlen=2)
        self.python, self.numpy = random.Random(1), np.random.default_rng(1)
        self.layers = nn.ModuleDict({"a": nn.Linear(2, 2)})
        self.cached: Any = None

    def forward(self) -> list[Any]:
        self.steps += 1
        self.names.append("b")
        self.by_name["b"] = 2
        self.known.add(self.steps)
        self.last.append(self.steps)
        self.cached = self.steps
        self.seen += 1
        self.layers["b"] = nn.Linear(2, 2)
        held = [self.steps, [*self.names], {**self.by_name}, {*self.known}, [*self.last]]
        drawn = [self.python.random(), self.numpy.random(), random.random(), np.random.rand()]
        return [*held, *drawn, torch.rand(()).item(), self.seen.tolist(), [*self.layers]]


def test_a_model_and_the_generators_are_as_before() -> None:
    model = Counting()
    seen = model.seen
    with untouched(model):
        trial = [model(), model()]
    assert model.cached is None
    assert [model(), model()] == trial
    assert model.seen is seen


def test_what_a_pass_writes_into_parameters_is_put_back() -> None:
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    model = nn.ModuleList([one, other])
    there = other.bias.data_ptr()
    before = [(each.detach().clone(), each._version) for each in model.parameters()]
    with untouched(model), torch.no_grad():
        one.weight.mul_(0.9).data.add_(1.0)
        torch._foreach_add_([other.weight, other.bias], 1.0)
        torch.add(one.bias, 1.0, out=one.bias)
        one.bias[0] = 5.0
        other.bias.data = torch.ones(2)
    for each, (value, version) in zip(model.parameters(), before, strict=True):
        assert torch.equal(each, value)
        assert each._version == version
    assert other.bias.data_ptr() == there
