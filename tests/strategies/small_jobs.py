"""Models that do not like batches without rows, or of one row; by a strategy and by torch alone."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import spartito as sp
from tests.engine import norms
from tests.replicas import warns
from tests.strategies.changing_jobs import weights
from tests.strategies.jobs import make_strategy


class Viewing(nn.Module):
    """Reshapes by ``-1``, which torch cannot do without rows, and normalizes twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first: nn.Module = nn.Conv2d(1, 3, 3)
        self.norm: nn.Module = nn.BatchNorm2d(3)
        self.middle = nn.Linear(12, 5)
        self.norm2 = nn.BatchNorm1d(5)
        self.head = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.first(x)))
        x = self.middle(x.view(x.size(0), -1))
        out: Tensor = self.head(torch.tanh(self.norm2(x)))
        return out


class Seeing(nn.Linear):
    """Keeps the mean of its output in a buffer, which it sets."""

    def __init__(self) -> None:
        super().__init__(16, 4)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.seen = out.detach().mean(0)
        return out


def model(kind: str) -> nn.Module:
    torch.manual_seed(4)
    if kind == "own norms":
        net = Viewing()
        net.norm = norms.BatchNormAct2d(3)
        net.first = nn.Sequential(net.first, norms.Instances(3), norms.Around(3))
        return net.double()
    if kind == "sets a buffer":
        return nn.Sequential(nn.Flatten(), Seeing(), nn.Tanh(), nn.Linear(4, 2)).double()
    if kind == "spectral":
        spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(16, 4))
        return nn.Sequential(nn.Flatten(), spectral, nn.Tanh(), nn.Linear(4, 2)).double()
    if kind == "one value per channel":
        flat = nn.Sequential(nn.Flatten(), nn.Linear(16, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        return flat.double()
    return Viewing().double()


def whole(strategy: sp.Strategy) -> dict[str, Tensor]:
    """The model's values, of which no task may have all; all tasks call it."""
    values = strategy.state_dict()["model"]
    return {name: value.detach().clone() for name, value in values.items()}


def data(examples: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(8)
    x = torch.randn(examples, 1, 4, 4, generator=generator, dtype=torch.float64)
    return x, (x.mean((1, 2, 3)) > 0).long()


def by_torch(
    kind: str, examples: int, batch: int, epochs: int = 2, rows: int | None = None
) -> dict[str, Tensor]:
    """Batches whole, or in parts of so many rows whose gradients are accumulated."""
    net = model(kind)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    for _ in range(epochs):
        for x, y in zip(*(part.split(batch) for part in data(examples)), strict=True):
            optimizer.zero_grad()
            for part, right in zip(x.split(rows or batch), y.split(rows or batch), strict=True):
                loss = nn.functional.cross_entropy(net(part), right, reduction="sum")
                (loss / len(x)).backward()
            optimizer.step()
    return weights(net)


@warns("a batch of .* rows leaves", r"\d+ tensors stay whole", "the buffer")
def by_trainer(
    name: str,
    options: dict[str, Any],
    kind: str,
    examples: int,
    batch: int,
    epochs: int = 2,
    deterministic: bool = True,
    stream: bool = False,
) -> dict[str, Tensor]:
    strategy = make_strategy(name, **options)
    net = model(kind)
    trainer = sp.Trainer(
        net,
        optimizer=torch.optim.SGD(net.parameters(), 0.1, momentum=0.9),
        loss=nn.CrossEntropyLoss(),
        metrics=["accuracy"],
        strategy=strategy,
        deterministic=deterministic,
    )
    x, y = data(examples)
    given: Any = sp.data.arrays(x, y).batch(batch)
    if stream:
        given = torch.utils.data.TensorDataset(x, y)
    try:
        trainer.fit(given, epochs=epochs, batch_size=batch, verbose=0)
        strategy.synchronize()
        return whole(strategy)
    finally:
        strategy.close()


@warns(r"\d+ tensors stay whole", "the buffer")
def by_single_rows(name: str, options: dict[str, Any], kind: str) -> dict[str, Any]:
    """An evaluation and a prediction of batches of one row: most replicas have none."""
    x, y = data(5)
    with make_strategy(name, **options) as strategy:
        trainer = sp.Trainer(
            model(kind), optimizer=partial(torch.optim.SGD, lr=0.1), loss=nn.CrossEntropyLoss(),
            metrics=["accuracy"], strategy=strategy,
        )  # fmt: skip
        figures = trainer.evaluate(sp.data.arrays(x, y).batch(1))
        return {**figures, "output": trainer.predict(sp.data.arrays(x).batch(1))}


def single_rows_by_torch(kind: str) -> dict[str, Any]:
    net, (x, y) = model(kind).eval(), data(5)
    with torch.no_grad():
        output = net(x)
    loss = nn.functional.cross_entropy(output, y)
    accuracy = (output.argmax(1) == y).double().mean()
    return {"loss": loss.item(), "accuracy": accuracy.item(), "output": output}


class Asking(nn.Module):
    """Normalizes by what it asks of all replicas in its forward pass, after a dropout."""

    def __init__(self, strategy: sp.Strategy) -> None:
        super().__init__()
        self.ask, self.first, self.head = strategy.reduce, nn.Linear(16, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        found = nn.functional.dropout(torch.tanh(self.first(x.flatten(1))), 0.3, self.training)
        seen = found.detach()
        count = self.ask("sum", seen.new_tensor(float(len(seen))))
        mean = self.ask("sum", seen.sum(0)) / count + 0.1 * self.ask("mean", seen)
        alike = self.ask("min", torch.ones((), dtype=torch.bool))
        out: Tensor = self.head((found - mean) / (self.ask("max", seen.amax()) + 2.0))
        return out * alike


def asking(name: str) -> list[float]:
    """Losses of a deterministic training, in whose first batch most replicas have no row."""
    strategy = make_strategy(name)
    torch.manual_seed(4)
    net = Asking(strategy).double()
    rows = torch.utils.data.TensorDataset(*data(9))
    loader = torch.utils.data.DataLoader(rows, batch_sampler=[[0], [*range(1, 9)]])
    trainer = sp.Trainer(
        net,
        optimizer=torch.optim.SGD(net.parameters(), 0.1),
        loss=nn.CrossEntropyLoss(),
        strategy=strategy,
        deterministic=True,
    )
    history = trainer.fit(loader, epochs=2, validation_data=loader, verbose=0).history
    strategy.close()
    return [*history["loss"], *history["val_loss"]]
