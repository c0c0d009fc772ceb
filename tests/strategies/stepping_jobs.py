"""Loops as people type them who come from torch and Accelerate."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

import spartito as sp

EXAMPLES, BATCH, EPOCHS = 21, 8, 2  # the last batch has 5 rows

OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda p: torch.optim.AdamW(p, 0.05),
    "adamax": lambda p: torch.optim.Adamax(p, 0.05),  # none of the kernels that we call
    "sgd": lambda p: torch.optim.SGD(p, 0.3, momentum=0.9),
}


def made(kind: str) -> tuple[nn.Module, Optimizer, Tensor, Tensor]:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(EXAMPLES, 4, dtype=torch.float64, generator=generator)
    return net, OPTIMIZERS[kind](net.parameters()), x, torch.arange(EXAMPLES) % 3


def rates(optimizer: Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def by_torch(kind: str, every: int = 1) -> list[Tensor]:
    net, optimizer, x, y = made(kind)
    schedule = rates(optimizer)
    for _ in range(EPOCHS):
        for number, rows in enumerate(torch.arange(EXAMPLES).split(BATCH), 1):
            (F.cross_entropy(net(x[rows]), y[rows]) / every).backward()
            if number % every == 0 or number == -(-EXAMPLES // BATCH):
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
    return [parameter.detach() for parameter in net.parameters()]


def by_hand(
    name: str, options: dict[str, Any], kind: str, schedule_first: bool = False, every: int = 1
) -> list[Tensor]:
    """``strategy.backward()``, and then what Accelerate's loops have."""
    net, optimizer, x, y = made(kind)
    schedule = rates(optimizer) if schedule_first else None
    with warnings.catch_warnings(), sp.strategy(name, **options) as strategy:
        warnings.simplefilter("error")  # a schedule that misses a step says so
        model, optimizer = strategy.prepare(net, optimizer)
        schedule = schedule or rates(optimizer)
        data = strategy.distribute(sp.data.arrays(x, y).batch(BATCH))
        for _ in range(EPOCHS):
            for number, batch in enumerate(data, 1):
                losses = F.cross_entropy(model(batch.x), batch.y, reduction="none")
                strategy.backward(losses / every, batch)
                if number % every == 0 or number == -(-EXAMPLES // BATCH):
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
        found = strategy.state_dict()["model"]
    return [value.detach().clone() for value in found.values()]


def apart(name: str, how: str, options: dict[str, Any]) -> str:
    """What is said to a loop that leaves ``strategy.backward()`` out; all go on after it."""
    net, optimizer, x, y = made("adamw")
    with sp.strategy(name, **options) as strategy:
        model, optimizer = strategy.prepare(net, optimizer)
        for batch in strategy.distribute(sp.data.arrays(x, y).batch(BATCH)):
            F.cross_entropy(model(batch.x), batch.y).backward()
            try:
                if how == "update":
                    strategy.update(optimizer)
                else:
                    optimizer.step()
            except sp.UserError as error:
                return str(error)
    return ""


def another_optimizer(changes: bool, fails: bool = False) -> str:
    """What `close` says of a loop in which an optimizer steps that was not prepared."""
    net, optimizer, x, y = made("sgd")
    strategy = sp.MirroredStrategy()
    strategy.prepare(net, lambda p: torch.optim.SGD(p, 0.1))
    for batch in strategy.distribute(sp.data.arrays(x, y).batch(BATCH)):
        if changes:
            F.cross_entropy(net(batch.x), batch.y).backward()
            optimizer.step()
    try:
        if fails:
            try:
                raise RuntimeError("the script's own")
            finally:
                strategy.close()
        strategy.close()
    except (sp.UserError, RuntimeError) as error:
        strategy.close()  # once more changes nothing
        return str(error)
    return ""


def afterwards() -> bool:
    """Whether an optimizer whose strategy was closed makes its own steps."""
    net, optimizer, x, y = made("sgd")
    with sp.MirroredStrategy() as strategy:
        strategy.prepare(net, optimizer)
    before = [parameter.detach().clone() for parameter in net.parameters()]
    F.cross_entropy(net(x), y).backward()
    optimizer.step()
    return not any(map(torch.equal, before, net.parameters()))
