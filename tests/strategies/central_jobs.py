"""What the tests of central storage run on every replica."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import spartito as sp
from spartito.errors import UserError
from spartito.strategies import CentralStorageStrategy
from spartito.strategies import strategy as make_strategy


class Own(torch.optim.Adam):
    """An optimizer of a user's own."""


OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
    "Own": lambda parameters: Own(parameters, 0.02),
    **{
        name: lambda parameters, kind=kind: kind(parameters, lr=0.02)
        for name, kind in vars(torch.optim).items()
        if name in ("Adam", "Adagrad", "RMSprop", "NAdam", "Adafactor")
    },
}


def network() -> nn.Module:
    """Two dtypes, a layout of its own, a frozen parameter and a buffer."""
    torch.manual_seed(3)
    conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    head = nn.Linear(4, 2).double()
    head.bias.requires_grad_(False)
    return nn.Sequential(conv, nn.BatchNorm2d(4), head)


def mapped(net: nn.Module) -> bool:
    """Whether every parameter lies in a file of ours that has no name any more."""
    spans = [
        [int(end, 16) for end in line.split()[0].split("-")]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "spartito-" in line and line.endswith("(deleted)")
    ]
    return all(
        any(start <= parameter.data_ptr() < end for start, end in spans)
        for parameter in net.parameters()
    )


def one_memory(name: str) -> dict[str, Any]:
    """What stays of the parameters, what one replica writes, and what is left in /dev/shm."""
    strategy = make_strategy(name)
    rank = strategy.cluster.rank
    net = network()
    if rank:
        for parameter in net.parameters():
            parameter.data.zero_()
    before = list(net.named_parameters())
    kinds = [(p.dtype, p.stride(), p.requires_grad) for _, p in before]
    strategy.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
    after = list(net.named_parameters())
    result: dict[str, Any] = {
        "kept": all(a is b for (_, a), (_, b) in zip(before, after, strict=True)),
        "alike": kinds == [(p.dtype, p.stride(), p.requires_grad) for _, p in after],
        "chiefs": bool((net[0].weight == network()[0].weight).all()),  # type: ignore[index]
        "mapped": mapped(net),
    }
    strategy.reduce("sum", torch.zeros(1))
    if rank == strategy.num_replicas_in_sync - 1:
        with torch.no_grad():
            net[0].bias.fill_(7)  # type: ignore[index]
    strategy.reduce("sum", torch.zeros(1))
    result["seen"] = net[0].bias.tolist()  # type: ignore[index]
    strategy.close()
    return result


def written(who: Sequence[int]) -> list[float] | str:
    """A bias after an update that changes nothing, where these replicas have written into it."""
    try:
        with make_strategy("central_storage") as strategy:
            net = nn.Linear(3, 2).double()
            made, optimizer = strategy.prepare(net, torch.optim.SGD(net.parameters(), 0.0))
            x = torch.ones(4, 3).double()
            for batch in strategy.distribute((x, x)):
                strategy.backward(made(batch.x).sum(1), batch)
                if strategy.cluster.rank in who:
                    with torch.no_grad():
                        net.bias.fill_(7 + strategy.cluster.rank)
                strategy.update(optimizer)
            found: list[float] = net.bias.tolist()
            return found
    except sp.UserError as error:
        return str(error)


def elements(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """How many elements of each parameter this replica has state of."""
    return {
        name: max(torch.as_tensor(value).numel() for value in optimizer.state[p].values())
        for name, p in net.named_parameters()
        if optimizer.state.get(p)
    }


def states(name: str, kind: str, folder: str) -> dict[str, Any]:
    """Two updates, a state, its way back, one more update; and who holds what."""
    strategy = make_strategy(name)
    torch.manual_seed(1)
    conv = nn.Conv2d(3, 5, 2).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    net = nn.Sequential(
        nn.Unflatten(1, (3, 2, 2)), conv, nn.Flatten(), nn.ReLU(), nn.Linear(5, 2)
    ).double()
    made, optimizer = strategy.prepare(net, OPTIMIZERS[kind](net.parameters()))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    x = torch.arange(72.0, dtype=torch.float64).view(6, 12) / 36
    data = strategy.distribute((x, x[:, :2]))

    def epoch() -> None:
        for batch in data:
            strategy.backward((made(batch.x) - batch.y).square().mean(1), batch)
            strategy.update(optimizer)
        scheduler.step()

    epoch()
    epoch()
    held = elements(net, optimizer)
    file = Path(folder, f"{strategy.cluster.rank}.pt")
    torch.save(strategy.state_dict(), file)
    saved = torch.load(file, weights_only=False)
    epoch()
    strategy.load_state_dict(saved)
    still = elements(net, optimizer)
    state = strategy.state_dict()
    values = state["optimizer"]["state"]
    strategy.close()
    return {
        "held": held,
        "still": still,
        "weights": {k: v.clone() for k, v in state["model"].items()},
        "state": {n: {k: torch.as_tensor(v) for k, v in v.items()} for n, v in values.items()},
        "names": list(values),
    }


class Teacher(nn.Module):
    """A forward pass moves an average of what learns, until that learns itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net, self.slow = nn.Linear(4, 2).double(), nn.Linear(4, 2).double()
        self.slow.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if not self.slow.weight.requires_grad:
            for mean, new in zip(self.slow.parameters(), self.net.parameters(), strict=True):
                mean.mul_(0.9).add_(new.detach(), alpha=0.1)
        out: Tensor = self.net(x) + self.slow(x)
        return out


class Slow(torch.optim.SGD):
    """Writes into parameters without a look at their gradients, every second time."""

    def __init__(self, parameters: Any, rate: float) -> None:
        super().__init__(parameters, rate)
        self.steps = 0
        self.kept = [p.detach().clone() for p in self.param_groups[0]["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.steps += 1
        if self.steps % 2 == 0:
            both = zip(self.kept, self.param_groups[0]["params"], strict=True)
            for before, now in both:
                now.copy_(before.lerp_(now, 0.5))


def averaged(name: str, kind: str) -> list[dict[str, Tensor]]:
    """The weights before and after the strategy is closed."""
    strategy, net = make_strategy(name), Teacher()
    rule: Any = {"Adam": torch.optim.Adam, "Slow": Slow, "Adafactor": torch.optim.Adafactor}[kind]
    learns = (net.net if kind == "Slow" else net).parameters()
    made, optimizer = strategy.prepare(net, rule(learns, 0.02))
    x = torch.arange(72.0, dtype=torch.float64).view(18, 4) / 36
    for number, batch in enumerate(strategy.distribute(sp.data.arrays(x, x[:, :2]).batch(3))):
        strategy.backward((made(batch.x) - batch.y).square().mean(1), batch)
        strategy.update(optimizer)
        if number == 2 and kind != "Slow":
            net.slow.requires_grad_(True)
    found = strategy.state_dict()["model"]
    before = {key: value.clone() for key, value in found.items()}
    strategy.close()
    return [before, dict(net.state_dict())]


def refused_memory() -> str:
    """What it says on another processor."""
    own = platform.machine
    platform.machine = lambda: "aarch64"
    try:
        CentralStorageStrategy().engine.groups.meet()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        platform.machine = own
    return ""


def step_with_a_hook(kind: str, is_before: bool) -> str:
    """What an update says to a hook on steps, which would have a part of everything."""
    strategy = make_strategy("central_storage")
    net = nn.Linear(40, 30).double()
    optimizer = OPTIMIZERS[kind](net.parameters())
    strategy.prepare(net, optimizer)
    batches = iter(strategy.distribute(sp.data.arrays(torch.ones(8, 40).double()).batch(4)))
    text = ""
    for number, batch in enumerate(batches):
        if number:
            register = optimizer.register_step_pre_hook
            register = register if is_before else optimizer.register_step_post_hook
            register(lambda *_: None)
        strategy.backward(net(batch.x).sum(1), batch)
        try:
            strategy.update(optimizer)
        except UserError as error:
            text += f"{number} {error}"
    strategy.close()
    return text


def die_in_an_update(folder: str) -> None:
    """The last replica ends without a word after an update."""
    strategy = CentralStorageStrategy(timeout=10)
    net = nn.Linear(2, 2)
    strategy.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
    Path(folder, str(strategy.cluster.rank)).touch()
    if strategy.cluster.rank:
        os._exit(3)
    strategy.load_state_dict(strategy.state_dict())
