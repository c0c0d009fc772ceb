"""Models on a mesh whose weights are looked at from outside: by methods, hooks and losses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spartito as sp
from tests.replicas import Replicas, warns
from tests.strategies.test_contracts import close


def overflowing() -> list[tuple[float, float]]:
    """Loss scales of fp16 where gradients of one task's shard overflow, and a weight after each."""
    with sp.MeshStrategy() as strategy:
        torch.manual_seed(0)
        last = nn.Linear(8, 2)
        net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), last)
        x = torch.ones(16, 4)
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.fill_(0.01)
            last.weight[:, :4] = 0.0  # the first task's half of the hidden layer gets nothing
            last.weight[:, 4:] = 40.0  # and the other's too much, of errors that are small enough
            y = net(x) - 0.5
        found = []
        update = torch.optim.SGD(net.parameters(), 1e-6)
        strategy.prepare(net, update, precision="fp16")
        for batch in strategy.distribute(sp.data.arrays(x, y).batch(4)):
            strategy.step(batch, nn.functional.mse_loss)
            found.append((strategy.engine.team.pairs.only.loss_scale.value, last.bias[0].item()))
        return found


def test_an_overflow_on_one_task_is_left_out_on_all(replicas: Replicas) -> None:
    one, other = replicas(overflowing, 2)
    assert one == other
    scales = [scale for scale, _ in one]
    assert scales == [65536.0 / 2**step for step in range(1, 5)]  # each was left out
    assert len({weight for _, weight in one}) == 1


class Around(nn.Module):
    """Weights that are read beside forward passes: by methods, hooks and `parameters`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.words, self.wide = nn.Embedding(12, 8), nn.Linear(8, 16)
        self.narrow = nn.utils.parametrizations.spectral_norm(nn.Linear(16, 8))
        self.double()
        self.register_forward_pre_hook(lambda net, given: (given[0], net.wide.weight.std()))

    def scores(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.words.weight)

    def forward(self, tokens: Tensor, scale: Tensor) -> Tensor:
        wide = self.wide(self.words(tokens)) * scale
        wide[:, 2:7] += wide[:, 3:8]
        x = self.narrow(torch.tanh(wide))
        out: Tensor = self.scores(x) + sum(p.square().sum() for p in self.parameters())
        return out

    def generate(self, token: Tensor) -> Any:
        for _ in range(4):
            token = self.scores(self.words.weight[token]).argmax(-1)
            yield token.tolist()

    def size(self) -> Any:
        total: Any = self.words.weight.norm() + self.wide.weight.norm()
        return total


@warns(".* has no rule for")
def around(mesh: bool) -> tuple[list[float], list[Any]]:
    """Losses of some steps, and what methods return, by plain torch or on a mesh."""
    tokens = torch.arange(24) * 5 % 12
    net, losses = Around(), []
    update = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    loss = nn.functional.cross_entropy
    if not mesh:
        for rows in tokens.split(8):
            update.zero_grad()
            value = loss(net(rows), rows)
            value.backward()
            update.step()
            losses.append(value.item())
        return [*losses, net.size().item()], list(net.generate(tokens[:5]))
    with sp.MeshStrategy(model=2) as strategy:
        strategy.prepare(net, update)
        for batch in strategy.distribute(sp.data.arrays(tokens, tokens).batch(8)):
            result = strategy.step(batch, loss)
            losses.append(float(result.loss) / float(result.weight))
        return [*losses, net.size().item()], list(net.generate(tokens[:5]))


def test_methods_and_hooks_see_whole_weights(replicas: Replicas) -> None:
    losses, tokens = replicas(around, 1, False)[0]
    for found, drawn in replicas(around, 2, True):
        close(found, losses)
        assert drawn == tokens


class Slips(nn.Module):
    """It does with a hidden layer what torch lets it do, and a mesh cannot."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.up, self.what = nn.Linear(6, 16), what
        self.words = nn.Embedding(4, 16, max_norm=0.5)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.up(x)
        if self.what == "slice":
            h[:, :4].mul_(2.0)
        elif self.what == "diagonal":
            h.diagonal().fill_(0.5)
        elif self.what == "no view of ours":
            torch.broadcast_to(h, h.shape).mul_(2.0)
        elif self.what == "shape":
            h.unsqueeze_(0)
        elif self.what == "base":
            part = h[:, :4]
            h.relu_()
            return part * 2
        elif self.what == "max_norm":
            h = h + self.words(torch.zeros(1, dtype=torch.int64))
        else:
            h = h + torch.tensor(h.detach()).sum()
        return h * 2


@warns(".* has no rule for", "To copy construct from a tensor")
def slipping(what: str) -> str:
    """The error of a forward pass."""
    with sp.MeshStrategy() as strategy:
        net = Slips(what)
        strategy.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
        try:
            net(torch.randn(4, 6))
        except (sp.UserError, RuntimeError) as error:
            return str(error)
        return ""


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("slice", "changed in place"),
        ("diagonal", "changed in place"),
        ("base", "changed in place"),
        ("no view of ours", "changed in place"),
        ("shape", "unsqueeze_() changes the shape"),
        ("max_norm", "max_norm=0.5 of an embedding that is cut"),
        ("tensor", "meta"),
    ],
)
def test_what_would_be_lost_is_refused(replicas: Replicas, what: str, text: str) -> None:
    for found in replicas(slipping, 2, what):
        assert text in found
