"""What each replica does for one cell of the table."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import spartito as sp
from spartito.errors import UserError
from tests.replicas import warns
from tests.strategies.jobs import make_strategy, weights
from tests.zoo import doubled, plain
from tests.zoo.models import ANIMALS, BATCH, CLIP, EXAMPLES, LOOPS


def arrays(data: Any) -> sp.data.Dataset:
    return sp.data.arrays(data) if isinstance(data, dict) else sp.data.arrays(*data)


class Losses(sp.Callback):
    """Keeps the loss of each step."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any]) -> None:
        self.seen.append(float(logs["loss"]))


@warns(r"\d+ tensors stay whole where they do not divide", plain.OLD)
def train(name: str, strategy: str, options: dict[str, Any]) -> dict[str, Any]:
    """The training ``name`` under a strategy: what `plain.train` returns, or who refused it."""
    made = None
    try:
        with doubled.in_double(), warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            made = make_strategy(strategy, **options)
            torch.manual_seed(3)
            found = _loop(name, made) if name in LOOPS else _fit(name, made, "inside" in options)
        return {**found, "warned": [str(each.message) for each in warned]}
    except UserError as error:
        return {"refused": str(error)}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
    finally:
        if made is not None:
            made.close()


def _fit(name: str, strategy: sp.Strategy, divided: bool) -> dict[str, Any]:
    animal = ANIMALS[name]
    net = animal.build()
    trainer = sp.Trainer(
        net,
        optimizer=animal.optimizer(net.parameters()),
        loss=animal.loss() if animal.loss else None,
        strategy=strategy,
        clip_norm=CLIP,
        deterministic=True,
    )
    data, losses = animal.data(), Losses()
    trainer.fit(arrays(data).batch(BATCH), callbacks=[losses], verbose=0)
    # Under servers each task has a model of its own, unless members have one between them.
    state = strategy.state_dict()["model"] if divided else weights(strategy, net)
    final = trainer.evaluate(data, batch_size=EXAMPLES)["loss"]
    return plain.result(state, losses.seen, final)


def _loop(name: str, strategy: sp.Strategy) -> dict[str, Any]:
    own = StrategyLoop(strategy)
    for optimizer in LOOPS[name](own):
        strategy.update(optimizer)
    strategy.synchronize()
    state = {
        f"{number}.{key}": value
        for number, (net, optimizer) in enumerate(own.pairs)
        for key, value in weights(strategy, net, optimizer).items()
    }
    return plain.result(state, [strategy.reduce("mean", each) for each in own.shown])


class StrategyLoop:
    """The parts of a step as a strategy has them."""

    def __init__(self, strategy: sp.Strategy) -> None:
        self._strategy = strategy
        self.pairs: list[tuple[nn.Module, Optimizer]] = []
        self.shown: list[Tensor] = []

    def prepare(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        found = self._strategy.prepare(model, optimizer, clip_norm=CLIP, deterministic=True)
        self.pairs.append((model, found[1]))
        return found

    def batches(self, data: Any) -> Iterable[Any]:
        return self._strategy.distribute(arrays(data).batch(BATCH))

    def backward(self, losses: Tensor, batch: Any) -> None:
        self._strategy.backward(losses, batch)

    def show(self, losses: Tensor) -> None:
        self.shown.append(losses.detach())
