"""Loops with two losses: of a batch of each of two data sets, or both of one."""

from __future__ import annotations

import copy
import logging
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import spartito as sp
from tests.replicas import warns
from tests.strategies.jobs import make_strategy

BATCH = 8


def made(sizes: tuple[int, int]) -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    x, unlabelled = (torch.randn(size, 4, dtype=torch.float64) for size in sizes)
    return net, x, x[:, :3].argmax(1), unlabelled


def plain(sizes: tuple[int, int]) -> dict[str, Tensor]:
    net, x, y, unlabelled = made(sizes)
    optimizer = torch.optim.SGD(net.parameters(), 0.05)
    for at in range(0, min(sizes), BATCH):
        rows = slice(at, at + BATCH)
        optimizer.zero_grad()
        labelled = F.cross_entropy(net(x[rows]), y[rows])
        (labelled + net(unlabelled[rows]).square().mean()).backward()
        optimizer.step()
    return net.state_dict()


@warns("a loss of two batches")  # the test reads it
def trained(
    name: str, options: dict[str, Any], sizes: tuple[int, int], way: str
) -> tuple[dict[str, Tensor], int]:
    """What was learned, and how many warnings there were.

    ``way``: one loss "together", each batch by itself ("apart"), the next labelled batch fetched
    "ahead", or the second data set looked at "without" a backward pass.
    """
    strategy = make_strategy(name, **options)
    net, x, y, unlabelled = made(sizes)
    _, optimizer = strategy.prepare(net, torch.optim.SGD(net.parameters(), 0.05))
    said: list[str] = []
    lines = logging.Handler()
    lines.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("spartito").addHandler(lines)
    try:
        labelled = strategy.distribute(sp.data.arrays(x, y).batch(BATCH))
        others = strategy.distribute(sp.data.arrays(unlabelled).batch(BATCH))
        if way == "ahead":
            batches = iter(labelled)
            batch = next(batches)
            for following in [*batches, None]:
                strategy.backward(F.cross_entropy(net(batch.x), batch.y, reduction="none"), batch)
                strategy.update(optimizer)
                batch = following  # type: ignore[assignment]
        elif way == "without":
            for batch in labelled:
                strategy.backward(F.cross_entropy(net(batch.x), batch.y, reduction="none"), batch)
                strategy.update(optimizer)
            for batch in others:
                net(batch.x)
        else:
            for batch, other in zip(labelled, others, strict=False):
                losses = F.cross_entropy(net(batch.x), batch.y, reduction="none")
                squares = net(other.x).square()
                if way == "apart":
                    strategy.backward(losses, batch)
                    strategy.backward(squares.mean(1), other)
                else:
                    strategy.backward(losses.mean() + squares.mean(), batch)
                strategy.update(optimizer)
    finally:
        logging.getLogger("spartito").removeHandler(lines)
        learned = strategy.state_dict()["model"]
        strategy.close()
    return learned, sum("a loss of two batches" in text for text in said)


GROUPED, EVERY = 21, 2
"""Examples of three batches, the last of which gives a group two rows and the other three."""


def plain_groups() -> dict[str, Tensor]:
    """Two models that train apart, and take the mean by their rows."""
    common, x, y, _ = made((GROUPED, 0))
    nets = [copy.deepcopy(common) for _ in range(2)]
    optimizers = [torch.optim.SGD(net.parameters(), 0.05) for net in nets]
    since = [0, 0]
    for update, at in enumerate(range(0, GROUPED, BATCH), 1):
        end = min(at + BATCH, GROUPED)
        middle = at + (end - at) // 2
        for group, rows in enumerate((slice(at, middle), slice(middle, end))):
            optimizers[group].zero_grad()
            output = nets[group](x[rows])
            (F.cross_entropy(output, y[rows]) + output.square().mean()).backward()
            optimizers[group].step()
            since[group] += rows.stop - rows.start
        if update % EVERY == 0 or end == GROUPED:
            with torch.no_grad():
                for both in zip(*(net.parameters() for net in nets), strict=True):
                    pairs = zip(since, both, strict=True)
                    mean = sum(count * p for count, p in pairs) / sum(since)
                    for parameter in both:
                        parameter.copy_(mean)
            since = [0, 0]
    return nets[0].state_dict()


def trained_in_groups(name: str, options: dict[str, Any]) -> dict[str, Tensor]:
    """What two groups learned by a backward pass for each of two losses."""
    strategy = make_strategy(name, **options)
    net, x, y, _ = made((GROUPED, 0))
    _, optimizer = strategy.prepare(net, torch.optim.SGD(net.parameters(), 0.05))
    for batch in strategy.distribute(sp.data.arrays(x, y).batch(BATCH)):
        output = net(batch.x)
        strategy.backward(F.cross_entropy(output, batch.y, reduction="none"), batch)
        strategy.backward(net(batch.x).square().mean(1), batch)
        strategy.update(optimizer)
    strategy.synchronize()
    learned: dict[str, Tensor] = strategy.state_dict()["model"]
    strategy.close()
    return learned
