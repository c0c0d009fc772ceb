"""What the tests of training run on every replica."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor, nn

import spartito as sp
from spartito.strategies import Strategy
from tests.collectives.group import running, spec
from tests.commands import free_port

Job = Callable[..., Any]


def on_replicas(job: Job, world_size: int, *args: Any) -> list[Any]:
    """What ``job(strategy, *args)`` returns on each of so many replicas."""
    port = free_port()
    with running() as group:
        for rank in range(world_size):
            group.start(rank, _mirrored, world_size, port, job, *args)
        return [group.result(rank) for rank in range(world_size)]


def _mirrored(_: Connection, rank: int, world_size: int, port: int, job: Job, *args: Any) -> Any:
    strategy = sp.MirroredStrategy(cluster=spec(rank, world_size, port), timeout=60)
    try:
        return job(strategy, *args)
    finally:
        strategy.close()


def data(count: int = 20) -> tuple[Tensor, Tensor]:
    """Points, and on which side of a line they lie."""
    x = torch.randn(count, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return x, (x.sum(1) > 0).long()


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def trainer(strategy: Strategy | None = None, **options: Any) -> sp.Trainer:
    """A trainer of `net` on one device, or under ``strategy``."""
    return sp.Trainer(
        options.pop("model", None) or net(),
        **{
            "optimizer": lambda parameters: torch.optim.SGD(parameters, 0.1),
            "loss": nn.CrossEntropyLoss(),
            "strategy": strategy or sp.OneDeviceStrategy(cluster=sp.ClusterSpec.alone()),
            **options,
        },
    )


def stop_early(strategy: Strategy, deltas: list[float]) -> tuple[int, list[int], int]:
    """Early stopping on a loss that goes up: epochs that were run, by history and by trainer."""
    made = trainer(strategy, optimizer=lambda parameters: torch.optim.SGD(parameters, 0.0))
    early = sp.callbacks.EarlyStopping("val_loss", patience=2, restore_best_weights=True)

    class Worse(sp.Callback):
        def on_epoch_begin(self, epoch: int) -> None:
            with torch.no_grad():
                made.model[2].bias[0] += deltas[epoch]  # type: ignore[index]

    history = made.fit(
        data(), epochs=10, validation_data=data(), callbacks=[Worse(), early], verbose=0
    )
    return made.epoch, history.epoch, early.best_epoch


def uneven_figures(strategy: Strategy) -> dict[str, float]:
    """Figures of an evaluation in batches of 3, of which the last has 1 example."""
    made = trainer(strategy, metrics=["accuracy", largest])
    return made.evaluate(data(7), batch_size=3)


def largest(output: Tensor, target: Tensor) -> Tensor:
    """The largest output of each example."""
    return output.amax(1)


def uneven_sizes(strategy: Strategy) -> list[Tensor]:
    """Weights after steps whose local batches, made by each replica, have unequal sizes."""
    x, y = data(12)

    def batches(context: sp.data.InputContext) -> Iterator[Any]:
        for start, size in ((0, 6), (6, 3), (9, 3)):
            cut = start + (size * 2) // 3  # rank 0 has twice as many
            rows = slice(start, cut) if context.data_shard[0] == 0 else slice(cut, start + size)
            yield x[rows], y[rows]

    made = trainer(strategy)
    made.fit(sp.data.per_worker(batches), epochs=1, verbose=0)
    return [parameter.detach().clone() for parameter in made.model.parameters()]


def resume_uneven(strategy: Strategy, folder: str) -> list[tuple[list[Tensor], int, int]]:
    """Rank 0 has 2 batches a pass, rank 1 has 5: weights, steps and batches read at the end.

    Of a whole training, and of one that goes on after each of its 9 first steps.
    """
    x, y = data(30)
    read = 0

    def batches(context: sp.data.InputContext) -> Iterator[Any]:
        nonlocal read
        for start in range(0, 30, 6)[: 5 if context.data_shard[0] else 2]:
            read += 1
            yield x[start : start + 6], y[start : start + 6]

    class Save(sp.Callback):
        def on_train_batch_end(self, batch: int, logs: Any) -> None:
            self.trainer.save(f"{folder}/{self.trainer.step}")

    chain = sp.data.per_worker(batches)
    made = trainer(strategy)
    made.fit(chain, epochs=2, callbacks=[Save()], verbose=0)
    found = [([p.detach().clone() for p in made.model.parameters()], made.step, read)]
    for step in range(1, 10):
        strategy.reduce("sum", torch.zeros(1))  # all of it is written
        made.load(f"{folder}/{step}")
        read = 0
        made.fit(chain, epochs=2, verbose=0)
        found.append(([p.detach().clone() for p in made.model.parameters()], made.step, read))
    return found
