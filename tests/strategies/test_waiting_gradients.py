"""Gradients of several models that wait for their updates are those of plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

import spartito as sp
from tests.replicas import Replicas, warns

X = torch.arange(12.0).double().reshape(6, 2) / 7
Y = torch.tensor([1.0, 0.0, 2.0, 1.0, 5.0, 3.0]).double()[:, None]
ROWS = (slice(0, 4), slice(4, 6))  # batches of 4: the second one is smaller
UPDATES = ((0, "first"), (1, "second"), (0, "both"), (1, "first"), (0, "both"))
"""Which batch comes, and which models are updated after it: the other's gradients wait."""


def losses(nets: Sequence[nn.Module], x: Tensor, y: Tensor) -> Tensor:
    """One for each row."""
    return torch.nn.functional.mse_loss(nets[1](nets[0](x)), y, reduction="none")


def test_what_waits_is_the_sum_of_the_means_of_its_batches() -> None:
    torch.manual_seed(3)
    plain = [nn.Linear(2, 3).double(), nn.Linear(3, 1).double()]
    nets = deepcopy(plain)
    plain_optimizers = [torch.optim.SGD(net.parameters(), 0.1) for net in plain]
    with sp.OneDeviceStrategy() as strategy:
        pairs = [
            strategy.prepare(net, torch.optim.SGD(net.parameters(), 0.1), deterministic=True)
            for net in nets
        ]
        batches = list(strategy.distribute(sp.data.arrays(X, Y).batch(4)))
        assert [batch.size for batch in batches] == [4, 2]
        for number, updated in UPDATES:
            batch, rows = batches[number], ROWS[number]
            strategy.backward(losses([net for net, _ in pairs], batch.x, batch.y), batch)
            losses(plain, X[rows], Y[rows]).mean().backward()
            for index, name in enumerate(("first", "second")):
                if updated in (name, "both"):
                    strategy.update(pairs[index][1])
                    plain_optimizers[index].step()
                    plain_optimizers[index].zero_grad()
        for net, expected in zip(nets, plain, strict=True):
            for one, other in zip(net.parameters(), expected.parameters(), strict=True):
                assert (one - other).abs().max() < 1e-12


@warns("every=")
def two_passes(groups: int) -> list[Tensor]:
    """This replica's values after updates of two backward passes each, before groups meet."""
    strategy = sp.LocalSGDStrategy(groups=groups, every=100)
    net = linear()
    _, optimizer = strategy.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
    for batch in strategy.distribute(sp.data.arrays(X, Y).batch(4)):
        for power in (1, 2):
            strategy.backward((net(batch.x) ** power - batch.y).square(), batch)
        strategy.update(optimizer)
    values = [parameter.detach().clone() for parameter in net.parameters()]
    strategy.close()
    return values


def linear() -> nn.Module:
    torch.manual_seed(3)
    return nn.Linear(2, 1).double()


@pytest.mark.parametrize("groups", [1, 2])
def test_groups_that_train_apart_add_up_their_own_passes(replicas: Replicas, groups: int) -> None:
    found = replicas(two_passes, 2, groups)
    # The last batch has two rows, which are the first group's.
    apart: list[tuple[slice, ...]] = [(slice(0, 2), slice(4, 6)), (slice(2, 4),)]
    rows = [ROWS, ROWS] if groups == 1 else apart
    for values, own in zip(found, rows, strict=True):
        net = linear()
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for part in own:
            optimizer.zero_grad()
            for power in (1, 2):
                (net(X[part]) ** power - Y[part]).square().mean().backward()
            optimizer.step()
        for one, other in zip(values, net.parameters(), strict=True):
            assert (one - other).abs().max() < 1e-12


def test_a_loop_that_also_asks_for_accumulation_is_refused() -> None:
    net = nn.Linear(2, 1).double()
    with sp.OneDeviceStrategy() as strategy:
        _, optimizer = strategy.prepare(net, torch.optim.SGD(net.parameters(), 0.1), accumulate=2)
        for batch in strategy.distribute(sp.data.arrays(X, Y).batch(4)):
            strategy.backward((net(batch.x) - batch.y).square(), batch)
            with pytest.raises(sp.UserError, match=r"accumulate=2"):
                strategy.update(optimizer)
