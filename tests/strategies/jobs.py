"""What the contract tests run on every replica; each returns plain values to compare."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

import spartito as sp
from spartito.names import ENV_SHARE_DEVICES
from spartito.registry import StrategyInfo
from spartito.strategies import Strategy
from spartito.strategies import strategy as named_strategy
from tests import simulated
from tests.replicas import NO_BF16, warns

DEVICE = os.environ.get("SPARTITO_TEST_DEVICE", "cpu")
"""Where the contracts of the strategies are tested: "cpu", "sim" (`tests.simulated`), "cuda"."""
if DEVICE == simulated.NAME:
    simulated.begin()
if DEVICE != "cpu":  # any machine has the devices for any number of replicas
    os.environ[ENV_SHARE_DEVICES] = "1"


def make_strategy(name: str | None = None, **options: Any) -> Strategy:
    """A strategy by its name, or by the path of its class: ``"package.module:Class"``."""
    if DEVICE == "cpu" and torch.accelerator.is_available() and not simulated.is_here():
        options.setdefault("device", "cpu")
    if name == "tpu":
        options.setdefault("device", simulated.NAME if simulated.is_here() else DEVICE)
    if name and ":" in name:
        made: Strategy = StrategyInfo(name, name).load()(**options)
        return made
    return named_strategy(name, **options)


def weights(strategy: Strategy, net: nn.Module, optimizer: Any = None) -> dict[str, Tensor]:
    """All parameters and buffers of ``net``, also where no task has the whole of them.

    ``optimizer`` is the one that was prepared with it, where the strategy has several.
    """
    if strategy.name == "parameter_server":  # each task has its own
        return {name: value.clone() for name, value in net.state_dict().items()}
    with strategy.using(optimizer) if optimizer is not None else nullcontext():
        state: dict[str, Tensor] = strategy.state_dict()["model"]
        return {name: value.clone() for name, value in state.items()}


FEATURES, CLASSES = 6, 3


def blobs(count: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Examples of three classes that a small network can tell apart."""
    generator = torch.Generator().manual_seed(7)
    y = torch.arange(count) % CLASSES
    centres = torch.eye(CLASSES, FEATURES, dtype=dtype) * 2
    return centres[y] + torch.randn(count, FEATURES, generator=generator, dtype=dtype), y


def mlp(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(FEATURES, 8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, CLASSES)
    ).double()


class Convolutions(nn.Module):
    """A small network with all that makes equality hard: BatchNorm, dropout, residuals."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(8)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.first(x / 255)))
        x = x + torch.relu(self.norm2(self.second(x)))
        out: Tensor = self.head(self.drop(x.mean((2, 3))))
        return out


@warns("every=")
def fit_mlp(
    name: str,
    options: dict[str, Any],
    *,
    examples: int = 34,
    batch: int = 8,
    epochs: int = 2,
    steps: int | None = None,
    optimizer: str = "Adam",
    accumulate: int = 1,
    clip: float | None = None,
    dropout: float = 0.0,
    loss: str = "mean",
    schedule: bool = False,
) -> dict[str, Any]:
    """History, weights and predictions of a network trained on blobs."""
    strategy = make_strategy(name, **options)
    net = mlp(dropout)
    losses: dict[str, Any] = {
        "mean": nn.CrossEntropyLoss(),
        "each": nn.CrossEntropyLoss(reduction="none"),
        "weighted": nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 5.0]).double()),
        "sum": lambda out, y: (nn.functional.cross_entropy(out, y, reduction="sum"), len(y)),
    }
    trainer = sp.Trainer(
        net,
        optimizer=lambda parameters: getattr(torch.optim, optimizer)(parameters, lr=0.02),
        loss=losses[loss],
        metrics=["accuracy", "top_2_accuracy"],
        strategy=strategy,
        scheduler=(lambda o: torch.optim.lr_scheduler.StepLR(o, 3, 0.7)) if schedule else None,
        accumulate=accumulate,
        clip_norm=clip,
        deterministic=True,
        seed=11,
    )
    x, y = blobs(examples)
    train = sp.data.arrays(x, y).shuffle().batch(batch)
    val = sp.data.arrays(x[:13], y[:13]).batch(5)
    history = trainer.fit(
        train, epochs=epochs, steps_per_epoch=steps, validation_data=val, verbose=0
    )
    again = trainer.fit(train, epochs=1, steps_per_epoch=steps, verbose=0)
    result = {
        "history": history.history,
        "again": again.history,
        "weights": weights(strategy, net),
        "predictions": trainer.predict(x[:7], batch_size=3),
        "lr": trainer.optimizer.param_groups[0]["lr"],
        "steps": trainer.step,
    }
    strategy.close()
    return result


def fit_metrics(name: str, options: dict[str, Any], kind: str) -> dict[str, Any]:
    """History and last predictions of a training with metrics that keep a state."""
    strategy = make_strategy(name, **options)
    net = mlp()
    metrics: list[Any] = ["auc", "pr_auc", "f1", "precision_weighted", "confusion_matrix"]
    if kind == "torchmetrics":
        import torchmetrics
        from torchmetrics import classification

        metrics = [
            classification.MulticlassF1Score(CLASSES, average="macro"),
            classification.MulticlassAUROC(CLASSES),
            sp.metrics.TorchMetric(torchmetrics.MaxMetric(), inputs=lambda out, y: (out,)),
            sp.metrics.TorchMetric(
                torchmetrics.PearsonCorrCoef().set_dtype(torch.float64),
                inputs=lambda out, y: (out[:, 0], y.double()),
            ),
        ]
    trainer = sp.Trainer(
        net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        loss=nn.CrossEntropyLoss(),
        metrics=["accuracy", *metrics],
        strategy=strategy,
        deterministic=True,
    )
    x, y = blobs(29)
    data = sp.data.arrays(x, y)
    halving = sp.callbacks.LearningRateScheduler(lambda epoch, rate: 0.2 / 2**epoch)
    history = trainer.fit(
        data.shuffle().batch(7),
        epochs=2,
        validation_data=data.batch(5),
        callbacks=[halving],
        verbose=0,
    )
    result = {"history": history.history, "predictions": trainer.predict(x)}
    strategy.close()
    return result


def fit_convolutions(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Synchronized BatchNorm, dropout and augmentation; the last batch has one example."""
    strategy = make_strategy(name, **options)
    torch.manual_seed(5)
    net = Convolutions().double()
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(25, 3, 9, 9, generator=generator, dtype=torch.float64) * 255
    y = (x[:, 0].mean((1, 2)) > 127).long()
    train = (
        sp.data.arrays(x, y)
        .shuffle()
        .map(sp.data.RandomFlip("horizontal"))
        .map(sp.data.RandomRotation(0.1))
        .batch(6)
        .prefetch(2)
    )
    trainer = sp.Trainer(
        net,
        optimizer=torch.optim.Adam(net.parameters(), 1e-2),
        loss=nn.BCEWithLogitsLoss(),
        metrics=["accuracy", "mean_absolute_error"],
        strategy=strategy,
        deterministic=True,
    )
    history = trainer.fit(train, epochs=2, validation_data=(x, y), verbose=0)
    state = weights(strategy, net)
    strategy.close()
    return {"history": history.history, "weights": state}


@warns("every=", r"the checkpoint is of \d+ groups")
def checkpoint_and_resume(
    name: str,
    options: dict[str, Any],
    folder: str,
    phase: str,
    again: str = "",
    accumulate: int = 1,
) -> dict[str, Any]:
    """Train 2 of 4 epochs and a half and save ("save"), go on ("resume"), or all ("whole").

    What was loaded is saved as ``again`` at once; "copy" does no more than that. With
    ``accumulate`` 2 that is in the middle of an update.
    """
    strategy = make_strategy(name, **options)
    net = mlp(0.3)
    trainer = sp.Trainer(
        net,
        optimizer=torch.optim.AdamW(net.parameters(), 0.02),
        loss=nn.CrossEntropyLoss(),
        metrics=["accuracy", "auc", "f1_micro"],
        strategy=strategy,
        scheduler=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.97),
        accumulate=accumulate,
        deterministic=True,
        seed=4,
    )
    train = sp.data.arrays(*blobs(40)).shuffle().batch(8)

    class SaveInTheMiddle(sp.Callback):
        saved = False

        def on_train_batch_end(self, batch: int, logs: Any) -> None:
            here = self.trainer.step >= 12 if accumulate == 1 else batch >= 2  # or soon after it
            if phase == "save" and self.trainer.epoch == 2 and here and not self.saved:
                self.saved = True
                self.trainer.save(folder)
                self.trainer.stop_training = True

    if phase in ("resume", "copy"):
        trainer.load(folder)
        if again:
            trainer.save(again)
    if phase == "copy":
        strategy.close()
        return {}
    history = trainer.fit(train, epochs=4, callbacks=[SaveInTheMiddle()], verbose=0)
    result = {
        "history": history.history,
        "epochs": history.epoch,
        "weights": weights(strategy, net),
    }
    strategy.close()
    return result


@warns("every=", r"the checkpoint is of \d+ groups")
def load_each(
    name: str, options: dict[str, Any], given: Sequence[tuple[str, str, str]]
) -> list[dict[str, Any]]:
    """Load each of these checkpoints in turn: folder, phase, and where it is saved again.

    Each time into a model and an optimizer that are new, so that nothing of the one before is left.
    """
    return [
        checkpoint_and_resume(name, options, folder, phase, again) for folder, phase, again in given
    ]


def gan(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """A custom loop with two models and two optimizers."""
    strategy = make_strategy(name, **options)
    torch.manual_seed(2)
    generator_net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 2)).double()
    critic = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1)).double()
    g, g_opt = strategy.prepare(generator_net, torch.optim.Adam(generator_net.parameters(), 1e-2))
    d, d_opt = strategy.prepare(critic, torch.optim.Adam(critic.parameters(), 1e-2))
    assert g_opt is not None
    assert d_opt is not None
    source = torch.Generator().manual_seed(9)
    real = torch.randn(22, 2, generator=source, dtype=torch.float64) + 3
    noise = torch.randn(22, 2, generator=source, dtype=torch.float64)
    loss = nn.BCEWithLogitsLoss(reduction="none")
    curve = []
    data = strategy.distribute(sp.data.arrays(real, noise).shuffle(3).batch(5))
    for _ in range(2):
        for batch in data:
            fake = g(batch.y)
            d_opt.zero_grad()
            judged = torch.cat([d(batch.x), d(fake.detach())], 1)
            d_losses = loss(judged, judged.new_tensor([1.0, 0.0]).expand_as(judged))
            strategy.backward(d_losses, batch)
            strategy.update(d_opt)
            judged = d(fake)
            g_losses = loss(judged, torch.ones_like(judged))
            strategy.backward(g_losses, batch)
            strategy.update(g_opt)
            both = torch.stack([d_losses.mean(1), g_losses.mean(1)], 1)
            curve.append(strategy.reduce("mean", both).item())
    result = {
        "curve": curve,
        "weights": {
            **_named("g", weights(strategy, generator_net, g_opt)),
            **_named("d", weights(strategy, critic, d_opt)),
        },
    }
    strategy.close()
    return result


def _named(prefix: str, values: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}.{name}": value for name, value in values.items()}


class Sometimes(nn.Module):
    """``rare`` is used only for inputs above a limit, ``never`` not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(2, 1).double()
        self.rare = nn.Linear(2, 1).double()
        self.never = nn.Linear(2, 1).double()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.always(x)
        high = x[:, 0] > 5
        return out + self.rare(x) * high[:, None] if high.any() else out


@warns(r"\d+ tensors stay whole", "no tensor of the model is cut", "every=")
def unused_parameters(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """One step in which a parameter is used on some replicas only, and one on none."""
    strategy = make_strategy(name, **options)
    torch.manual_seed(1)
    net = Sometimes()
    before = net.never.weight.detach().clone()
    net2, optimizer = strategy.prepare(net, torch.optim.AdamW(net.parameters(), 0.1))
    assert optimizer is not None
    x = torch.arange(12.0).double().view(6, 2)
    for batch in strategy.distribute(sp.data.arrays(x, x[:, :1]).batch(6)):
        strategy.backward((net2(batch.x) - batch.y).square(), batch)
        strategy.update(optimizer)
    found = weights(strategy, net)
    state = {name: found[f"{name}.weight"] for name in ("always", "rare")}
    unchanged = torch.equal(before, found["never.weight"].cpu())
    kept = unchanged and net.never.weight not in optimizer.state
    strategy.close()
    return {"weights": state, "kept": kept}


@warns("torch.compile is left out on a mesh", "The .grad attribute of a Tensor", NO_BF16)
def low_precision(name: str, options: dict[str, Any], compiled: bool) -> dict[str, Any]:
    """bf16 autocast on a float32 network, also as a compiled module."""
    strategy = make_strategy(name, **options)
    net: Any = mlp().float()
    if compiled:
        net = torch.compile(net, backend="eager")
    trainer = sp.Trainer(
        net,
        optimizer=torch.optim.Adam(net.parameters(), 0.02),
        loss=nn.CrossEntropyLoss(),
        metrics=["accuracy"],
        strategy=strategy,
        precision="bf16",
    )
    history = trainer.fit(blobs(60), epochs=3, batch_size=12, verbose=0)  # float64 data
    names = list(strategy.state_dict()["model"])
    strategy.close()
    return {"history": history.history, "names": names}
