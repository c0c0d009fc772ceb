"""Nested strategies beside plain torch, in double precision: each task's part, and the oracle."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import spartito as sp
from tests.replicas import warns
from tests.strategies.jobs import blobs
from tests.strategies.local_by_torch import rows_of

EXAMPLES, BATCH, ACCUMULATE, CLIP = 22, 8, 2, 0.3
"""Three batches an epoch, the last one smaller: one update of two, one of what is left."""

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.2, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 0.02),
}


def network() -> nn.Sequential:
    """Layers that are cut, and norms that are not."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 6), nn.LayerNorm(6),
        nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3),
    ).double()  # fmt: skip


@warns("every=")
def trained(
    text: str, optimizer: str, epochs: Sequence[int], load: str = "", save: str = ""
) -> dict[str, Any]:
    """The loss of each update and the weights after some epochs, from and to a checkpoint."""
    strategy = sp.strategy(text, timeout=20)
    strategy.prepare(network(), OPTIMIZERS[optimizer], accumulate=ACCUMULATE, clip_norm=CLIP)
    x, y = blobs(EXAMPLES)
    data = strategy.distribute(sp.data.arrays(x, y).batch(BATCH))
    results: list[Any] = []
    if load:
        strategy.load(load)
    for _ in epochs:
        for batch in data:
            results.append(strategy.step(batch, nn.CrossEntropyLoss()))
        results.append(strategy.flush())
    updates = [each for each in results if each is not None and float(each.weight)]
    losses = [float(each.loss) / float(each.weight) for each in updates]
    found = {}
    if not (save and strategy.name == "parameter_server"):  # groups give their states once
        found = {name: value.clone() for name, value in strategy.state_dict()["model"].items()}
    if save:
        if strategy.is_chief:
            Path(save).mkdir(parents=True)
        strategy.save(Path(save))
    strategy.close()
    return {"losses": losses, "weights": found}


def fit_by_trainer(text: str) -> dict[str, Any]:
    """A training with a batch of one row, which evaluates, and goes back to its best weights."""
    strategy = sp.strategy(text, timeout=20)
    x, y = blobs(17)
    trainer = sp.Trainer(
        network(),
        optimizer=OPTIMIZERS["adamw"],
        loss=nn.CrossEntropyLoss(),
        strategy=strategy,
    )
    best = sp.callbacks.EarlyStopping(patience=9, restore_best_weights=True)
    history = trainer.fit(
        (x, y), epochs=4, batch_size=8, validation_data=(x[:9], y[:9]), callbacks=[best], verbose=0
    )
    found = {name: value.clone() for name, value in strategy.state_dict()["model"].items()}
    predicted = trainer.predict(x[:3], batch_size=3)
    strategy.close()
    logs = {name: history.history[name] for name in ("loss", "val_loss")}
    return {"weights": found, "logs": logs, "predicted": predicted}


def by_torch(
    optimizer: str, epochs: int, groups: int = 1, every: int = 1
) -> tuple[list[list[float]], dict[str, Tensor]]:
    """The same by plain torch: one model for each group, and their mean every so many updates.

    Returns:
        The losses of each group, and the weights in the end.
    """
    x, y = blobs(EXAMPLES)
    nets = [copy.deepcopy(network()) for _ in range(groups)]
    optimizers = [OPTIMIZERS[optimizer](net.parameters()) for net in nets]
    losses: list[list[float]] = [[] for _ in nets]
    since, eaten = 0, [0.0] * groups

    def merge() -> None:
        nonlocal since, eaten
        for same in zip(*(net.parameters() for net in nets), strict=True):
            mean = sum(p.detach() * e for p, e in zip(same, eaten, strict=True)) / sum(eaten)
            for parameter in same:
                parameter.detach().copy_(mean)
        since, eaten = 0, [0.0] * groups

    for _ in range(epochs):
        firsts = range(0, EXAMPLES, BATCH)
        for at in range(0, len(firsts), ACCUMULATE):
            for number, (net, own) in enumerate(zip(nets, optimizers, strict=True)):
                rows = []
                for first in firsts[at : at + ACCUMULATE]:
                    whole = range(first, min(first + BATCH, EXAMPLES))
                    rows += rows_of([[g] for g in range(groups)], number, whole, BATCH)
                own.zero_grad()
                loss = nn.functional.cross_entropy(net(x[rows]), y[rows])
                loss.backward()
                nn.utils.clip_grad_norm_(net.parameters(), CLIP)
                own.step()
                losses[number].append(loss.item())
                eaten[number] += len(rows)
            since += 1
            if groups > 1 and since == every:
                merge()
        if groups > 1 and since:
            merge()
    return losses, dict(nets[0].state_dict())
