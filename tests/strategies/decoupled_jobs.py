"""What the tests of groups over parameter servers run on every replica."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

import spartito as sp
from tests.strategies.jobs import blobs, make_strategy, mlp, weights
from tests.strategies.local_jobs import BATCH, EPOCHS, EXAMPLES, INNER


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
