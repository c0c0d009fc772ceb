"""What replicas do with models that are built without values."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import spartito as sp
from spartito.strategies import strategy as strategy_of
from spartito.system import give_back_memory

INSIDE: dict[str, Any] = {
    "plain": nullcontext,
    "noted": sp.meta,
    "device": lambda: torch.device("meta"),
}
"""The blocks in which models are built."""


class Layer(nn.Module):
    """A part of `Small`."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        nn.init.trunc_normal_(self.up.weight, std=0.3)
        nn.init.orthogonal_(self.down.weight)

    def forward(self, x: Tensor) -> Tensor:
        """``(batch, tokens, 8)`` to the same shape."""
        made: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return made


class Small(nn.Module):
    """What its own ``__init__`` sets, buffers that are not saved, copies, and tied weights."""

    turns: Tensor
    units: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8, padding_idx=0)
        turns = torch.outer(torch.arange(6.0), 10000 ** -(torch.arange(0.0, 8, 1) / 8)).cos()
        self.register_buffer("turns", turns, persistent=False)
        self.register_buffer("units", torch.tensor([0.5, 2.0]))
        layer = Layer()
        self.layers = nn.Sequential(layer, copy.deepcopy(layer), Layer())
        self.gain = nn.Parameter(torch.rand(8) * self.units[1])
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embedding.weight
        self.rate = torch.linspace(0, 0.5, 3)[1].item()

    def forward(self, x: Tensor) -> Tensor:
        """``(batch, 6)`` to ``(batch, 6, 12)``."""
        shown = self.embedding(x) * self.turns + self.rate
        made: Tensor = self.head(self.layers(shown) * self.gain)
        return made


def built(inside: str) -> Small:
    torch.manual_seed(11)
    with INSIDE[inside]():
        return Small().double()


def examples() -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(5)
    found = torch.randint(0, 12, (14, 7), generator=drawn)
    return found[:, :-1], found[:, 1:]


def loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def trained(
    name: str, options: dict[str, Any], *, inside: str = "noted", rate: float = 0.01
) -> Any:
    """The losses of two epochs, and the values after them."""
    net = built(inside)
    optimizer = torch.optim.Adam(net.parameters(), rate)
    with strategy_of(name, **options) as strategy:
        trainer = sp.Trainer(net, optimizer=optimizer, loss=loss, strategy=strategy)
        history = trainer.fit(examples(), epochs=2, batch_size=4, verbose=False)
        model = {} if name == "parameter_server" else strategy.state_dict()["model"]
        drawn = torch.rand(3, dtype=torch.float64)
        return [history.history["loss"], {k: v.clone() for k, v in model.items()}, drawn]


def resumed(name: str, options: dict[str, Any], *, folder: Path, inside: str = "noted") -> Any:
    """The losses of the second of two epochs, after the checkpoint of the first one."""
    net = built(inside)
    optimizer = torch.optim.Adam(net.parameters(), 0.01)
    with strategy_of(name, **options) as strategy:
        trainer = sp.Trainer(net, optimizer=optimizer, loss=loss, strategy=strategy, accumulate=2)
        trainer.load(folder)
        found = trainer.fit(examples(), epochs=2, batch_size=4, verbose=False)
        return [found.history["loss"], trainer.evaluate(examples(), batch_size=4)]


def write(folder: Path) -> None:
    """Checkpoints of one device: "begun" before any batch, "waiting" amid an update, "epoch"."""
    net = built("plain")
    optimizer = torch.optim.Adam(net.parameters(), 0.01)
    with strategy_of("one_device") as strategy:
        trainer = sp.Trainer(net, optimizer=optimizer, loss=loss, strategy=strategy, accumulate=2)
        trainer.save(folder / "begun")

        class Saving(sp.Callback):
            def on_train_batch_end(self, step: int, logs: Any = None) -> None:
                if trainer.step == 1:
                    trainer.save(folder / "waiting")

        trainer.fit(examples(), batch_size=4, verbose=False, callbacks=[Saving()])
        trainer.save(folder / "epoch")


def saved_before_the_first_batch(name: str, options: dict[str, Any], *, folder: Path) -> Any:
    """A model without values, as it is saved."""
    with strategy_of(name, **options) as strategy:
        trainer = sp.Trainer(built("noted"), strategy=strategy, loss=loss)
        trainer.save(folder)
        return [trainer.evaluate(examples(), batch_size=4)]


def peak(name: str, options: dict[str, Any], *, inside: str = "noted") -> float:
    """MiB that building, preparing and one prediction take beside what was there."""
    _predict(name, options, 16, inside)  # what is imported late
    give_back_memory()
    Path("/proc/self/clear_refs").write_text("5")
    before = _mib("VmRSS")
    return _predict(name, options, 1024, inside) - before


def _predict(name: str, options: dict[str, Any], width: int, inside: str) -> float:
    torch.manual_seed(1)
    with INSIDE[inside]():
        net = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(LAYERS)))
    with strategy_of(name, **options) as strategy:
        sp.Trainer(net, strategy=strategy).predict(torch.rand(4, width), batch_size=4)
        return _mib("VmHWM")


LAYERS = 16  # of 4 MiB


def _mib(key: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) / 1024
