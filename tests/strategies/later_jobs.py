"""What the tests of asynchronous saving run on every replica."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import spartito as sp
from spartito.checkpoint.saving import CopyMemory
from spartito.checkpoint.stored_parts import Slot
from spartito.errors import TaskLostError, UserError
from spartito.failpoints import ENV
from tests.strategies.jobs import make_strategy

WIDE = 512


def trainer_of(strategy: sp.Strategy) -> sp.Trainer:
    torch.manual_seed(2)
    net = nn.Sequential(nn.Linear(WIDE, WIDE), nn.ReLU(), nn.Linear(WIDE, WIDE))
    return sp.Trainer(
        net,
        optimizer=lambda parameters: torch.optim.Adam(parameters, 0.01),
        loss=nn.MSELoss(),
        strategy=strategy,
    )


def data() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.rand(8, WIDE), torch.rand(8, WIDE)


class SlowCopies(CopyMemory):
    """Those of a task that comes late: another one would be far ahead if it did not wait."""

    def of(self, sections: Mapping[str, Mapping[Slot, Tensor]]) -> dict[str, dict[Slot, Tensor]]:
        time.sleep(0.2)
        return super().of(sections)


def save_later(name: str, options: dict[str, Any], folder: str, slow: int) -> None:
    """Save at once, and in a thread; all is another number before that can be through."""
    strategy = make_strategy(name, **options)
    trainer = trainer_of(strategy)
    trainer.fit(data(), batch_size=8, verbose=0)
    trainer.save(f"{folder}/now")
    if strategy.cluster.rank == slow:
        strategy.engine._kept_copies = SlowCopies()
    for number in range(2):  # the second copy goes into the memory of the first
        trainer.save(f"{folder}/later-{number}", asynchronous=True)
        with torch.no_grad():
            for parameter in trainer.model.parameters():
                parameter.data.zero_()  # as no user should: sharded refuses the other way
                for value in trainer.optimizer.state[parameter].values():
                    value.zero_()
        trainer.load(f"{folder}/now")
    strategy.close()


def fail_later(name: str, options: dict[str, Any], folder: str, ranks: list[int]) -> list[str]:
    """The error of a thread's write for which the disks of some ranks are full."""
    strategy = make_strategy(name, **options)
    trainer = trainer_of(strategy)
    trainer.fit(data(), batch_size=8, verbose=0)
    trainer.save(f"{folder}/before")
    if strategy.cluster.rank in ranks:
        os.environ[ENV] = "storage.stream.begun:error"
    said = []
    try:
        for wait in (lambda: trainer.save(f"{folder}/next"), lambda: trainer.load(folder)):
            trainer.save(f"{folder}/full", asynchronous=True)
            try:
                wait()
            except UserError as error:
                said.append(str(error))
    finally:
        os.environ.pop(ENV, None)
    trainer.save(f"{folder}/after")
    strategy.close()
    return said


def fit_saving_later(name: str, options: dict[str, Any], folder: str) -> list[str]:
    """What lies there when `fit` has returned."""
    strategy = make_strategy(name, **options)
    trainer = trainer_of(strategy)
    saving = sp.callbacks.ModelCheckpoint(folder, keep=2, every_steps=1, asynchronous=True)
    trainer.fit(data(), batch_size=2, epochs=2, callbacks=[saving], verbose=0)
    found = sorted(path.name for path in Path(folder).glob("step-*"))
    trainer.load(folder)
    assert (trainer.step, trainer.epoch) == (8, 2)
    strategy.close()
    return found


def save_apart(name: str, options: dict[str, Any], folder: str) -> str:
    """Save where only the chief finds its directory; the error of a full disk there."""
    strategy = make_strategy(name, **options)
    trainer, here = trainer_of(strategy), os.getcwd()
    trainer.fit(data(), batch_size=8, verbose=0)
    trainer.save(f"{folder}/now")
    own = Path(folder, f"machine-{strategy.cluster.rank}")
    own.mkdir()
    os.chdir(own)  # a relative path is another directory on each
    try:
        trainer.save("now")
        trainer.save("later", asynchronous=True)
        trainer.wait()
        if strategy.is_chief:
            os.environ[ENV] = "storage.stream.begun:error"
        try:
            trainer.save("full")
            said = ""
        except UserError as error:
            said = str(error)
    finally:
        os.environ.pop(ENV, None)
        os.chdir(here)
    trainer.save(f"{folder}/after")
    strategy.close()
    return said


def die_later(name: str, options: dict[str, Any], folder: str, victim: int) -> str:
    """What the others are told when a task dies in its thread, in the middle of a file."""
    strategy = make_strategy(name, **options)
    trainer = trainer_of(strategy)
    trainer.fit(data(), batch_size=8, verbose=0)
    trainer.save(f"{folder}/before")
    if strategy.cluster.rank == victim:
        os.environ[ENV] = "storage.stream.begun:kill"
    trainer.save(f"{folder}/next", asynchronous=True)
    try:
        trainer.wait()
    except TaskLostError as error:
        return str(error)
    return "nothing"
