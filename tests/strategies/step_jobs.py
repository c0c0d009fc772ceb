"""Trainings whose step is a function of the user's, or that of a LightningModule."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytorch_lightning
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import spartito as sp
from spartito.system import peak_memory, resident_memory
from spartito.system.capacity import available_memory
from tests.replicas import warns
from tests.strategies.jobs import FEATURES, blobs, make_strategy, mlp, weights

EXAMPLES, BATCH = 41, 7


def penalized(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    """The loss with a penalty of the gradient by the input, one for each example."""
    x, y = batch
    x = x.clone().requires_grad_(torch.is_grad_enabled())
    output = model(x)
    losses = F.cross_entropy(output, y, reduction="none")
    if torch.is_grad_enabled():
        (slope,) = torch.autograd.grad(losses.sum(), x, create_graph=True)
        losses = losses + 0.1 * slope.square().sum(1)
    return {"loss": losses, "output": output.detach()}


def tuned(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


@warns("every=")
def fit(name: str, options: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A training with a step of its own, saved in between, and what comes of it."""
    strategy = make_strategy(name, **options)
    net: Any = mlp()
    trainer = sp.Trainer(
        net, optimizer=tuned, train_step=penalized, strategy=strategy, clip_norm=1.0,
        metrics=["accuracy", *([] if name == "parameter_server" else ["gradient_norm"])], **more,
    )  # fmt: skip
    x, y = blobs(EXAMPLES)
    data = sp.data.arrays(x, y).batch(BATCH)
    history = trainer.fit(data, epochs=2, validation_data=(x[:9], y[:9]), verbose=0)
    predictions = trainer.predict((x[:5], y[:5]))
    found = {
        "loss": history.history["loss"], "val_loss": history.history["val_loss"],
        "accuracy": history.history["accuracy"], "norm": history.history.get("gradient_norm", []),
        "weights": weights(strategy, net),
        "predictions": predictions,
    }  # fmt: skip
    strategy.close()
    return found


def by_torch() -> dict[str, Any]:
    """The same by plain torch."""
    net: Any = mlp()
    optimizer = tuned(net.parameters())
    x, y = blobs(EXAMPLES)
    found: dict[str, Any] = {"loss": [], "val_loss": [], "accuracy": [], "norm": []}
    for _ in range(2):
        total = right = norms = 0.0
        for start in range(0, EXAMPLES, BATCH):
            rows = slice(start, start + BATCH)
            step = penalized(net, (x[rows], y[rows]))
            optimizer.zero_grad()
            step["loss"].mean().backward()
            norms += nn.utils.clip_grad_norm_(net.parameters(), 1.0).item()
            optimizer.step()
            total += step["loss"].sum().item()
            right += (step["output"].argmax(1) == y[rows]).sum().item()
        found["loss"].append(total / EXAMPLES)
        found["accuracy"].append(right / EXAMPLES)
        found["norm"].append(norms / -(-EXAMPLES // BATCH))
        with torch.no_grad():
            found["val_loss"].append(F.cross_entropy(net(x[:9]), y[:9]).item())
    with torch.no_grad():
        predictions = net(x[:5])
    return {**found, "weights": dict(net.state_dict()), "predictions": predictions}


class Classifier(pytorch_lightning.LightningModule):
    """As one writes it for Lightning."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layers(x)
        return found

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        output = self(x)
        self.log("val_loss", F.cross_entropy(output, y))
        self.log_dict({"val_acc": (output.argmax(1) == y).double().mean()})

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return [optimizer], [schedule]


@warns("every=")
def lightning(name: str, options: dict[str, Any]) -> dict[str, Any]:
    strategy = make_strategy(name, **options)
    module = Classifier()
    trainer = sp.Trainer(module, strategy=strategy)
    x, y = blobs(EXAMPLES)
    data = sp.data.arrays(x, y).batch(BATCH)
    history = trainer.fit(data, epochs=2, validation_data=(x[:9], y[:9]), verbose=0).history
    found = {**history, "weights": weights(strategy, module)}
    strategy.close()
    return found


def lightning_by_torch() -> dict[str, Any]:
    net: Any = mlp()
    x, y = blobs(EXAMPLES)
    found: dict[str, Any] = {"loss": [], "train_loss": [], "val_loss": [], "val_acc": []}
    for rate in (0.1, 0.05):
        total = 0.0
        for start in range(0, EXAMPLES, BATCH):
            rows = slice(start, start + BATCH)
            loss = F.cross_entropy(net(x[rows]), y[rows])
            loss.backward()
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter -= rate * parameter.grad
                    parameter.grad = None
            total += loss.item() * len(y[rows])
        found["loss"].append(total / EXAMPLES)
        found["train_loss"].append(total / EXAMPLES)
        with torch.no_grad():
            output = net(x[:9])
        found["val_loss"].append(F.cross_entropy(output, y[:9]).item())
        found["val_acc"].append((output.argmax(1) == y[:9]).double().mean().item())
    state = {f"layers.{key}": value for key, value in net.state_dict().items()}
    return {**found, "weights": state}


def with_norm(name: str, options: dict[str, Any]) -> None:
    with make_strategy(name, **options) as strategy:
        sp.Trainer(
            mlp(), optimizer=tuned, train_step=penalized, metrics="gradient_norm", strategy=strategy
        )


@warns("every=")
def find_rate(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """The rates and losses of a search, and whether it left everything as it was."""
    strategy = make_strategy(name, **options)
    trainer = sp.Trainer(mlp(), optimizer=tuned, loss=nn.CrossEntropyLoss(), strategy=strategy)
    x, y = blobs(EXAMPLES)
    trainer.fit((x, y), batch_size=BATCH, verbose=0)
    before = {key: value.clone() for key, value in strategy.state_dict()["model"].items()}
    found = trainer.find_learning_rate((x, y), low=1e-4, high=1e3, steps=30, batch_size=BATCH)
    after = {key: value.clone() for key, value in strategy.state_dict()["model"].items()}
    again = trainer.fit((x, y), epochs=2, batch_size=BATCH, verbose=0)
    strategy.close()
    return {
        "rates": found.rates, "losses": found.losses, "suggestion": found.suggestion or 0.0,
        "moved": max((after[k] - before[k]).abs().max().item() for k in before),
        "again": again.history["loss"], "lr": trainer.optimizer.param_groups[0]["lr"],
    }  # fmt: skip


@warns("every=")
def find_size(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """What a search tried, and whether it left everything as it was."""
    strategy = make_strategy(name, **options)
    trainer = sp.Trainer(mlp(), optimizer=tuned, loss=nn.CrossEntropyLoss(), strategy=strategy)
    x, y = blobs(EXAMPLES)
    trainer.fit((x, y), batch_size=BATCH, verbose=0)
    before = {key: value.clone() for key, value in strategy.state_dict()["model"].items()}
    drawn = torch.get_rng_state()
    trainer.model.eval()
    found = trainer.find_batch_size(sp.data.arrays(x, y).shuffle().batch(7), low=4, high=16)
    modes = [module.training for module in trainer.model.modules()]
    drew = not torch.equal(torch.get_rng_state(), drawn)
    trainer.model.train()
    after = {key: value.clone() for key, value in strategy.state_dict()["model"].items()}
    again = trainer.fit((x, y), epochs=2, batch_size=BATCH, verbose=0)
    strategy.close()
    return {
        "found": found, "drew": drew, "modes": any(modes), "step": trainer.step,
        "moved": max((after[k] - before[k]).abs().max().item() for k in before),
        "again": again.history["loss"],
    }  # fmt: skip


def find_on_servers(options: dict[str, Any]) -> None:
    with make_strategy("parameter_server", **options) as strategy:
        trainer = sp.Trainer(mlp(), optimizer=tuned, loss=nn.CrossEntropyLoss(), strategy=strategy)
        trainer.find_batch_size(blobs(EXAMPLES))


class Wide(nn.Module):
    """Keeps 4 MiB of each row for its backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, 1 << 17), nn.Linear(1 << 17, 4)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        for _ in range(3):
            hidden = hidden * self.scale
        found: Tensor = self.last(hidden)
        return found


def find_size_in(megabytes: int, limit: int | None = None) -> dict[str, Any]:
    """A search in so much memory; ``limit``: beyond which allocations fail, in MiB."""
    net = Wide().double()
    trainer = sp.Trainer(net, optimizer=tuned, loss=nn.CrossEntropyLoss(), strategy="one_device")
    x, y = blobs(4096)
    before = [parameter.clone() for parameter in net.parameters()]
    if limit is not None:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (limit << 20), -1))
    memory = min(1.0, (megabytes << 20) / available_memory())
    base = resident_memory()
    found = trainer.find_batch_size((x, y), steps=1, memory=memory, gain=None)
    gradients = any(parameter.grad is not None for parameter in net.parameters())
    moved = any(not torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
    return {"found": found, "took": peak_memory() - base, "moved": moved, "left": gradients}


def fitted_twice() -> list[float]:
    """The losses of the second `fit` without a search."""
    trainer = sp.Trainer(mlp(), optimizer=tuned, loss=nn.CrossEntropyLoss())
    x, y = blobs(EXAMPLES)
    trainer.fit((x, y), batch_size=BATCH, verbose=0)
    losses: list[float] = trainer.fit((x, y), epochs=2, batch_size=BATCH, verbose=0).history["loss"]
    return losses
