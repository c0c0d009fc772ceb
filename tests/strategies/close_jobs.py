"""A model, and an optimizer, that go on after their strategy was closed."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

import spartito as sp
from spartito.notes import logger
from spartito.strategies import Strategy
from tests.replicas import warns

Options = dict[str, Any]
ROWS = 8

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, 0.2),
    "momentum": lambda parameters: torch.optim.SGD(parameters, 0.2, momentum=0.9),
    "Adam": lambda parameters: torch.optim.Adam(parameters, 0.05),
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters, 0.05),  # not by elements
}


class Net(nn.Module):
    """A model whose head can be replaced; in some tests its layer normalizes rows of all."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), inner or nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.body(x))
        return found


def made(kind: str = "SGD", inner: nn.Module | None = None) -> tuple[Net, Optimizer]:
    torch.manual_seed(1)
    net = Net(inner).double()
    return net, OPTIMIZERS[kind](net.parameters())


def examples() -> tuple[Tensor, Tensor]:
    x = torch.rand(2 * ROWS, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    return x, x[:, :2] - x[:, 2:]


def values(net: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in net.parameters()]


def by_torch(net: nn.Module, optimizer: Optimizer) -> None:
    """An epoch, whatever other tasks do."""
    for x, y in zip(*(each.split(ROWS) for each in examples()), strict=True):
        optimizer.zero_grad()
        F.mse_loss(net(x), y).backward()
        optimizer.step()


def by_strategy(
    strategy: Strategy, net: nn.Module, optimizer: Optimizer, *, between: Any = None, **options: Any
) -> None:
    """The same epoch."""
    model, optimizer = strategy.prepare(net, optimizer, **options)
    for batch in strategy.distribute(sp.data.arrays(*examples()).batch(ROWS)):
        if between is not None:
            between()
        strategy.backward(F.mse_loss(model(batch.x), batch.y, reduction="none"), batch)
        optimizer.step()


def epochs(first: str, second: str) -> list[Tensor]:
    """What two epochs of plain torch end with; a new optimizer for the second, if one is named."""
    net, optimizer = made(first)
    by_torch(net, optimizer)
    by_torch(net, OPTIMIZERS[second](net.parameters()) if second else optimizer)
    return values(net)


def go_on(
    name: str, options: Options, then: str, then_options: Options, first: str, second: str
) -> list[Tensor] | str:
    """As `epochs`, each under a strategy; "" is plain torch. Or what is said of it."""
    net, optimizer = made(first)
    with sp.strategy(name, **options) as strategy:
        by_strategy(strategy, net, optimizer)
    try:
        if second:
            optimizer = OPTIMIZERS[second](net.parameters())
        if not then:
            by_torch(net, optimizer)
            return values(net)
        alone = sp.OneDeviceStrategy(cluster=sp.ClusterSpec.alone())
        with alone if then == "one_device" else sp.strategy(then, **then_options) as strategy:
            by_strategy(strategy, net, optimizer)
            return [value.detach().clone() for value in strategy.state_dict()["model"].values()]
    except sp.UserError as error:
        return str(error)


@warns("every=3, and an epoch has 2 updates")
def groups_go_on(kind: str) -> list[Tensor] | str:
    """As `go_on` by plain torch, after groups that have not met."""
    return go_on("local_sgd", {"every": 3}, "", {}, kind, "")


def without_strategy(name: str, kind: str) -> list[Tensor] | str:
    """As `go_on` by plain torch and the same optimizer, once nobody has the strategy any more."""
    net, optimizer = made(kind)
    by_strategy(sp.strategy(name), net, optimizer)
    gc.collect()
    try:
        by_torch(net, optimizer)
    except sp.UserError as error:
        return str(error)
    return values(net)


@warns("a strategy whose groups train apart ended without close", "every=3, and an epoch has")
def groups_without_strategy() -> list[str]:
    """What a task says when nobody has the strategy any more, and groups have not met."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    net, optimizer = made("SGD")
    by_strategy(sp.strategy("local_sgd", every=3), net, optimizer)
    gc.collect()
    logger.removeHandler(handler)
    return [line for line in said if "without close()" in line]


def never_begun() -> list[Tensor]:
    """An epoch of plain torch whose optimizer a strategy had, and never used."""
    net, optimizer = made("Adam")
    with sp.strategy("sharded") as strategy:
        strategy.prepare(net, optimizer)
    by_torch(net, optimizer)
    return values(net)


def closed_again() -> list[Tensor]:
    """An epoch of an optimizer whose strategy before is closed once more."""
    net, optimizer = made("Adam")
    before = sp.strategy("mirrored")
    before.prepare(net, optimizer)
    before.close()
    with sp.strategy("mirrored") as strategy:
        by_strategy(strategy, net, optimizer, between=before.close)
    return values(net)


def closed_beside() -> list[Tensor]:
    """A deterministic epoch, in which a strategy of other tasks' models is closed."""
    net, optimizer = made(inner=nn.BatchNorm1d(8))
    other = sp.OneDeviceStrategy(cluster=sp.ClusterSpec.alone())
    other.prepare(*made())
    with sp.strategy("mirrored") as strategy:
        by_strategy(strategy, net, optimizer, between=other.close, deterministic=True)
    return values(net)


def another_head(strategy: Strategy | None) -> list[Tensor]:
    """Two epochs, the second by plain torch, and with a head that is new."""
    net, optimizer = made()
    if strategy is None:
        by_torch(net, optimizer)
    else:
        by_strategy(strategy, net, optimizer)
        strategy.close()
    net.head = nn.Linear(8, 2).double()
    nn.init.constant_(net.head.weight, 0.1)
    nn.init.zeros_(net.head.bias)
    by_torch(net, OPTIMIZERS["SGD"](net.parameters()))
    return values(net)


def another_head_after_buckets() -> tuple[list[Tensor], int]:
    """The same after a strategy, and how many gradients left while it computed backward."""
    strategy = sp.strategy("multi_worker_mirrored", communication="sockets", bucket_bytes=16)
    found = another_head(strategy)
    return found, strategy.engine.team.pairs.all[0].gradients.overlapped  # type: ignore[attr-defined]


def clip(name: str, options: Options) -> float:
    """The norm that torch clips by after a loop that was left with gradients that wait."""
    net, optimizer = made()
    with sp.strategy(name, **options) as strategy:
        model, _ = strategy.prepare(net, optimizer)
        for batch in strategy.distribute(sp.data.arrays(*examples()).batch(ROWS)):
            strategy.backward(F.mse_loss(model(batch.x), batch.y, reduction="none"), batch)
            break
    return clip_by_torch(net)


def clip_by_torch(net: nn.Module) -> float:
    x, y = examples()
    net.zero_grad()
    F.mse_loss(net(x), y).backward()
    return nn.utils.clip_grad_norm_(net.parameters(), 0.1).item()
