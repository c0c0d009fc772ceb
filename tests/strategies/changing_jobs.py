"""Models whose parameters change during a training, by a strategy and by torch alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import spartito as sp
from spartito.errors import SpartitoError
from spartito.strategies import Strategy
from tests.replicas import warns
from tests.strategies.jobs import CLASSES, FEATURES, blobs, make_strategy

BATCH, EXAMPLES = 8, 22
SAID = ("no tensor of the model is cut", r"\d+ tensors stay whole", "every=")


class Network(nn.Module):
    """A body and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh()).double()
        self.head = nn.Linear(5, CLASSES).double()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x))
        return out


Change = Callable[[Network, Optimizer, int], None]


def start_head_alone(net: Network) -> Optimizer:
    net.body.requires_grad_(False)
    return torch.optim.Adam(net.head.parameters(), 0.05, weight_decay=0.1)


def start_all(net: Network) -> Optimizer:
    return torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, weight_decay=0.1)


def start_frozen(net: Network) -> Optimizer:
    net.body.requires_grad_(False)
    return start_all(net)


def start_with_none(net: Network) -> Optimizer:
    return torch.optim.SGD([{"params": []}], 0.1, momentum=0.9)


def add_all(net: Network, optimizer: Optimizer, rank: int) -> None:
    optimizer.add_param_group({"params": list(net.parameters())})


def add_group(net: Network, optimizer: Optimizer, rank: int) -> None:
    net.body.requires_grad_(True)
    optimizer.add_param_group({"params": list(net.body.parameters()), "lr": 0.01})


def unfreeze(net: Network, optimizer: Optimizer, rank: int) -> None:
    net.body.requires_grad_(True)
    net.head.bias.requires_grad_(False)


def replace_head(net: Network, optimizer: Optimizer, rank: int) -> None:
    torch.manual_seed(50 + rank)  # each replica starts its head anew, as scripts without a seed do
    net.head = nn.Linear(5, CLASSES).double()
    optimizer.param_groups[0]["params"] = list(net.parameters())


def take_out(net: Network, optimizer: Optimizer, rank: int) -> None:
    optimizer.param_groups[0]["params"] = list(net.head.parameters())


def dampen(net: Network, optimizer: Optimizer, rank: int) -> None:
    """The momentum of what learns from now on begins with its gradient."""
    unfreeze(net, optimizer, rank)
    optimizer.param_groups[0]["dampening"] = 0.3


CHANGES: dict[str, tuple[Callable[[Network], Optimizer], Change]] = {
    "begin with none": (start_with_none, add_all),
    "add a group": (start_head_alone, add_group),
    "unfreeze": (start_frozen, unfreeze),
    "replace": (start_all, replace_head),
    "take out": (start_all, take_out),
    "dampen": (start_frozen, dampen),
}


def weights(net: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in net.state_dict().items()}


def whole(strategy: Strategy) -> dict[str, Any]:
    """All values, also where no task has all of them; all tasks call it before they close."""
    return {name: value.clone() for name, value in strategy.state_dict()["model"].items()}


def by_torch(change: str) -> dict[str, Any]:
    """Two epochs, the change, two more."""
    net = Network()
    start, alter = CHANGES[change]
    optimizer = start(net)
    x, y = blobs(EXAMPLES)
    for epoch in range(4):
        if epoch == 2:
            alter(net, optimizer, 0)
        for at in range(0, EXAMPLES, BATCH):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x[at : at + BATCH]), y[at : at + BATCH]).backward()
            optimizer.step()
    return weights(net)


@warns(*SAID)
def by_trainer(name: str, options: dict[str, Any], change: str) -> dict[str, Any]:
    """The same by two calls of `fit`."""
    strategy = make_strategy(name, **options)
    net = Network()
    start, alter = CHANGES[change]
    trainer = sp.Trainer(net, optimizer=start(net), loss=nn.CrossEntropyLoss(), strategy=strategy)
    try:
        trainer.fit(blobs(EXAMPLES), epochs=2, batch_size=BATCH, verbose=0)
        alter(net, trainer.optimizer, strategy.cluster.rank)
        trainer.fit(blobs(EXAMPLES), epochs=2, batch_size=BATCH, verbose=0)
        return whole(strategy)
    finally:
        strategy.close()


@warns(*SAID)
def refusal(name: str, options: dict[str, Any], change: str) -> SpartitoError | None:
    """How `by_trainer` ends on this task."""
    try:
        by_trainer(name, options, change)
    except SpartitoError as error:
        return error
    return None


@warns(*SAID)
def by_hand(name: str, options: dict[str, Any], change: str) -> dict[str, Any]:
    """The same by a loop, which changes the model while a batch is at hand."""
    strategy = make_strategy(name, **options)
    net = Network()
    start, alter = CHANGES[change]
    model, optimizer = strategy.prepare(net, start(net))
    data = strategy.distribute(sp.data.arrays(*blobs(EXAMPLES)).batch(BATCH))
    for epoch in range(4):
        for step, batch in enumerate(data):
            if epoch == 2 and step == 0:
                alter(net, optimizer, strategy.cluster.rank)
            losses = nn.functional.cross_entropy(model(batch.x), batch.y, reduction="none")
            strategy.backward(losses, batch)
            strategy.update(optimizer)
    found = weights(net)
    strategy.close()
    return found


def accumulated_by_torch(
    examples: int, batch: int, accumulate: int, steps: int, epochs: int
) -> dict[str, Any]:
    """Losses and weights of epochs of so many batches, the data read again and again."""
    net = Network()
    optimizer = start_all(net)
    x, y = blobs(examples)

    def endless() -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield from zip(x.split(batch), y.split(batch), strict=True)

    stream, losses = endless(), []
    for _ in range(epochs):
        total = count = 0.0
        for first in range(0, steps, accumulate):
            window = [next(stream) for _ in range(min(accumulate, steps - first))]
            size = sum(len(part) for part, _ in window)
            optimizer.zero_grad()
            for inputs, targets in window:
                loss = nn.functional.cross_entropy(net(inputs), targets, reduction="sum")
                (loss / size).backward()
                total += loss.item()
            count += size
            optimizer.step()
        losses.append(total / count)
    return {"loss": losses, "weights": weights(net)}


@warns(*SAID)
def accumulated(
    name: str,
    options: dict[str, Any],
    examples: int,
    batch: int,
    accumulate: int,
    steps: int,
    epochs: int,
) -> dict[str, Any]:
    """The same by a strategy."""
    strategy = make_strategy(name, **options)
    net = Network()
    trainer = sp.Trainer(
        net,
        optimizer=start_all(net),
        loss=nn.CrossEntropyLoss(),
        strategy=strategy,
        accumulate=accumulate,
    )
    data = sp.data.arrays(*blobs(examples)).batch(batch)
    history = trainer.fit(data, epochs=epochs, steps_per_epoch=steps, verbose=0)
    found = whole(strategy)
    strategy.close()
    return {"loss": history.history["loss"], "weights": found}


def twice_by_torch() -> dict[str, Any]:
    """Two backward passes before each update: means over two batches of other weights, summed."""
    net = Network()
    optimizer = start_all(net)
    x, y = blobs(EXAMPLES)
    weight = torch.tensor([1.0, 2.0, 5.0]).double()
    for inputs, targets in zip(x.split(BATCH), y.split(BATCH), strict=True):
        optimizer.zero_grad(set_to_none=False)
        nn.functional.cross_entropy(net(inputs), targets, weight=weight).backward()
        net(inputs * 2).square().mean().backward()
        nn.functional.cross_entropy(net(-inputs), targets).backward()
        optimizer.step()
    return weights(net)


@warns(*SAID)
def twice(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """The same by a strategy."""
    strategy = make_strategy(name, **options)
    net = Network()
    model, optimizer = strategy.prepare(net, start_all(net))
    weight = torch.tensor([1.0, 2.0, 5.0]).double()
    for batch in strategy.distribute(sp.data.arrays(*blobs(EXAMPLES)).batch(BATCH)):
        optimizer.zero_grad(set_to_none=False)
        losses = nn.functional.cross_entropy(
            model(batch.x), batch.y, weight=weight, reduction="sum"
        )
        strategy.backward((losses, weight[batch.y].sum()), batch)
        strategy.backward(model(batch.x * 2).square().mean(1), batch)
        losses = nn.functional.cross_entropy(model(-batch.x), batch.y, reduction="none")
        strategy.backward(losses, batch)
        strategy.update(optimizer)
    found = whole(strategy)
    strategy.close()
    return found


class Lookup(nn.Module):
    """Once it looks into its table, the gradient of that is sparse."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.table, self.head = nn.Embedding(5, 3, sparse=True), nn.Linear(3, 1)
        self.looks = False

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.table(x) if self.looks else self.table.weight[x])
        return out


def sparse_later(name: str, options: dict[str, Any]) -> str:
    """How a training ends whose gradients become sparse after some updates."""
    strategy, net = make_strategy(name, **options), Lookup()
    trainer = sp.Trainer(
        net,
        optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1),
        loss=nn.MSELoss(),
        strategy=strategy,
    )
    data = torch.arange(16) % 5, torch.ones(16, 1)
    trainer.fit(data, batch_size=4, verbose=0)
    net.looks = True
    try:
        trainer.fit(data, batch_size=4, verbose=0)
    except SpartitoError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        strategy.close()
    return "accepted"


def with_a_whole_weight() -> str:
    """What a trainer on a mesh says of a whole weight in place of a shard."""
    strategy = make_strategy("mesh", model=2)
    net = nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, CLASSES)).double()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    trainer = sp.Trainer(net, optimizer=optimizer, loss=nn.CrossEntropyLoss(), strategy=strategy)
    trainer.fit(blobs(EXAMPLES), batch_size=BATCH, verbose=0)
    net[2].weight = nn.Parameter(torch.ones(CLASSES, 4).double())
    optimizer.param_groups[0]["params"] = list(net.parameters())
    try:
        trainer.fit(blobs(EXAMPLES), batch_size=BATCH, verbose=0)
    except SpartitoError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        strategy.close()
    return "accepted"


def with_another_layer(name: str, options: dict[str, Any]) -> list[str]:
    """What a trainer says whose optimizer has parameters of a layer that the model has no more."""
    strategy, net = make_strategy(name, **options), Network()
    optimizer = start_all(net)
    trainer = sp.Trainer(net, optimizer=optimizer, loss=nn.CrossEntropyLoss(), strategy=strategy)
    data = sp.data.arrays(*blobs(EXAMPLES)).batch(BATCH)
    trainer.fit(data, verbose=0)
    net.body = nn.Sequential(nn.Identity())
    net.head = nn.Linear(FEATURES, CLASSES).double()
    said = []
    for call in (
        lambda: trainer.fit(data, verbose=0),  # the same, whose epochs go on
        lambda: trainer.fit(blobs(EXAMPLES), batch_size=BATCH, verbose=0),
        strategy.state_dict,
    ):
        try:
            call()
        except SpartitoError as error:
            said.append(f"{type(error).__name__}: {error}")
    strategy.close()
    return said
