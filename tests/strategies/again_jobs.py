"""Models that are trained more than once: what was true of the first time may not be."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import spartito as sp
from spartito.errors import UserError
from spartito.strategies import Strategy
from tests.replicas import warns
from tests.strategies.jobs import make_strategy

FEATURES, BATCH = 4, 8
SAID = (
    "no tensor of the model is cut",
    r"\d+ tensors stay whole",
    "every=",
    "a loss that compares",
)


def data(count: int = BATCH) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(count, FEATURES, generator=generator, dtype=torch.float64)
    return x, x.sum(1, keepdim=True)


def normalized(norm: nn.Module | None = None) -> nn.Sequential:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(6) if norm is None else norm
    layers = nn.Linear(FEATURES, 6), norm, nn.ReLU(), nn.Linear(6, 1)
    return nn.Sequential(*layers).double()


def trainer(net: nn.Module, strategy: Strategy, exact: bool, rate: float = 0.0) -> sp.Trainer:
    return sp.Trainer(
        net,
        optimizer=lambda parameters: torch.optim.SGD(parameters, rate),
        loss=nn.MSELoss(),
        strategy=strategy,
        deterministic=exact,
        seed=5,
    )


@warns(*SAID)
def in_turn(name: str, options: dict[str, Any]) -> list[float]:
    """The losses of one model with BatchNorm in two trainings by turns: exact, and not."""
    strategy, net, found = make_strategy(name, **options), normalized(), list[float]()
    trainers = [trainer(net, strategy, exact) for exact in (True, False)]
    try:
        for each in (*trainers, *trainers):
            found += each.fit(sp.data.arrays(*data()).batch(BATCH), verbose=0).history["loss"]
    finally:
        strategy.close()
    return found


def loss_of_parts(parts: int) -> float:
    """The loss where each of so many parts of the batch is normalized by itself, by torch."""
    net, (x, y) = normalized(), data()
    output = torch.cat([net(part) for part in x.chunk(parts)])
    return F.mse_loss(output, y).item()


class Again(nn.Module):
    """Its loss is linear in its one weight: weight times gradient, if both drew the same."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = checkpoint(lambda x: self.drop(x) * self.weight, x, use_reentrant=False)
        return made


@warns(*SAID)
def drawn_again(name: str, options: dict[str, Any]) -> list[tuple[float, float]]:
    """Loss by weight, and gradient, of an exact training and of one that is not."""
    strategy, net, found = make_strategy(name, **options), Again(), []
    torch.manual_seed(3)
    try:
        for exact in (True, False, True):
            made = sp.Trainer(
                net,
                optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1),
                loss=lambda output, _: output.mean(1),
                strategy=strategy,
                deterministic=exact,
            )
            values = []
            for _ in range(2):
                with strategy.using(made.optimizer):
                    values.append(strategy.state_dict()["model"]["weight"].item())
                if len(values) == 1:
                    rows = sp.data.arrays(*data()).batch(BATCH)
                    loss = made.fit(rows, verbose=0).history["loss"][0]
            found.append((loss / values[0], (values[0] - values[1]) / 0.1))
    finally:
        strategy.close()
    return found


@warns(*SAID)
def by_hand(name: str, options: dict[str, Any], first: bool) -> float:
    """A loop of one's own that is not exact; ``first`` another was, of another model."""
    strategy, found = make_strategy(name, **options), 0.0
    rows = sp.data.arrays(*data(16)).batch(BATCH)
    for exact in (True, False) if first else (False,):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(FEATURES, 4), Inside(), nn.Linear(4, 1)).double()
        model, optimizer = strategy.prepare(
            net, torch.optim.SGD(net.parameters(), 0.1), deterministic=exact
        )
        for batch in strategy.distribute(rows):
            output = model(batch.x)
            strategy.backward(F.mse_loss(output, batch.y) if exact else contrast(output), batch)
            strategy.update(optimizer)
        found = sum(parameter.sum().item() for parameter in net.parameters())
    strategy.close()
    return found


class Inside(nn.Module):
    """Dropout that is computed again in backward."""

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = checkpoint(lambda x: F.dropout(x, 0.5), x, use_reentrant=False)
        return made


def contrast(output: Tensor) -> Tensor:
    """A loss that compares examples with each other."""
    rows = F.normalize(torch.cat([output, output + 1], 1), dim=1)
    return F.cross_entropy(rows @ rows.T, torch.arange(len(rows)))


def new_norm(tracks: bool) -> nn.Module:
    return nn.BatchNorm1d(6, affine=False, track_running_stats=tracks).double()


@warns(*SAID)
def norm_put_in(
    name: str, options: dict[str, Any], loop: str, tracks: bool = True, exact: bool = True
) -> dict[str, Tensor] | str:
    """The model after an epoch, and after one more with a norm that has no parameters.

    Or what is said of that.
    """
    strategy, net = make_strategy(name, **options), normalized(nn.Identity())
    rows = sp.data.arrays(*data(2 * BATCH)).batch(BATCH)
    made = trainer(net, strategy, exact, 0.05)
    data_of_loop: Iterable[Any] = strategy.distribute(rows)
    try:
        for epoch in range(2):
            if epoch:
                net[1] = new_norm(tracks)
            if loop == "fit":
                made.fit(rows, verbose=0)
                continue
            for batch in data_of_loop:
                losses = F.mse_loss(made.model(batch.x), batch.y, reduction="none").mean(1)
                strategy.backward(losses, batch)
                strategy.update(made.optimizer)
        return {key: value.clone() for key, value in strategy.state_dict()["model"].items()}
    except UserError as error:
        return str(error)
    finally:
        strategy.close()


def norm_put_in_by_torch(tracks: bool = True) -> dict[str, Tensor]:
    net, (x, y) = normalized(nn.Identity()), data(2 * BATCH)
    optimizer = torch.optim.SGD(net.parameters(), 0.05)
    for epoch in range(2):
        if epoch:
            net[1] = new_norm(tracks)
        for at in range(0, len(x), BATCH):
            optimizer.zero_grad()
            F.mse_loss(net(x[at : at + BATCH]), y[at : at + BATCH]).backward()
            optimizer.step()
    return {key: value.detach().clone() for key, value in net.state_dict().items()}


@warns(*SAID)
def in_turns(name: str, options: dict[str, Any], beside: bool | None) -> list[float]:
    """What an exact loop ends with whose batches come in turns with those of another strategy.

    Args:
        name: Of the strategy.
        options: Its options.
        beside: Whether the other one is exact, too; None: there is none.
    """
    strategy = make_strategy(name, **options)
    alone = sp.OneDeviceStrategy(cluster=sp.ClusterSpec.alone())
    rows, found = sp.data.arrays(*data(2 * BATCH)).batch(BATCH), list[float]()

    def prepared(here: Strategy, exact: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
        net = nn.Sequential(normalized(), nn.Dropout(0.5), nn.Linear(1, 1)).double()
        for parameter in net.parameters():
            nn.init.constant_(parameter, 0.3)
        return here.prepare(net, torch.optim.SGD(net.parameters(), 0.1), deterministic=exact)

    with strategy, alone:
        loops = [(strategy, *prepared(strategy, True), iter(strategy.distribute(rows)))]
        if beside is not None:
            loops.append((alone, *prepared(alone, beside), iter(alone.distribute(rows))))
        for _ in range(2):
            batches = [next(stream) for *_, stream in loops]
            for (here, net, optimizer, _), batch in zip(loops, batches, strict=True):
                losses = F.mse_loss(net(batch.x), batch.y, reduction="none").mean(1)
                here.backward(losses, batch)
                here.update(optimizer)
        for _, net, *_ in loops:
            found.append(sum(value.sum().item() for value in net.state_dict().values()))
        for *_, stream in loops:
            stream.close()
    return found


class Noisy(nn.Module):
    """It drops of its weight, or of its input, by one and the same line."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.of_weight = nn.Linear(FEATURES, FEATURES), True
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        weight = self.layer.weight
        dropped = F.dropout(weight if self.of_weight else x, 0.5, self.training)
        output = F.linear(x, dropped) if self.of_weight else F.linear(dropped, weight)
        return output.sum(1, keepdim=True)


@warns(*SAID)
def draws_something_else(name: str, options: dict[str, Any]) -> list[float]:
    """Losses of a model that drops of its weight, and of as many rows in the next training."""
    strategy, net, found = make_strategy(name, **options), Noisy(), list[float]()
    made = trainer(net, strategy, True)
    try:
        for net.of_weight in (True, False):
            found += made.fit(sp.data.arrays(*data()).batch(BATCH), verbose=0).history["loss"]
    finally:
        strategy.close()
    return found


def in_pipelines(stages: int) -> str | float:
    """The loss of a model in a pipeline that another strategy has trained, or why there is none."""
    net = normalized()
    with make_strategy("mirrored") as strategy:
        trainer(net, strategy, True).fit(sp.data.arrays(*data()).batch(BATCH), verbose=0)
    with make_strategy("pipeline", stages=stages, microbatches=1) as strategy:
        try:
            made = trainer(net, strategy, True)
            fitted = made.fit(sp.data.arrays(*data()).batch(BATCH), verbose=0)
            return float(fitted.history["loss"][0])
        except UserError as error:
            return str(error)
