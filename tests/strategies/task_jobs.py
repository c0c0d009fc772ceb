"""What the contract tests run of tasks: who stops, saves, loads and drifts, and what is left."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import spartito as sp
from spartito.data.batch import Batch
from spartito.errors import SpartitoError
from spartito.strategies import Strategy
from tests.replicas import warns
from tests.strategies.jobs import blobs, make_strategy, mlp


def stop_by_one(name: str, options: dict[str, Any]) -> int:
    """The last replica alone asks for an end in step 4; returns the steps that were made."""
    strategy = make_strategy(name, **options)
    net = mlp()

    class Stop(sp.Callback):
        def on_train_batch_end(self, batch: int, logs: Any) -> None:
            last = strategy.cluster.rank == strategy.num_replicas_in_sync - 1
            self.trainer.stop_training |= last and self.trainer.step >= 4

    trainer = sp.Trainer(
        net,
        optimizer=torch.optim.SGD(net.parameters(), 0.1),
        loss=nn.CrossEntropyLoss(),
        strategy=strategy,
    )
    trainer.fit(blobs(200), epochs=3, batch_size=8, callbacks=[Stop()], verbose=0)
    strategy.close()
    return trainer.step


def facts(name: str, options: dict[str, Any]) -> tuple[int, bool, str, list[float]]:
    """What a strategy says of itself, and its reductions."""
    strategy: Strategy = make_strategy(name, **options)
    value = torch.tensor([float(strategy.cluster.rank + 1)], dtype=torch.float64)
    reduced = [strategy.reduce(op, value).item() for op in ("sum", "mean", "max", "min")]
    numbers = [strategy.reduce(op, value.item()) for op in ("sum", "mean", "max", "min")]
    assert [number.item() for number in numbers] == reduced
    own = torch.full((strategy.cluster.rank + 1, 2), float(strategy.cluster.rank))
    rows = strategy.gather(own.requires_grad_())
    assert not rows.requires_grad
    result = (strategy.num_replicas_in_sync, strategy.is_chief, str(strategy.task), reduced)
    assert rows.tolist() == [[r, r] for r in range(result[0]) for _ in range(r + 1)]
    strategy.close()
    return result


def local_shares(batch: Batch) -> tuple[int, list[int]]:
    return batch.size, np.asarray(batch.offsets).tolist()


@warns("every=")
def write_model(name: str, options: dict[str, Any], folder: str) -> dict[str, Any]:
    """A checkpoint written by `ModelCheckpoint` during a fit."""
    strategy = make_strategy(name, **options)
    net = mlp()
    trainer = sp.Trainer(
        net,
        optimizer=torch.optim.Adam(net.parameters(), 0.02),
        loss=nn.CrossEntropyLoss(),
        strategy=strategy,
        run_dir=Path(folder),
    )
    trainer.fit(blobs(32), epochs=3, callbacks=[sp.callbacks.ModelCheckpoint(keep=2)], verbose=0)
    strategy.close()
    return trainer.history.history


@warns("a checkpoint without the groups' own states")
def best_weights(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """A training that gets worse, with its rate halved by each epoch: what each task ends with."""
    strategy = make_strategy(name or None, **options)
    x, y = blobs(48)
    net = mlp()
    trainer = sp.Trainer(
        net,
        optimizer=torch.optim.Adam(net.parameters(), 0.01, maximize=True),
        loss=nn.CrossEntropyLoss(),
        strategy=strategy,
        scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5),
        scheduler_interval="epoch",
    )
    early = sp.callbacks.EarlyStopping("val_loss", patience=2, restore_best_weights=True)
    history = trainer.fit(
        (x, y), epochs=9, batch_size=8, validation_data=(x, y), callbacks=[early], verbose=0
    )
    result = {
        "val_loss": history.history["val_loss"],
        "evaluated": trainer.evaluate((x, y))["loss"],
        "lr": strategy.coordination.publish(lambda: trainer.optimizer.param_groups[0]["lr"]),
        "begun": strategy.coordination.publish(
            lambda: len(strategy.state_dict()["optimizer"]["state"])
        ),
    }
    strategy.close()
    return result


def chief_alone(name: str, options: dict[str, Any], act: str, folder: str) -> str:
    """The error of a fit in which a callback does something on the chief that all have to do."""
    strategy = make_strategy(name, **options)
    net = mlp()
    data = blobs(200)

    class Act(sp.Callback):
        def on_train_batch_end(self, batch: int, logs: Any) -> None:
            acts: dict[str, Callable[[], object]] = {
                "evaluate": lambda: trainer.evaluate(data),
                "save": lambda: trainer.save(folder),
            }
            if strategy.is_chief and trainer.step == 2:
                acts[act]()

    trainer = sp.Trainer(
        net,
        optimizer=torch.optim.SGD(net.parameters(), 0.1),
        loss=nn.CrossEntropyLoss(),
        strategy=strategy,
    )
    try:
        trainer.fit(data, epochs=3, batch_size=8, callbacks=[Act()], verbose=0)
    except sp.UserError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        strategy.close()
    return "trained"


def save_and_load(name: str, options: dict[str, Any], folder: str) -> tuple[list[float], str, str]:
    """What every load after a save of 1, 2, 3 finds; the errors where the last replica reads
    another checkpoint than the rest, and where it finds none.
    """
    strategy = make_strategy(name, **options)
    net = mlp()
    trainer = sp.Trainer(net, optimizer=torch.optim.SGD(net.parameters(), 0.1), strategy=strategy)

    def put(value: float) -> None:
        state = dict(net.state_dict())
        strategy.load({"model": {**state, "0.bias": torch.full_like(state["0.bias"], value)}})

    found = []
    for value in (1.0, 2.0, 3.0):
        put(value)
        strategy.coordination.tell_all("")
        trainer.save(f"{folder}/{value}")
        trainer.save(f"{folder}/newest")
        put(0.0)
        trainer.load(f"{folder}/newest")
        found.append(net.state_dict()["0.bias"][0].item())
        strategy.coordination.tell_all("")
    last = strategy.cluster.rank == strategy.num_replicas_in_sync - 1
    errors = []
    for path in (f"{folder}/{2.0 if last else 1.0}", f"{folder}/{'none' if last else 1.0}"):
        try:
            trainer.load(path)
            errors.append("")
        except sp.UserError as error:
            errors.append(str(error))
    strategy.close()
    return found, errors[0], errors[1]


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """Examples one after the other; one replica has them in another order, from some pass on."""

    def __init__(self, other: bool, first: int) -> None:
        self.other, self.left = other, first

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        examples = list(zip(*blobs(20), strict=True))
        self.left -= 1
        yield from reversed(examples) if self.other and self.left < 0 else examples


@warns("worker 1 is gone")  # it has left the loop with its error
def other_order_in_a_loop(name: str, options: dict[str, Any]) -> str:
    """The error where the last replica alone shuffles otherwise, in a loop of its own."""
    strategy, net = make_strategy(name, **options), mlp()
    last = strategy.cluster.rank == strategy.num_replicas_in_sync - 1
    _, optimizer = strategy.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
    data, loss = sp.data.arrays(*blobs(20)).shuffle(), nn.CrossEntropyLoss(reduction="none")
    try:
        for _ in range(2):
            for batch in strategy.distribute(data.batch(5), seed=int(last)):
                strategy.backward(loss(net(batch.x), batch.y), batch)
                strategy.update(optimizer)
        strategy.close()
    except SpartitoError as error:
        return str(error)
    finally:
        strategy.close()
    return ""


def drift(name: str, options: dict[str, Any], what: str) -> tuple[int, str]:
    """The step and the error where the last replica alone changes something after step 2."""
    strategy = make_strategy(name, **options)
    last = strategy.cluster.rank == strategy.num_replicas_in_sync - 1
    net = mlp()

    class Change(sp.Callback):
        def on_train_batch_end(self, batch: int, logs: Any) -> None:
            if last and what == "value" and trainer.step == 2:
                bias: Tensor = net[0].bias  # type: ignore[index]
                bias.data = bias.data + 1e-9
            if last and what == "frozen" and trainer.step == 2:
                next(net.parameters()).requires_grad_(False)

    trainer = sp.Trainer(
        net,
        optimizer=torch.optim.SGD(net.parameters(), 0.1),
        loss=nn.CrossEntropyLoss(),
        strategy=strategy,
        seed=int(last and what == "seed"),
    )
    data = sp.data.arrays(*blobs(20)).shuffle()
    if what in ("stream", "batches", "later"):
        stream = Stream(last, first=int(what == "later"))
        data = sp.data.as_dataset(DataLoader(stream, 5) if what == "batches" else stream, None)
    try:
        batches = data if what == "batches" else data.batch(5)
        trainer.fit(batches, epochs=2, callbacks=[Change()], verbose=0)
        return trainer.step, ""
    except SpartitoError as error:
        return trainer.step, str(error)
    finally:
        strategy.close()


@warns("every=")
def one_after_the_other(name: str, options: dict[str, Any]) -> list[int]:
    """Steps of three trainings, each with a strategy of its own; all are still referred to."""
    trainers = []
    for _ in range(3):
        strategy, net = make_strategy(name, **options), mlp()
        optimizer = torch.optim.Adam(net.parameters(), 0.02)
        trainer = sp.Trainer(
            net, optimizer=optimizer, loss=nn.CrossEntropyLoss(), strategy=strategy
        )
        trainer.fit(blobs(20), batch_size=10, verbose=0)
        strategy.close()
        trainers.append(trainer)
    return [trainer.step for trainer in trainers]


@warns("every=")
def folds(name: str, options: dict[str, Any], closes: bool) -> list[tuple[bool, bool, int]]:
    """After each of three trainings: whether strategy and model are gone, and what is mapped."""
    found = []
    for _ in range(3):
        strategy = make_strategy(name, **options)
        net = mlp()
        trainer = sp.Trainer(
            net,
            optimizer=torch.optim.Adam(net.parameters(), 0.02),
            loss=nn.CrossEntropyLoss(),
            strategy=strategy,
        )
        trainer.fit(blobs(20), batch_size=10, verbose=0)
        alive = weakref.ref(strategy), weakref.ref(net)
        strategy.coordination.tell_all("")
        if closes:
            strategy.close()
        del strategy, net, trainer
        gc.collect()
        maps = Path("/proc/self/maps").read_text().count("spartito-")
        found.append((alive[0]() is None, alive[1]() is None, maps))
    return found


@warns("every=")
def optimizer_state(name: str, options: dict[str, Any]) -> list[str]:
    """What is said to a script that saves and loads an optimizer's state; "" where it may."""
    strategy, net = make_strategy(name, **options), mlp()
    shapes = [parameter.shape for parameter in net.parameters()]
    optimizer = torch.optim.Adam(net.parameters(), 0.02)
    trainer = sp.Trainer(net, optimizer=optimizer, loss=nn.CrossEntropyLoss(), strategy=strategy)
    trainer.fit(blobs(16), batch_size=8, verbose=0)
    plain = torch.optim.Adam(mlp().parameters(), 0.02)
    for parameter in plain.param_groups[0]["params"]:
        parameter.grad = torch.zeros_like(parameter)
    plain.step()
    errors = []
    try:
        state = optimizer.state_dict()["state"].values()
        assert [one["exp_avg"].shape for one in state] == shapes
        errors.append("")
    except sp.UserError as error:
        errors.append(str(error))
    try:
        optimizer.load_state_dict(plain.state_dict())
        errors.append("")
    except sp.UserError as error:
        errors.append(str(error))
    strategy.close()
    return errors
