"""Trainings with every kind of update, by replicas and by a plain loop of torch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

import spartito as sp
from spartito.engine.updates.sliced_update import SlicedGradients
from spartito.steps.exchanges.all_reduce import AllReduce
from spartito.steps.parts import Parts
from spartito.steps.placements.replicated import replicas
from spartito.steps.team import Team

ROWS, STEPS = 7, 8


class Net(nn.Module):
    """Parameters of several shapes: cut by replicas, tied, without elements, or of no use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Linear(40, 30)
        self.tied = nn.Linear(30, 30)
        self.also = nn.Linear(30, 30)
        self.also.weight = self.tied.weight
        self.image = nn.Conv2d(3, 2, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.zeros(0, 3))
        self.unused = nn.Parameter(torch.ones(100))
        self.rare = nn.Parameter(torch.ones(30))
        self.last = nn.Linear(30, 2)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        """Shape (rows, 40); `rare` is used where a first number is high."""
        hidden = torch.tanh(self.first(x)) * self.scale + self.nothing.sum()
        hidden = torch.tanh(self.also(torch.tanh(self.tied(hidden))))
        image = self.image(x[:, :27].reshape(-1, 3, 3, 3)).reshape(-1, 2)
        if bool((x[:, 0] > 1).any()):
            hidden = hidden + (x[:, :1] > 1) * self.rare
        if hasattr(self, "extra"):
            hidden = hidden + self.extra  # type: ignore[operator]
        made: Tensor = self.last(hidden) + image
        return made


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(ROWS, 40, generator=torch.Generator().manual_seed(step)).double()
    x[:, 0] = 0
    x[step % ROWS, 0] = 2 if step % 3 else 0  # on one replica; in every third step on none
    return x, torch.arange(ROWS) % 2


def groups(net: nn.Module) -> list[dict[str, Any]]:
    members = list(net.parameters())
    return [
        {"params": members[:2], "lr": 0.02},
        {"params": members[2:], "weight_decay": 0.1},
    ]


def nothing(net: Net, optimizer: Optimizer, step: int, rank: int) -> None:
    """Leave all as it is."""


def rates(net: Net, optimizer: Optimizer, step: int, rank: int) -> None:
    optimizer.param_groups[0]["lr"] = 0.05 / (1 + step)


def freeze(net: Net, optimizer: Optimizer, step: int, rank: int) -> None:
    net.first.requires_grad_(step not in (3, 4))


def grow(net: Net, optimizer: Optimizer, step: int, rank: int) -> None:
    if step == 4:
        torch.manual_seed(9)
        net.extra = nn.Parameter(torch.randn(30).double())
        optimizer.add_param_group({"params": [net.extra], "lr": 0.3})


def clamp(net: Net, optimizer: Optimizer, step: int, rank: int) -> None:
    with torch.no_grad():
        net.last.weight.clamp_(-0.05, 0.05)


def reload(net: Net, optimizer: Optimizer, step: int, rank: int) -> None:
    if step == 4:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def hook_on_one(net: Net, optimizer: Optimizer, step: int, rank: int) -> None:
    if rank == 0 and step == 4:
        optimizer.register_step_post_hook(lambda *_: None)


def by_hand(net: Net, optimizer: Optimizer, step: int, rank: int) -> None:
    if step in (3, 5):
        for parameter in net.parameters():
            parameter.grad = torch.full_like(parameter, 0.1)
        type(optimizer).step(optimizer)  # without asking the strategy: all have these gradients
        optimizer.zero_grad()


def replaced(net: Net, optimizer: Optimizer, step: int, rank: int) -> None:
    if step == 4:
        net.first.weight.data = net.first.weight.data * 0.5


def regrouped(net: Net, optimizer: Optimizer, step: int, rank: int) -> None:
    if step == 4:
        one, two = optimizer.param_groups
        one["params"].append(two["params"].pop(0))


def halved(net: Net, optimizer: Optimizer, step: int, rank: int) -> None:
    """Write into the state, twice in place and once past torch's count of writes."""
    for values in optimizer.state.values() if step in (3, 4, 6) else ():
        for key, value in values.items():
            if key != "step":
                (value.data if step == 6 else value).mul_(0.5)


def hook_writes(net: Net, optimizer: Optimizer, step: int, rank: int) -> None:
    def hook(*_: object) -> None:
        for parameter in net.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(2).add_(0.01)

    if step == 3:
        optimizer.register_step_pre_hook(hook)


Change = Callable[[Net, Optimizer, int, int], None]
CASES: dict[str, tuple[Callable[..., Optimizer], Change, float | None, int]] = {
    # optimizer, what changes before a step, clip_norm, how many updates are divided: after those
    # that begin a state, which the second step does for `rare`
    "adam": (Adam, rates, None, STEPS - 2),
    "adamw-clip": (lambda p: AdamW(p, betas=(0.7, 0.9)), nothing, 0.1, STEPS - 2),
    "sgd": (lambda p: SGD(p, 0.1), nothing, 0.1, STEPS),
    "momentum": (lambda p: SGD(p, 0.1, momentum=0.9, nesterov=True), rates, None, STEPS - 2),
    "adagrad": (lambda p: Adagrad(p, 0.1, lr_decay=0.1), nothing, None, STEPS - 1),
    "amsgrad": (lambda p: Adam(p, amsgrad=True), nothing, None, 0),
    "rmsprop": (RMSprop, nothing, 0.1, 0),
    "frozen": (Adam, freeze, None, STEPS - 2),
    "grown": (Adam, grow, None, STEPS - 3),
    "clamped": (Adam, clamp, None, 0),
    "reloaded": (Adam, reload, None, STEPS - 3),
    "hooked": (Adam, hook_on_one, None, 2),
    "by hand": (Adam, by_hand, None, 1),
    "replaced": (Adam, replaced, None, 2),
    "halved": (Adam, halved, None, STEPS - 5),
    "halved momentum": (lambda p: SGD(p, 0.1, momentum=0.9), halved, None, STEPS - 5),
    "hook writes": (Adam, hook_writes, None, 1),
    "regrouped": (Adam, regrouped, None, STEPS - 2),
}


def outcome(net: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """All that an update changes, as a user reads it."""
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    found = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}
    for parameter, values in optimizer.state.items():
        for key, value in values.items():
            if isinstance(value, Tensor):
                found[f"{names[id(parameter)]} {key}"] = value.clone()
    return found


def by_torch(name: str) -> list[dict[str, Tensor]]:
    """What every step has made, over the whole batch."""
    make, change, clip_norm, _ = CASES[name]
    net = Net()
    optimizer = make(groups(net))
    found = []
    for step in range(STEPS):
        change(net, optimizer, step, 0)
        x, y = batch_of(step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(net.parameters(), clip_norm)
        optimizer.step()
        found.append(outcome(net, optimizer))
    return found


def by_replicas(name: str) -> tuple[list[dict[str, Tensor]], int]:
    """The same of a replica that has a part of the rows, and how many updates were divided."""
    make, change, clip_norm, _ = CASES[name]
    strategy = sp.MirroredStrategy()
    net = Net()
    optimizer = make(groups(net))
    strategy.prepare(net, optimizer, clip_norm=clip_norm)
    data = sp.data.arrays(
        torch.cat([batch_of(step)[0] for step in range(STEPS)]),
        torch.cat([batch_of(step)[1] for step in range(STEPS)]),
    )
    found, divided = [], 0
    gradients = strategy.engine.team.pairs.only.gradients
    batches = iter(strategy.distribute(data.batch(ROWS)))
    for step in range(STEPS):
        change(net, optimizer, step, strategy.cluster.rank)
        batch = next(batches)
        strategy.backward(nn.functional.cross_entropy(net(batch.x), batch.y), batch)
        strategy.update(optimizer)
        divided += isinstance(gradients, SlicedGradients) and gradients._divided
        found.append(outcome(net, optimizer))
    strategy.close()
    return found, divided


@dataclass(frozen=True, eq=False)
class Packed(sp.MirroredStrategy):
    """Replicas that share memory, and make each the whole update."""

    def parts(self, team: Team) -> Parts:
        return replicas(team, AllReduce(team, slices=False))


def in_fp32(kind: str, divides: bool) -> Mapping[str, Tensor]:
    """Weights and state after 20 steps of an fp32 model of 50,000 parameters."""
    strategy = sp.MirroredStrategy() if divides else Packed()
    try:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(211, 199), nn.Tanh(), nn.Linear(199, 37)).float()
        if kind == "bf16":
            net.bfloat16()
        sgd = kind == "sgd"
        optimizer: Optimizer = Adam(net.parameters(), 0.01)
        optimizer = SGD(net.parameters(), 0.1, momentum=0.9) if sgd else optimizer
        strategy.prepare(net, optimizer)
        x, y = torch.randn(240, 211), torch.randint(37, (240,))
        for batch in strategy.distribute(
            sp.data.arrays(x.to(next(net.parameters()).dtype), y).batch(12)
        ):
            strategy.backward(nn.functional.cross_entropy(net(batch.x), batch.y), batch)
            strategy.update(optimizer)
        gradients = strategy.engine.team.pairs.only.gradients
        assert getattr(gradients, "_divided", False) == divides
        return outcome(net, optimizer)
    finally:
        strategy.close()
