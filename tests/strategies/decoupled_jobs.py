"""What the tests of groups over parameter servers run on every replica."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

import spartito as sp
from tests.replicas import warns
from tests.strategies.jobs import CLASSES, FEATURES, blobs, make_strategy, mlp, weights
from tests.strategies.local_jobs import BATCH, EPOCHS, EXAMPLES, INNER


@warns("")  # the test reads it
def heard(
    name: str, options: dict[str, Any], what: Callable[..., Any], log: str, **more: Any
) -> Any:
    """What ``what`` returns; the lines that our logger shows meanwhile are added to a file."""
    lines, logger = logging.FileHandler(log), logging.getLogger("spartito")
    logger.addHandler(lines)
    try:
        return what(name, options, **more)
    finally:
        logger.removeHandler(lines)
        lines.close()


def kept(name: str, options: dict[str, Any], path: str, at: Sequence[int]) -> dict[str, Tensor]:
    """The weights of a whole training whose chief saves after so many of its batches, each."""
    strategy = make_strategy(name, **options)
    net = mlp()

    class Save(sp.Callback):
        batches = 0

        def on_train_batch_end(self, batch: int, logs: Any) -> None:
            self.batches += 1
            if self.batches in at:
                self.trainer.save(f"{path}/{self.batches}")

        def on_epoch_end(self, epoch: int, logs: Any) -> None:
            self.trainer.save(f"{path}/epoch-{epoch}")

    trainer = sp.Trainer(
        net, optimizer=INNER["adamw"], loss=nn.CrossEntropyLoss(), strategy=strategy,
        deterministic=True,
    )  # fmt: skip
    data = sp.data.arrays(*blobs(EXAMPLES)).batch(BATCH)
    trainer.fit(data, epochs=EPOCHS, callbacks=[Save()], verbose=0)
    trainer.save(f"{path}/end")
    found = weights(strategy, net)
    strategy.close()
    return found


def at_first() -> float:
    """The loss of the model before any training."""
    x, y = blobs(EXAMPLES)
    return nn.functional.cross_entropy(mlp()(x), y).item()


def evaluating(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """A training in which callbacks evaluate, where there are any, and what all find after it."""
    strategy = make_strategy(name, **options)
    net = mlp()
    x, y = blobs(EXAMPLES)
    found: list[float] = []

    class Evaluate(sp.Callback):
        def on_epoch_begin(self, epoch: int) -> None:
            self.batches = 0

        def on_train_batch_end(self, batch: int, logs: Any) -> None:
            self.batches += 1
            if self.batches == 3:
                found.append(trainer.evaluate((x, y))["loss"])

        def on_epoch_end(self, epoch: int, logs: Any) -> None:
            found.append(trainer.evaluate((x, y))["loss"])

    trainer = sp.Trainer(
        net, optimizer=INNER["adamw"], loss=nn.CrossEntropyLoss(), strategy=strategy
    )
    history = trainer.fit(
        sp.data.arrays(x, y).batch(BATCH),
        epochs=EPOCHS,
        validation_data=(x, y),
        callbacks=[Evaluate()],
        verbose=0,
    )
    after = trainer.evaluate((x, y))["loss"]
    result = {"history": history.history["val_loss"], "found": found, "after": after}
    strategy.close()
    return result


def gone_on(
    name: str, options: dict[str, Any], path: str, all_load: bool, epochs: int
) -> dict[str, Tensor]:
    """The weights of a training that goes on from a checkpoint, which the chief or all load."""
    strategy = make_strategy(name, **options)
    net = mlp()
    trainer = sp.Trainer(
        net, optimizer=INNER["adamw"], loss=nn.CrossEntropyLoss(), strategy=strategy,
        deterministic=True,
    )  # fmt: skip
    if all_load or strategy.is_chief:
        trainer.load(path)
    data = sp.data.arrays(*blobs(EXAMPLES)).batch(BATCH)
    trainer.fit(data, epochs=epochs, verbose=0)
    found = weights(strategy, net)
    strategy.close()
    return found


def figures(name: str, options: dict[str, Any], path: str, at: int) -> dict[str, list[float]]:
    """Loss and accuracy of a training that is saved after ``at`` batches; 0: goes on from there."""
    strategy = make_strategy(name, **options)
    trainer = sp.Trainer(
        mlp(), optimizer=INNER["adamw"], loss=nn.CrossEntropyLoss(), metrics=["accuracy"],
        strategy=strategy, deterministic=True,
    )  # fmt: skip

    class Save(sp.Callback):
        batches = 0

        def on_train_batch_end(self, batch: int, logs: Any) -> None:
            self.batches += 1
            if self.batches == at:
                trainer.save(path)

    if not at:
        trainer.load(path)
    data = sp.data.arrays(*blobs(EXAMPLES)).batch(BATCH)
    history = trainer.fit(data, epochs=2, callbacks=[Save()], verbose=0).history
    strategy.close()
    return {name: history[name] for name in ("loss", "accuracy")}


def counted(name: str, options: dict[str, Any], path: str, epochs: int) -> float:
    """The updates that this task's optimizer has counted, where the chief alone has loaded."""
    strategy = make_strategy(name, **options)
    net = mlp()
    trainer = sp.Trainer(
        net, optimizer=INNER["adamw"], loss=nn.CrossEntropyLoss(), strategy=strategy
    )
    if strategy.is_chief:
        trainer.load(path)
    trainer.fit(sp.data.arrays(*blobs(EXAMPLES)).batch(BATCH), epochs=epochs, verbose=0)
    found = trainer.optimizer.state[next(net.parameters())]["step"]
    strategy.close()
    return float(found)


def featured(
    name: str,
    options: dict[str, Any],
    accumulate: int = 1,
    clip: float | None = None,
    schedule: bool = False,
    norm: bool = False,
) -> dict[str, Any]:
    """Weights, losses and accuracies of a training with more to an update."""
    strategy = make_strategy(name, **options)
    net = normalized(norm)
    trainer = sp.Trainer(
        net, optimizer=INNER["sgd"], loss=nn.CrossEntropyLoss(), metrics=["accuracy"],
        strategy=strategy, accumulate=accumulate, clip_norm=clip,
        scheduler=(lambda o: StepLR(o, 2, 0.5)) if schedule else None,
    )  # fmt: skip
    data = sp.data.arrays(*blobs(EXAMPLES)).batch(BATCH)
    history = trainer.fit(data, epochs=EPOCHS, verbose=0).history
    found: dict[str, Any] = {n: history[n] for n in ("loss", "accuracy")}
    if strategy.is_chief or "inside" not in options:  # else it may have parts of them
        found["weights"] = weights(strategy, net)
    strategy.close()
    return found


def normalized(norm: bool) -> nn.Module:
    """A small network, with or without BatchNorm."""
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(FEATURES, 8), *([nn.BatchNorm1d(8)] if norm else []), nn.ReLU(),
        nn.Linear(8, CLASSES),
    ).double()  # fmt: skip


def featured_by_torch(
    groups: int,
    every: int,
    accumulate: int = 1,
    clip: float | None = None,
    schedule: bool = False,
    norm: bool = False,
) -> dict[str, Any]:
    """The same with plain torch: a model for each group, which have equal parts of each batch."""
    x, y = blobs(EXAMPLES)
    start = normalized(norm)
    nets = [copy.deepcopy(start) for _ in range(groups)]
    optimizers = [INNER["sgd"](net.parameters()) for net in nets]
    schedules = [StepLR(optimizer, 2, 0.5) for optimizer in optimizers]
    found: dict[str, Any] = {"loss": [], "accuracy": []}

    @torch.no_grad()
    def merge() -> None:
        for name, value in start.state_dict().items():
            theirs = [net.state_dict()[name] for net in nets]
            mean = torch.stack(theirs).double().mean(0).to(value.dtype)
            for each in (value, *theirs):
                each.copy_(mean)

    for _ in range(EPOCHS):
        total, right, since = 0.0, 0, 0
        firsts = range(0, EXAMPLES, BATCH)
        for begin in range(0, len(firsts), accumulate):
            for g, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
                weight, losses = 0, []
                for first in firsts[begin : begin + accumulate]:
                    size = min(EXAMPLES, first + BATCH) - first
                    rows = slice(first + size * g // groups, first + size * (g + 1) // groups)
                    output = net(x[rows])
                    losses.append(nn.functional.cross_entropy(output, y[rows], reduction="sum"))
                    weight += len(y[rows])
                    right += int((output.argmax(1) == y[rows]).sum())
                optimizer.zero_grad()
                loss = torch.stack(losses).sum()
                (loss / weight).backward()
                total += loss.item()
                if clip is not None:
                    nn.utils.clip_grad_norm_(net.parameters(), clip)
                optimizer.step()
                if schedule:
                    schedules[g].step()
            since += 1
            if since == every:
                merge()
                since = 0
        if since:
            merge()
        found["loss"].append(total / EXAMPLES)
        found["accuracy"].append(right / EXAMPLES)
    return {**found, "weights": {name: v.clone() for name, v in start.state_dict().items()}}


def failing(name: str, options: dict[str, Any]) -> str:
    """How a training ends whose second member fails, though its process lives on."""
    strategy = make_strategy(name, **options)
    calls = 0

    def loss(output: Tensor, target: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 5 and strategy.task.index == 1:
            raise RuntimeError("the loss of worker 1")
        return nn.functional.cross_entropy(output, target, reduction="none")

    trainer = sp.Trainer(mlp(), optimizer=INNER["sgd"], loss=loss, strategy=strategy)
    try:
        trainer.fit(sp.data.arrays(*blobs(EXAMPLES)).batch(BATCH), epochs=EPOCHS, verbose=0)
    except RuntimeError as error:
        return str(error)  # without a word to the others
    except sp.TaskLostError as error:
        strategy.close()  # ends the server
        return str(error)
    return "it did not fail"


def lengthy(name: str, options: dict[str, Any], seconds: float) -> list[float]:
    """A training whose chief takes so long after its first epoch, and once more to evaluate."""
    strategy = make_strategy(name, **options)

    class Long(sp.Callback):
        def on_epoch_end(self, epoch: int, logs: Any) -> None:
            time.sleep(0 if epoch else seconds)

        def on_test_begin(self) -> None:
            time.sleep(seconds)

    trainer = sp.Trainer(
        mlp(), optimizer=INNER["sgd"], loss=nn.CrossEntropyLoss(), strategy=strategy
    )
    data = sp.data.arrays(*blobs(EXAMPLES)).batch(BATCH)
    history = trainer.fit(data, epochs=2, callbacks=[Long()], verbose=0).history
    found = trainer.evaluate(data, callbacks=[Long()])["loss"]
    strategy.close()
    return [*history["loss"], found]


def saved_alone(name: str, options: dict[str, Any], path: str) -> None:
    """A training that the chief alone saves when it is over."""
    strategy = make_strategy(name, **options)
    trainer = sp.Trainer(
        mlp(), optimizer=INNER["sgd"], loss=nn.CrossEntropyLoss(), strategy=strategy
    )
    trainer.fit(sp.data.arrays(*blobs(EXAMPLES)).batch(BATCH), epochs=1, verbose=0)
    if strategy.is_chief:
        trainer.save(path)
    strategy.close()
