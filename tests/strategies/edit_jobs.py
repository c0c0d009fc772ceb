"""Loops of one's own that change gradients between a backward pass and its update."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

import spartito as sp
from spartito.notes import logger
from tests.replicas import warns

EXAMPLES, BATCH = 22, 8  # the last batch has 6 rows
SAID = "gradients were changed beside"

Change = Callable[[nn.Module], None]


def made() -> tuple[nn.Module, Optimizer, Tensor, Tensor]:
    """A model with a layer that nobody uses, and examples that are not alike on all replicas."""
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    net.register_parameter("unused", nn.Parameter(torch.ones(2).double()))
    x = torch.randn(EXAMPLES, 4).double() * torch.arange(1, EXAMPLES + 1)[:, None] / 8
    return net, torch.optim.SGD(net.parameters(), 0.1, momentum=0.9), x, torch.arange(EXAMPLES) % 3


def penalty(net: nn.Module) -> None:
    torch.stack([parameter.square().sum() for parameter in net.parameters()]).sum().backward()


def penalty_of_unused(net: nn.Module) -> None:
    next(net.parameters()).square().sum().backward()


def each(change: Callable[[nn.Parameter, Tensor], Any]) -> Change:
    """``change`` of each parameter that has a gradient; what it returns becomes that."""

    def changes(net: nn.Module) -> None:
        for parameter in net.parameters():
            if parameter.grad is not None:
                with torch.no_grad():
                    parameter.grad = change(parameter, parameter.grad)

    return changes


def clip(net: nn.Module) -> None:
    """As it is written by hand."""
    total = sum(float(p.grad.square().sum()) for p in net.parameters() if p.grad is not None) ** 0.5
    each(lambda _, grad: grad.mul_(min(1.0, 0.05 / total)))(net)


CHANGES: dict[str, Change] = {
    "penalty": penalty,
    "of unused": penalty_of_unused,
    "sign_": each(lambda _, grad: grad.sign_()),
    "clamp_": each(lambda _, grad: grad.clamp_(-0.01, 0.01)),
    "nan_to_num_": each(lambda _, grad: grad.nan_to_num_(0.0)),
    "decay": each(lambda p, grad: grad.add_(p, alpha=0.3)),
    "noise": each(lambda _, grad: grad + torch.linspace(-1, 1, grad.numel()).view_as(grad)),
    "data": each(lambda _, grad: (grad.data.clamp_(-0.01, 0.01), grad)[1]),
    "clip": clip,
}
"""What makes other numbers where each replica does it to its own part."""


def dropped(net: nn.Module) -> None:
    """What freezes a layer for a while."""
    for parameter in next(net.children()).parameters():
        parameter.grad = None


def zeroed(net: nn.Module) -> None:
    for parameter in next(net.children()).parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()


def read(net: nn.Module) -> None:
    nn.utils.get_total_norm([p.grad for p in net.parameters() if p.grad is not None]).item()


EXACT: dict[str, Change] = {"dropped": dropped, "zeroed": zeroed, "read": read}
"""What may be done to parts."""


def by_torch(change: Change, before: Change | None = None) -> list[Tensor]:
    """What plain torch makes of whole batches."""
    net, optimizer, x, y = made()
    for rows, target in zip(x.split(BATCH), y.split(BATCH), strict=True):
        optimizer.zero_grad()
        if before is not None:
            before(net)
        F.cross_entropy(net(rows), target).backward()
        change(net)
        optimizer.step()
    return [parameter.detach() for parameter in net.parameters()]


@warns(SAID)
def late(begins: int) -> list[str]:
    """What is said of a change through ``.data`` that begins after so many epochs of three."""
    net, optimizer, x, y = made()
    said = Said()
    with sp.strategy("mirrored") as strategy:
        model, _ = strategy.prepare(net, optimizer)
        logger.addHandler(said)
        try:
            for epoch in range(begins + 22):
                for batch in strategy.distribute(sp.data.arrays(x, y).batch(BATCH)):
                    losses = F.cross_entropy(model(batch.x), batch.y, reduction="none")
                    strategy.backward(losses, batch)
                    if epoch >= begins:
                        CHANGES["data"](net)
                    strategy.update(optimizer)
        finally:
            logger.removeHandler(said)
    return said.lines


@warns(SAID)
def loop(
    name: str,
    options: dict[str, Any],
    change: str,
    where: str,
    deterministic: bool = False,
) -> tuple[list[Tensor], list[str]]:
    """The parameters of a loop, and what was said to it."""
    net, optimizer, x, y = made()
    said, changes = Said(), (CHANGES | EXACT)[change]
    with sp.strategy(name, **options) as strategy:
        model, _ = strategy.prepare(net, optimizer, deterministic=deterministic)
        if where == "hook":
            optimizer.register_step_pre_hook(lambda *_: changes(net))
        logger.addHandler(said)
        try:
            for batch in strategy.distribute(sp.data.arrays(x, y).batch(BATCH)):
                if where == "before":
                    changes(net)
                losses = F.cross_entropy(model(batch.x), batch.y, reduction="none")
                strategy.backward(losses, batch)
                if where == "after":
                    changes(net)
                if batch.step % 2:
                    optimizer.step()
                else:
                    strategy.update(optimizer)
        except sp.UserError as error:
            return [], [str(error)]
        finally:
            logger.removeHandler(said)
        whole = strategy.state_dict()["model"]
        return [whole[key].detach().clone() for key, _ in net.named_parameters()], said.lines


class Said(logging.Handler):
    """Keeps what is said."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@warns(SAID)
def two_trainings() -> list[list[str]]:
    """What is said in each of two trainings, one after the other."""
    return [loop("mirrored", {}, "noise", "after")[1] for _ in range(2)]


def two_models(edits_waiting: bool) -> str:
    """A GAN's loop, in which the gradients of one model wait or are dropped; what is said."""
    net, optimizer, x, y = made()
    other = nn.Linear(3, 3).double()
    with sp.MirroredStrategy() as strategy:
        strategy.prepare(net, optimizer, deterministic=True)
        _, second = strategy.prepare(other, torch.optim.Adam(other.parameters()))
        try:
            for batch in strategy.distribute(sp.data.arrays(x, y).batch(BATCH)):
                losses = F.cross_entropy(other(net(batch.x)), batch.y, reduction="none")
                strategy.backward(losses, batch)
                strategy.update(second)
                if edits_waiting:
                    CHANGES["sign_"](net)
                else:
                    optimizer.zero_grad(set_to_none=bool(batch.step % 2))
                strategy.backward(net(batch.x).square().sum(1), batch)
                strategy.update(optimizer)
                second.zero_grad()
        except sp.UserError as error:
            return str(error)
    return ""


def after_steps() -> list[Tensor]:
    """Updates of which `step` has computed one half, and a loop the other."""
    net, optimizer, x, y = made()
    with sp.MirroredStrategy() as strategy:
        strategy.prepare(net, optimizer, deterministic=True, accumulate=2)
        batches = iter(strategy.distribute(sp.data.arrays(x, y).batch(BATCH // 2)))
        for batch in batches:
            strategy.step(batch, nn.CrossEntropyLoss())
            second = next(batches)
            losses = F.cross_entropy(net(second.x), second.y, reduction="none")
            strategy.backward(losses, second)
            strategy.flush()
    return [parameter.detach().clone() for parameter in net.parameters()]


def scaled(every: int) -> list[Tensor]:
    """A loop with a scaler of the user's own."""
    net, optimizer, x, y = made()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    with sp.MirroredStrategy() as strategy:
        strategy.prepare(net, optimizer, deterministic=True)
        for batch in strategy.distribute(sp.data.arrays(x, y).batch(BATCH)):
            losses = F.cross_entropy(net(batch.x), batch.y, reduction="none")
            for _ in range(every):
                strategy.backward(scaler.scale(losses) / every, batch)
                losses = F.cross_entropy(net(batch.x), batch.y, reduction="none")
            if batch.step % 2:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in net.parameters()]


def scaled_and_changed() -> str:
    """What is said to a change beside that of a scaler."""
    net, optimizer, x, y = made()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with sp.MirroredStrategy() as strategy:
        strategy.prepare(net, optimizer, deterministic=True)
        batch = next(iter(strategy.distribute(sp.data.arrays(x, y).batch(BATCH))))
        losses = F.cross_entropy(net(batch.x), batch.y, reduction="none")
        strategy.backward(scaler.scale(losses), batch)
        CHANGES["decay"](net)
        try:
            scaler.step(optimizer)
        except sp.UserError as error:
            return str(error)
    return ""
