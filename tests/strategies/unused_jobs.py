"""Models whose parameters do not all get a gradient, under DDP and by torch alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import spartito as sp
from spartito.engine.gradients.ddp_gradients import Overlapped
from tests.strategies.changing_jobs import weights


class Branches(nn.Module):
    """Two layers of which a pass may take one: by the ``pass_`` or by the replica's ``rank``."""

    def __init__(self, kind: str, rank: int = 0) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(4, 3).double(), nn.Linear(4, 3).double()
        self.kind, self.rank, self.passes = kind, rank, 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        both: Tensor = self.first(x)
        left_out = {
            "never": False,
            "always": True,
            "later": self.passes > 3,
            "rank": self.rank,
            "end": self.passes == 6,  # the last batch of all
        }
        return both if left_out[self.kind] else both + self.second(x)


def data() -> tuple[Tensor, Tensor]:
    x = torch.randn(24, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return x, torch.arange(24) % 3


def train(
    kind: str, options: dict[str, Any], accumulate: int = 1
) -> tuple[dict[str, Tensor], bool, str]:
    """The weights after six batches under DDP, whether it searches, and the error if any."""
    strategy = sp.strategy("mirrored", communication="ddp", **options)
    net = Branches(kind, strategy.cluster.rank)
    trainer = sp.Trainer(
        net,
        optimizer=torch.optim.SGD(net.parameters(), 0.1),
        loss=nn.CrossEntropyLoss(),
        strategy=strategy,
        accumulate=accumulate,
    )
    error = ""
    try:
        trainer.fit(data(), epochs=1, batch_size=4, verbose=0)
    except sp.UserError as caught:
        error = str(caught)
    assert isinstance(trainer.model, Overlapped)
    searches = trainer.model.finds_unused
    strategy.close()
    return weights(net), searches, error


def by_torch(kind: str, accumulate: int = 1) -> dict[str, Tensor]:
    net = Branches(kind)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for number, (x, y) in enumerate(zip(*(part.split(4) for part in data()), strict=True), 1):
        output = net(x)
        if kind == "rank":  # the second replica, with the second half of the rows
            output = torch.cat([output[:2], net.first(x[2:])])
        (nn.functional.cross_entropy(output, y) / accumulate).backward()
        if number % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    return weights(net)


def accumulating() -> list[float]:
    """A sum over the gradient after each of two batches that make one update."""
    strategy = sp.strategy("mirrored", communication="ddp")
    net = Branches("never")
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    strategy.prepare(net, optimizer, accumulate=3)
    seen = []
    loss = nn.CrossEntropyLoss()
    for batch in strategy.distribute(sp.data.arrays(*data()).batch(4)):
        strategy.step(batch, loss)
        if net.first.weight.grad is not None:
            seen.append(float(net.first.weight.grad.abs().sum()))
    strategy.close()
    return seen
