"""Several optimizers over one model or over a shared trunk, by a strategy and by plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import spartito as sp
from tests.strategies import jobs

EXAMPLES, BATCH, EPOCHS = 22, 8, 2  # the last batch of an epoch has 6 rows

Backward = Callable[[Tensor, Any], None]
Update = Callable[[Optimizer], None]


class Agent(nn.Module):
    """An actor and a critic on one trunk; ``part`` is the head of which the output is asked."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        middle = nn.Linear(8, 8)
        self.trunk = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), middle, nn.Tanh())
        self.actor, self.critic = nn.Linear(8, 8), nn.Linear(8, 1)
        if tied:
            self.actor.weight = middle.weight

    def forward(self, x: Tensor, part: str = "both") -> Any:
        seen = self.trunk(x)
        if part != "both":
            return getattr(self, part)(seen)
        return self.actor(seen), self.critic(seen)


class Headed(nn.Module):
    """A trunk, which others may have too, and a head."""

    def __init__(self, trunk: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.trunk, self.head = trunk, head

    def forward(self, x: Tensor) -> Any:
        return self.head(self.trunk(x))


def data() -> tuple[Tensor, Tensor]:
    x = torch.randn(EXAMPLES, 5, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()


def build(kind: str) -> tuple[Agent, list[tuple[nn.Module, Optimizer]]]:
    """The network that all is in, and the pairs of it."""
    torch.manual_seed(3)
    net = Agent(tied="tied" in kind).double()
    if "frozen" in kind:
        net.trunk[0].requires_grad_(False)
    first, second = (net, net) if "model" in kind else (
        Headed(net.trunk, net.actor), Headed(net.trunk, net.critic)
    )  # fmt: skip
    if "both" in kind:
        ours, theirs = list(first.parameters()), list(second.parameters())
    else:
        ours = [*net.trunk.parameters(), *net.actor.parameters()]
        theirs = list(net.critic.parameters())
        ours = list(dict.fromkeys(ours))
    make = torch.optim.Adafactor if "adafactor" in kind else torch.optim.Adam
    return net, [(first, make(ours, 0.02)), (second, torch.optim.SGD(theirs, 0.1, momentum=0.9))]


def policy_loss(scores: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(scores, y, reduction="none")


def value_loss(values: Tensor, y: Tensor) -> Tensor:
    return (values[:, 0] - y).square()


def step(
    kind: str, models: Sequence[Any], optimizers: Sequence[Any], batch: Any, backward: Backward,
    update: Update,
) -> None:  # fmt: skip
    """One step of each optimizer, written as people write it."""
    x, y = batch.x, batch.y
    if "both" in kind:
        optimizers[0].zero_grad()
        scores = models[0](x, "actor") if "model" in kind else models[0](x)
        backward(policy_loss(scores, y), batch)
        update(optimizers[0])
        optimizers[1].zero_grad()
        values = models[1](x, "critic") if "model" in kind else models[1](x)
        backward(value_loss(values, y), batch)
        update(optimizers[1])
        return
    for optimizer in optimizers:
        optimizer.zero_grad()
    scores, values = models[0](x) if "model" in kind else (models[0](x), models[1](x))
    backward(policy_loss(scores, y) + 0.5 * value_loss(values, y), batch)
    for optimizer in optimizers:
        update(optimizer)


class Rows:
    """A batch for plain torch."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y


def by_torch(kind: str) -> dict[str, Tensor]:
    net, pairs = build(kind)
    x, y = data()

    def update(optimizer: Optimizer) -> None:
        optimizer.step()
        optimizer.zero_grad()

    def batches() -> Iterator[Rows]:
        for rows, targets in zip(x.split(BATCH), y.split(BATCH), strict=True):
            yield Rows(rows, targets)

    for _ in range(EPOCHS):
        for batch in batches():
            models, optimizers = zip(*pairs, strict=True)
            step(kind, models, optimizers, batch, lambda v, _: v.mean().backward(), update)
    return {name: value.detach().clone() for name, value in net.state_dict().items()}


def by_strategy(name: str, options: dict[str, Any], kind: str) -> dict[str, Tensor]:
    strategy = jobs.make_strategy(name, **options)
    net, pairs = build(kind)
    prepared = [strategy.prepare(model, optimizer) for model, optimizer in pairs]
    models, optimizers = zip(*prepared, strict=True)
    for _ in range(EPOCHS):
        for batch in strategy.distribute(sp.data.arrays(*data()).batch(BATCH)):
            step(kind, models, optimizers, batch, strategy.backward, strategy.update)
    found: dict[str, Tensor] = {}
    for (model, _), optimizer in zip(pairs, optimizers, strict=True):
        own = jobs.weights(strategy, model, optimizer)
        if isinstance(model, Headed):
            head = "actor" if model.head is net.actor else "critic"
            own = {key.replace("head", head): value for key, value in own.items()}
        for key, value in own.items():
            torch.testing.assert_close(found.setdefault(key, value), value, rtol=0, atol=0)
    strategy.close()
    return found


def joint(name: str, options: dict[str, Any]) -> None:
    """One loss for two optimizers that both have the trunk."""
    strategy = jobs.make_strategy(name, **options)
    _, pairs = build("model-both")
    prepared = [strategy.prepare(model, optimizer) for model, optimizer in pairs]
    for batch in strategy.distribute(sp.data.arrays(*data()).batch(BATCH)):
        scores, values = prepared[0][0](batch.x)
        strategy.backward(policy_loss(scores, batch.y) + value_loss(values, batch.y), batch)
        for _, optimizer in prepared:
            strategy.update(optimizer)


def waiting(name: str, options: dict[str, Any]) -> dict[str, Tensor]:
    """Two weighted backward passes for an update, beside an optimizer that is used no more."""
    strategy = jobs.make_strategy(name, **options)
    net, _ = build("model-both")
    strategy.prepare(net, torch.optim.Adam(net.parameters(), 0.02))
    model, optimizer = strategy.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
    for batch in strategy.distribute(sp.data.arrays(*data()).batch(BATCH)):
        for weight in (0.25, 3.0):
            losses = policy_loss(model(batch.x)[0], batch.y)
            strategy.backward((losses.sum() * weight, batch.size * weight), batch)
        strategy.update(optimizer)
    found = jobs.weights(strategy, net, optimizer)
    strategy.close()
    return found


def waiting_by_torch() -> dict[str, Tensor]:
    net, _ = build("model-both")
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    x, y = data()
    for rows, targets in zip(x.split(BATCH), y.split(BATCH), strict=True):
        optimizer.zero_grad()
        (2 * policy_loss(net(rows)[0], targets).mean()).backward()
        optimizer.step()
    return net.state_dict()


def phases(name: str, options: dict[str, Any]) -> dict[str, Tensor]:
    """A head is trained first, then all of the network, by another trainer and optimizer."""
    strategy = jobs.make_strategy(name, **options)
    net = _network()
    chain = sp.data.arrays(*data()).batch(BATCH)
    for phase in range(2):
        for parameter in net[0].parameters():
            parameter.requires_grad_(phase == 1)
        learn = [parameter for parameter in net.parameters() if parameter.requires_grad]
        made = torch.optim.SGD(learn, 0.1, momentum=0.9)
        trainer = sp.Trainer(net, optimizer=made, loss=nn.CrossEntropyLoss(), strategy=strategy)
        trainer.fit(chain, epochs=EPOCHS, verbose=0)
    found = jobs.weights(strategy, net, made)
    strategy.close()
    return found


def phases_by_torch() -> dict[str, Tensor]:
    net = _network()
    x, y = data()
    for phase in range(2):
        learn = list(net.parameters() if phase else net[2].parameters())
        optimizer = torch.optim.SGD(learn, 0.1, momentum=0.9)
        for _ in range(EPOCHS):
            for rows, targets in zip(x.split(BATCH), y.split(BATCH), strict=True):
                net.zero_grad()
                nn.functional.cross_entropy(net(rows), targets).backward()
                optimizer.step()
    return net.state_dict()


def _network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def apart(kind: str, outer: dict[str, float]) -> dict[str, Tensor]:
    """Two groups that meet after each update, of optimizers without a state."""
    strategy = sp.strategy("local_sgd", groups=2, every=1, outer=outer)
    net, pairs = build(kind)
    plain = [(m, torch.optim.SGD(o.param_groups[0]["params"], 0.1)) for m, o in pairs]
    prepared = [strategy.prepare(model, optimizer) for model, optimizer in plain]
    models, optimizers = zip(*prepared, strict=True)
    for _ in range(EPOCHS):
        for batch in strategy.distribute(sp.data.arrays(*data()).batch(BATCH)):
            step(kind, models, optimizers, batch, strategy.backward, strategy.update)
    strategy.close()
    return {name: value.detach().clone() for name, value in net.state_dict().items()}


def apart_by_torch(kind: str, outer: dict[str, float]) -> dict[str, Tensor]:
    """DiLoCo's outer update after each inner one, of each optimizer's own parameters."""
    net, pairs = build(kind)
    given = [optimizer.param_groups[0]["params"] for _, optimizer in pairs]
    inner = [torch.optim.SGD(each, 0.1) for each in given]
    starts = [[p.detach().clone().requires_grad_() for p in each] for each in given]
    settings = {"lr": outer["lr"], "momentum": outer["momentum"], "nesterov": True}
    outers = [torch.optim.SGD(each, **settings) for each in starts]  # type: ignore[arg-type]
    models = [model for model, _ in pairs]

    def update(optimizer: Optimizer) -> None:
        optimizer.step()
        optimizer.zero_grad()
        turn = inner.index(optimizer)  # type: ignore[arg-type]
        for start, parameter in zip(starts[turn], given[turn], strict=True):
            start.grad = start.detach() - parameter.detach()
        outers[turn].step()
        with torch.no_grad():
            for start, parameter in zip(starts[turn], given[turn], strict=True):
                parameter.copy_(start)

    x, y = data()
    for _ in range(EPOCHS):
        for rows, targets in zip(x.split(BATCH), y.split(BATCH), strict=True):
            batch = Rows(rows, targets)
            step(kind, models, inner, batch, lambda v, _: v.mean().backward(), update)
    return {name: value.detach().clone() for name, value in net.state_dict().items()}


def refused_before() -> list[str]:
    """Trainers in a pipeline: one whose model changes after its first epoch, then another."""
    strategy = sp.strategy("pipeline")
    chain = sp.data.arrays(*data()).batch(BATCH)
    found = []
    for changes in (True, False):
        net = _network()
        made = torch.optim.SGD(net.parameters(), 0.1)
        trainer = sp.Trainer(net, optimizer=made, loss=nn.CrossEntropyLoss(), strategy=strategy)
        trainer.fit(chain, epochs=1, verbose=0)
        try:
            if changes:
                net.register_parameter("more", nn.Parameter(torch.zeros(1)))
            trainer.fit(chain, epochs=2, verbose=0)
            found.append("trained")
        except sp.UserError as error:
            found.append(str(error))
    strategy.close()
    return found
