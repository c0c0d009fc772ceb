"""Weights alone: written under any strategy, read by torch, and loaded from files of others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import spartito as sp
from tests.replicas import warns
from tests.strategies.jobs import FEATURES, blobs, make_strategy, weights


class Tied(nn.Module):
    """Two names of one tensor, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Linear(FEATURES, FEATURES)
        self.second = nn.Linear(FEATURES, FEATURES)
        self.second.weight = self.first.weight
        self.head = nn.Linear(FEATURES, 4)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.second(torch.relu(self.first(x))) * self.scale)
        return found


def trainer_of(name: str, options: dict[str, Any]) -> sp.Trainer:
    return sp.Trainer(
        Tied().double(), optimizer=lambda p: torch.optim.AdamW(p, 0.01), seed=3,
        loss=nn.CrossEntropyLoss(), strategy=make_strategy(name, **options),
    )  # fmt: skip


@warns("every=")
def save(name: str, options: dict[str, Any], folder: Path) -> tuple[str, dict[str, Tensor]]:
    """Trains and saves; the file's name and what is in the model."""
    trainer = trainer_of(name, options)
    trainer.fit(sp.data.arrays(*blobs(20)).batch(8), verbose=0)
    file = trainer.save_weights(folder / "of-{epoch:02d}.safetensors")
    trainer.save_weights(file)  # in place of what is there
    trainer.save(folder / "checkpoint")
    found = weights(trainer.strategy, trainer.model)
    trainer.strategy.close()
    return str(file), found


@warns("every=")
def load(name: str, options: dict[str, Any], files: dict[str, Path]) -> list[Any]:
    """What is in the model after each of the files, and what was not loaded."""
    trainer = trainer_of(name, options)
    found: list[Any] = []
    for file in files.values():
        if name != "parameter_server":  # whose values are on the servers
            with torch.no_grad():
                for parameter in trainer.model.parameters():
                    parameter.mul_(0.5)
        left = trainer.load_weights(file, strict="part" not in file.name)
        found.append((weights(trainer.strategy, trainer.model), list(left)))
    trainer.fit(sp.data.arrays(*blobs(20)).batch(8), verbose=0)
    trainer.strategy.close()
    return found


def load_own(name: str, folder: Path) -> None:
    """Load a file with the shapes of the others' and other values."""
    with make_strategy(name) as strategy:
        net = nn.Linear(2, 2)
        file = folder / f"{strategy.cluster.rank}.pt"
        torch.save(
            {key: value + strategy.cluster.rank for key, value in net.state_dict().items()}, file
        )
        sp.Trainer(net, strategy=strategy).load_weights(file)
