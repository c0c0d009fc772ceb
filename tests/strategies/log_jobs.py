"""Models, losses and callbacks that report figures of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import spartito as sp
from spartito import log
from spartito.engine.logged import listening
from spartito.steps.servers import push
from tests.replicas import warns
from tests.strategies.jobs import blobs, make_strategy, mlp


class Reporting(nn.Module):
    """Reports what it gets, whole rows and one number for all of them, and what is hidden in it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: Any = mlp()

    def forward(self, x: Tensor) -> Tensor:
        log("rows", x)
        log("mean", x.mean())
        hidden: Tensor = self.layers[0](x)
        log("hidden", hidden.square().mean(1))
        found: Tensor = self.layers[1:](hidden)
        return found


class ReportingLate(nn.Module):
    """Reports a number of its input, at which it looks, and one of what is computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: Any = mlp()

    def forward(self, x: Tensor) -> Tensor:
        log("mean", x.mean())
        x = x * 1.0 if x[0, 0] > 0 else x
        found: Tensor = checkpoint(self.computed_again, x, use_reentrant=False)
        return found

    def computed_again(self, x: Tensor) -> Tensor:
        found: Tensor = self.layers(x)
        log("late", found.square().mean())
        return found.tanh()  # what is computed again goes as far as this


def late_loss(output: Tensor, target: Tensor) -> Tensor:
    log("label", target.double().mean())
    return nn.functional.cross_entropy(output, target)


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Reports how many targets are not 0, per target, and what the classes weigh."""
    log("label", target.double())
    log("counted", target.double().sum(), torch.ones(()) * len(target))
    return nn.functional.cross_entropy(output, target, reduction="none")


class Counts(sp.Callback):
    def on_train_batch_end(self, batch: int, logs: Any) -> None:
        log("batch", batch)


@warns("every=")
def report(
    name: str, options: dict[str, Any], in_model: bool = True, late: bool = False
) -> dict[str, Any]:
    """The history of a training with figures of its own, and an evaluation."""
    strategy = make_strategy(name, **options)
    net = ReportingLate() if late else Reporting() if in_model else mlp()
    trainer = sp.Trainer(
        net, optimizer=lambda p: torch.optim.SGD(p, 1e-12), loss=late_loss if late else loss,
        metrics=["accuracy"], strategy=strategy,
    )  # fmt: skip
    x, y = blobs(50)
    history = trainer.fit(
        sp.data.arrays(x, y).shuffle().batch(7), epochs=2, callbacks=Counts(),
        validation_data=sp.data.arrays(x[:13], y[:13]).batch(5), verbose=0,
    )  # fmt: skip
    figures = trainer.evaluate(sp.data.arrays(x[:4], y[:4]).batch(3))
    trainer.predict(x[:3])
    strategy.close()
    return {"history": history.history, "figures": dict(figures)}


def report_while_others_lag(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """The same where each push waits for those of others, and the chief hears of it."""
    before, push.SOON = push.SOON, 0.0
    try:
        found: dict[str, Any] = report(name, options)
    finally:
        push.SOON = before  # other jobs get this process
    return found


def compute_again() -> list[str]:
    """What is reported when a worker computes a batch again, of which the first push was late."""
    heard: list[str] = []
    with make_strategy("parameter_server", max_staleness=0) as strategy:
        net = Reporting()
        strategy.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
        for batch in strategy.distribute(sp.data.arrays(*blobs(8)).batch(8)):
            with listening(lambda name, value, count: heard.append(name)):
                strategy.step(batch, loss)
                engine: Any = strategy.engine
                engine.again(batch)
            pair = engine.team.pairs.only
            pair.gradients.clear()
            pair.passes = 0
    return heard


class Late(sp.Callback):
    """Reports in the second and the fourth epoch alone."""

    def __init__(self, ends: bool) -> None:
        self.epoch, self.ends = 0, ends

    def on_epoch_begin(self, epoch: int) -> None:
        self.epoch = epoch
        if self.ends and epoch == 2:
            raise RuntimeError("ends here")

    def on_train_batch_end(self, batch: int, logs: Any) -> None:
        if self.epoch in (1, 3):
            log("late", batch)


def late(name: str, folder: Path, ends: bool) -> Any:
    """The history of a training with a figure that some epochs do not report."""
    strategy = make_strategy(name)
    trainer = sp.Trainer(
        mlp(), optimizer=lambda p: torch.optim.SGD(p, 0.1), loss=nn.CrossEntropyLoss(),
        strategy=strategy, run_dir=folder / "run",
    )  # fmt: skip
    callbacks = [
        sp.callbacks.BackupAndRestore(folder / "backups", every=1, share=None),
        sp.callbacks.CSVLogger(folder / "epochs.csv"),
        sp.callbacks.TensorBoard(folder / "logs"),
        Late(ends),
    ]
    history = trainer.fit(blobs(50), batch_size=7, epochs=4, callbacks=callbacks, verbose=0)
    strategy.close()
    return history.epoch, history.history


class Counting(nn.Module):
    """Reports in its second pass over eight batches alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.calls = mlp(), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if 8 < self.calls <= 16:
            log("late", self.calls)
        found: Tensor = self.layers(x)
        return found


def late_on_a_server(options: dict[str, Any]) -> Any:
    """The same of a worker, whose callbacks are not called."""
    strategy = make_strategy("parameter_server", **options)
    trainer = sp.Trainer(
        Counting(), optimizer=lambda p: torch.optim.SGD(p, 0.1), loss=nn.CrossEntropyLoss(),
        strategy=strategy,
    )  # fmt: skip
    history = trainer.fit(blobs(50), batch_size=7, epochs=3, verbose=0)
    strategy.close()
    return history.epoch, history.history


def in_order(found: Any) -> dict[str, float]:
    """Figures that tell the order of all predictions and targets."""
    count = len(found.label_ids)
    return {
        "count": float(count),
        "targets": float(found.label_ids @ range(1, count + 1)),
        "outputs": float(found.predictions[:, 0] @ range(1, count + 1)),
    }


@warns("every=")
def of_all_predictions(name: str, options: dict[str, Any]) -> list[float]:
    """What `in_order` says in a training and in an evaluation, and what it should."""
    strategy = make_strategy(name, **options)
    trainer = sp.Trainer(
        mlp(), optimizer=lambda p: torch.optim.SGD(p, 1e-12), loss=nn.CrossEntropyLoss(),
        compute_metrics=in_order, strategy=strategy,
    )  # fmt: skip
    x, y = blobs(23)
    validation = sp.data.arrays(x, y).shuffle().batch(5)
    history = trainer.fit((x, y), batch_size=6, verbose=0, validation_data=validation).history
    outputs = trainer.predict(x)
    ranks = torch.arange(1, 24).double()
    figures = trainer.evaluate((x, y), batch_size=7)
    strategy.close()
    return [
        figures["count"] - 23, figures["targets"] - float(y.double() @ ranks),
        figures["outputs"] - float(outputs[:, 0] @ ranks), history["val_count"][0] - 23,
        float("count" in history),
    ]  # fmt: skip


def deterministic(name: str) -> list[float]:
    """The mean of what a model with dropout gets, by its own reports."""
    with make_strategy(name) as strategy:
        net = nn.Sequential(Reporting(), nn.Dropout(0.3)).double()
        trainer = sp.Trainer(
            net, optimizer=lambda p: torch.optim.SGD(p, 1e-12), loss=loss, strategy=strategy,
            deterministic=True,
        )  # fmt: skip
        figures: list[float] = trainer.fit(blobs(50), batch_size=7, verbose=0).history["rows"]
        return figures
