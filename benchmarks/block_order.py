"""Validation accuracy on digits that lie sorted by class, by how they are shuffled."""

from __future__ import annotations

import statistics

import torch
from torch import nn

import spartito as sp
from benchmarks.common import (
    Figure,
    announce,
    conclude,
    flush_denormals,
    parser,
    positive,
    progress,
)
from spartito.data.dataset import Dataset
from spartito.data.reading.order import Indices
from spartito.data.sets.packaged import split_digits


class Sorted(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """The digits, all of a class behind one another, in blocks as a packed file has them."""

    def __init__(self, size: int) -> None:
        (x, y), _ = split_digits()
        order = y.argsort(kind="stable")
        self.x = torch.from_numpy(x[order]).float().div_(255)
        self.y = torch.from_numpy(y[order]).long()
        self._edges = torch.tensor([*range(0, len(y), size), len(y)]).numpy()

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index], self.y[index]

    def gather(self, indices: slice | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Many of them at once."""
        return self.x[indices], self.y[indices]

    @property
    def edges(self) -> Indices:
        """As `BlockSource.edges`."""
        return self._edges

    def expect(self, blocks: object, live: int) -> None:
        """All of it is in memory."""


def accuracy(train: Dataset, seed: int, epochs: int, falls: bool) -> float:
    """Of the small network of the recipe, in percent."""
    torch.manual_seed(seed)
    net = sp.models.MnistMLP()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    steps = epochs * len(train.batch(64))

    def rate(step: int) -> float:
        return 1 - min(step / steps, 1) if falls else 1.0

    trainer = sp.Trainer(
        net,
        optimizer=optimizer,
        loss=nn.CrossEntropyLoss(),
        metrics=["accuracy"],
        scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, rate),
        seed=seed,
    )
    trainer.fit(train.batch(64), epochs=epochs, verbose=False)
    found = trainer.evaluate(sp.data.digits("validation").batch(500))
    return 100 * float(found["accuracy"])


def main() -> None:
    """Print the mean accuracy of each order, and how far it is from a full permutation."""
    assert __doc__ is not None
    options = parser(__doc__, rounds=5)
    options.add_argument("--epochs", type=positive, default=5)
    options.add_argument("--constant", action="store_true", help="the rate does not fall to 0")
    options.add_argument("--size", type=positive, default=100, help="examples of a block")
    given = options.parse_args()
    here = announce(__doc__)
    flush_denormals()
    source = Sorted(given.size)
    whole = sp.data.arrays(source.x, source.y)
    orders = {"all permuted": whole.shuffle()}
    orders |= {f"blocks={blocks}": Dataset(source).shuffle(blocks=blocks) for blocks in (32, 16, 8)}
    orders["not shuffled"] = whole
    found: dict[str, list[float]] = {name: [] for name in orders}
    for seed in range(given.rounds):
        for name, train in orders.items():
            found[name].append(accuracy(train, seed, given.epochs, not given.constant))
        progress(seed, given.rounds, {name: values[-1] for name, values in found.items()}, "%")
    means = {name: statistics.mean(values) for name, values in found.items()}
    figures = [Figure(name, mean, measure="%") for name, mean in means.items()]
    for name in ("blocks=32", "blocks=16", "blocks=8"):
        lost = means["all permuted"] - means[name]
        figures.append(Figure(f"all permuted less {name}", lost, 0.2, "<=", "points"))
    conclude(here, figures, given.json, accuracies=found)


if __name__ == "__main__":
    main()
