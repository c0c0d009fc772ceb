"""What the tests of backups run on every replica: a training, its interruption, what comes then."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import nn

import spartito as sp
from spartito.training.backups import fit_count
from tests.strategies.jobs import CLASSES, FEATURES, blobs, make_strategy, weights


class Interrupted(Exception):
    """What ends a training here in place of a signal."""


class Interrupt(sp.Callback):
    """Ends it after so many steps on every task that has callbacks, and draws as users do."""

    def __init__(self, after: int | None) -> None:
        self.after = after
        self.losses: list[float] = []
        self.drawn = 0.0

    def on_train_batch_end(self, batch: int, logs: Any) -> None:
        self.losses.append(logs["loss"])
        self.drawn = random.random() + float(np.random.rand()) + float(torch.rand(()))
        if self.after is not None and self.trainer.step >= self.after:
            raise Interrupted

    def state_dict(self) -> dict[str, Any]:
        return {"losses": list(self.losses)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses = state["losses"]


def with_dropout() -> nn.Module:
    """It draws by torch's own generator where the training is not deterministic."""
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(FEATURES, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, CLASSES)
    ).double()


def train(
    name: str,
    options: dict[str, Any],
    *,
    folder: str | None = None,
    interrupt: int | None = None,
    every: Any = 3,
    deterministic: bool = True,
    accumulate: int = 1,
    steps: int | None = None,
    keep: bool = False,
) -> dict[str, Any] | None:
    """History, losses of every step and weights; None where it was interrupted."""
    strategy = make_strategy(name, **options)
    torch.manual_seed(5 + strategy.cluster.rank)
    random.seed(5 + strategy.cluster.rank)
    np.random.seed(5 + strategy.cluster.rank)
    state = torch.get_rng_state()
    net = with_dropout()
    torch.set_rng_state(state)
    trainer = sp.Trainer(
        net,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.02),
        loss=nn.CrossEntropyLoss(),
        metrics=["accuracy"],
        strategy=strategy,
        scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.9),
        accumulate=accumulate,
        deterministic=deterministic,
        seed=11,
    )
    rates = sp.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.8)
    seen = Interrupt(interrupt)
    callbacks: list[sp.Callback] = [rates, seen]
    if folder is not None:
        callbacks.insert(
            0,
            sp.callbacks.BackupAndRestore(folder, every, share=None, delete_checkpoint=not keep),
        )
    x, y = blobs(43)
    train = sp.data.arrays(x, y).shuffle().batch(8)
    try:
        history = trainer.fit(
            train,
            epochs=3,
            steps_per_epoch=steps,
            validation_data=(x[:13], y[:13]),
            callbacks=callbacks,
            verbose=0,
        )
        return {
            "history": history.history,
            "epochs": history.epoch,
            "losses": seen.losses,
            "drawn": seen.drawn,
            "weights": weights(strategy, net),
            "rate": trainer.optimizer.param_groups[0]["lr"],
            "steps": trainer.step,
        }
    except Interrupted:
        return None
    finally:
        strategy.close()
        fit_count.end()  # the next job of this process is a script of its own
