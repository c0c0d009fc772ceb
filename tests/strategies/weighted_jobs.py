"""Trainings whose examples have weights, and that end with a given step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import spartito as sp
from tests.replicas import warns
from tests.strategies.jobs import blobs, make_strategy, mlp, weights

LOSSES: dict[str, Any] = {
    "mean": nn.CrossEntropyLoss(),
    "weighted": nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 5.0]).double(), ignore_index=2),
    "each": lambda out, y: nn.functional.cross_entropy(out, y, reduction="none"),
    "elements": nn.MSELoss(),
}
OF_CLASSES = {0: 0.5, 1: 3.0, 2: 1.0}


def data(loss: str, count: int = 45) -> tuple[Tensor, Tensor, Tensor]:
    x, y = blobs(count)
    if loss == "elements":
        y = nn.functional.one_hot(y, 3).double()
    return x, y, torch.linspace(0.0, 3.0, count).double()


@warns("every=")
def fit(
    name: str, options: dict[str, Any], loss: str = "mean", given: str = "third"
) -> dict[str, Any]:
    """Losses, weights and an evaluation of a training with weighted examples."""
    strategy = make_strategy(name, **options)
    net = mlp()
    trainer = sp.Trainer(
        net, optimizer=lambda p: torch.optim.SGD(p, 0.1), loss=LOSSES[loss], strategy=strategy,
    )  # fmt: skip
    x, y, w = data(loss)
    asked: dict[str, Any] = {"epochs": 2, "verbose": 0, "batch_size": 7}
    if given == "third":
        history = trainer.fit(sp.data.arrays(x, y, w).batch(7), **{**asked, "batch_size": 7})
    elif given == "argument":
        history = trainer.fit((x, y), sample_weight=w, **asked)
    else:
        history = trainer.fit((x, y), sample_weight=w, class_weight=OF_CLASSES, **asked)
    figures = trainer.evaluate((x, y, w), batch_size=7)
    found = weights(strategy, net)
    strategy.close()
    return {"loss": history.history["loss"], "weights": found, "val": figures["loss"]}


def by_torch(loss: str, given: str) -> dict[str, Any]:
    """The same by plain torch."""
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    x, y, w = data(loss)
    own = w * torch.tensor([*OF_CLASSES.values()]).double()[y] if given == "classes" else w

    def sums(rows: slice, w: Tensor) -> tuple[Tensor, float]:
        out, labels = net(x[rows]), y[rows]
        if loss == "elements":
            return ((out - labels).square().mean(1) * w[rows]).sum(), len(labels)
        if loss == "weighted":
            of_class = torch.tensor([1.0, 2.0, 0.0]).double()[labels]
            each = nn.functional.cross_entropy(out, labels, reduction="none") * of_class
            return (each * w[rows]).sum(), float(of_class.sum())
        each = nn.functional.cross_entropy(out, labels, reduction="none")
        return (each * w[rows]).sum(), len(labels)

    batches = [slice(start, start + 7) for start in range(0, len(x), 7)]
    losses = []
    for _ in range(2):
        total = divisor = 0.0
        for rows in batches:
            found, size = sums(rows, own)
            optimizer.zero_grad()
            (found / size).backward()
            optimizer.step()
            total, divisor = total + found.item(), divisor + size
        losses.append(total / divisor)
    with torch.no_grad():
        pairs = [sums(rows, w) for rows in batches]
    val = sum(float(found) for found, _ in pairs) / sum(size for _, size in pairs)
    return {"loss": losses, "weights": dict(net.state_dict()), "val": val}


@warns("every=")
def end(name: str, options: dict[str, Any], most: int, accumulate: int = 1) -> dict[str, Any]:
    """Where a training with `max_steps` ends."""
    strategy = make_strategy(name, **options)
    net = mlp()
    trainer = sp.Trainer(
        net, optimizer=lambda p: torch.optim.SGD(p, 0.1), loss=LOSSES["mean"], strategy=strategy,
        accumulate=accumulate,
    )  # fmt: skip
    x, y = blobs(45)
    history = trainer.fit(
        (x, y), batch_size=10, max_steps=most, validation_split=0.2, verbose=0
    )  # four batches an epoch
    steps = trainer.step
    trainer.fit((x, y), batch_size=10, max_steps=most, verbose=0)
    found = weights(strategy, net)
    strategy.close()
    return {
        "steps": steps, "again": trainer.step, "epochs": history.epoch, "weights": found,
        "val": history.history["val_loss"],
    }  # fmt: skip


@warns("every=")
def go_on(name: str, options: dict[str, Any], folder: str, most: list[int]) -> dict[str, Any]:
    """A training of four epochs that `max_steps` cuts there, each time gone on with from a file."""
    strategy = make_strategy(name, **options)
    net = mlp()

    def trainer() -> sp.Trainer:
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
        return sp.Trainer(
            net, optimizer=optimizer, loss=LOSSES["mean"], strategy=strategy,
            scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
            scheduler_interval="epoch",
        )  # fmt: skip

    x, y = blobs(45)
    one = trainer()
    losses: dict[int, float] = {}
    for number, steps in enumerate([*most, None]):
        history = one.fit((x, y), batch_size=10, epochs=4, max_steps=steps, verbose=0)
        losses |= dict(zip(history.epoch, history.history.get("loss", []), strict=True))
        one.save(f"{folder}/{number}")
        one.load(f"{folder}/{number}")
    found = weights(strategy, net)
    strategy.close()
    return {
        "steps": one.step, "epoch": one.epoch, "weights": found, "losses": losses,
    }  # fmt: skip
