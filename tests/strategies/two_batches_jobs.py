"""Loops with a batch of each of two data sets."""

from __future__ import annotations

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
