"""One side of a race of trainers: an MLP from arrays, and the seconds per step of every epoch.

fit           Spartito's Trainer.fit
loader        a loop over a shuffled DataLoader, under DistributedDataParallel where there are two
lightning     pytorch_lightning.Trainer with its own DDP strategy
transformers  transformers.Trainer, which takes DDP itself
keras         keras.Model.fit on torch, in one process

All shuffle, all have torch's fused Adam (Keras its own), none writes files or a progress bar. `fit`
and the loop report the mean loss of an epoch; nothing is logged by the others.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

import spartito as sp
from benchmarks.common import flush_denormals
from benchmarks.jobs.plain import mlp
from benchmarks.jobs.steps import adam


@dataclass(frozen=True)
class Race:
    """Examples in memory, of which each process computes ``size`` in a step."""

    x: Tensor
    y: Tensor
    size: int
    world_size: int
    epochs: int
    clock: Clock


@dataclass
class Clock:
    """Seconds per step of every epoch, by the clock or of the process's CPU time."""

    now: Callable[[], float]
    steps: int
    windows: list[float] = field(default_factory=list)
    began: float = 0.0

    def begin(self, *_: Any, **__: Any) -> None:
        self.began = self.now()

    def end(self, *_: Any, **__: Any) -> None:
        self.windows.append((self.now() - self.began) / self.steps)


def main() -> None:
    """Run the side that the command line names; rank 0 prints."""
    options = argparse.ArgumentParser()
    options.add_argument("side", choices=SIDES)
    for name in ("size", "steps", "epochs"):
        options.add_argument(f"--{name}", type=int, required=True)
    options.add_argument("--cpu", action="store_true")
    given = options.parse_args()
    torch.set_num_threads(1)
    flush_denormals()
    world_size = int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    count = given.steps * given.size * world_size
    x, y = torch.rand(count, 784), torch.randint(0, 10, (count,))
    is_first = os.environ["RANK"] == "0"
    clock = Clock(time.process_time if given.cpu else time.perf_counter, given.steps)
    race = Race(x, y, given.size, world_size, given.epochs + 1, clock)
    with tempfile.TemporaryDirectory() as folder:
        SIDES[given.side](race, folder)
    if is_first:
        print(json.dumps(clock.windows[1:]), flush=True)  # the first one warms up


def fit(race: Race, _: str) -> None:
    """`Trainer.fit`."""
    model, clock = mlp(), race.clock
    strategy = sp.OneDeviceStrategy() if race.world_size == 1 else sp.MirroredStrategy()
    trainer = sp.Trainer(
        model, optimizer=adam(model), loss=nn.CrossEntropyLoss(), strategy=strategy
    )
    data = sp.data.arrays(race.x, race.y).shuffle().batch(race.size * race.world_size)
    callback = sp.callbacks.LambdaCallback(on_epoch_begin=clock.begin, on_epoch_end=clock.end)
    trainer.fit(data, epochs=race.epochs, callbacks=[callback], verbose=False)
    strategy.close()


def loader(race: Race, _: str) -> None:
    """What one writes without a library."""
    if race.world_size == 1:
        loop(race)
        return
    dist.init_process_group("gloo")
    loop(race)  # which frees its model: after the group is destroyed that can wait for ever
    dist.destroy_process_group()


def loop(race: Race) -> None:
    """Epochs over a shuffled DataLoader, with the mean loss of each."""
    several, clock = race.world_size > 1, race.clock
    data = TensorDataset(race.x, race.y)
    sampler: Any = DistributedSampler(data) if several else None
    batches = DataLoader(data, batch_size=race.size, shuffle=not several, sampler=sampler)
    model: nn.Module = mlp()
    model = nn.parallel.DistributedDataParallel(model) if several else model
    optimizer = adam(model)
    for epoch in range(race.epochs):
        clock.begin()
        if several:
            sampler.set_epoch(epoch)
        total = 0.0
        for x, y in batches:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(x)
        clock.end()


def lightning(race: Race, folder: str) -> None:
    """Lightning without logger, bar and checkpoints."""
    import pytorch_lightning as pl
    from lightning_fabric.plugins.environments.lightning import LightningEnvironment

    clock = race.clock

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = mlp()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            return nn.functional.cross_entropy(self.layers(x), y)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return adam(self)

    class Epochs(pl.Callback):
        def on_train_epoch_start(self, *_: Any) -> None:
            clock.begin()

        def on_train_epoch_end(self, *_: Any) -> None:
            clock.end()

    trainer = pl.Trainer(
        max_epochs=race.epochs,
        accelerator="cpu",
        devices=race.world_size,
        strategy="auto" if race.world_size == 1 else "ddp",
        plugins=[LightningEnvironment()],
        callbacks=[Epochs()],
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = TensorDataset(race.x, race.y)
    trainer.fit(Module(), DataLoader(data, batch_size=race.size, shuffle=True))


class Rows(Dataset[dict[str, Tensor]]):
    """What Transformers' Trainer reads: examples that are dicts."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "labels": self.y[index]}


class Computing(nn.Module):
    """A model that computes its own loss, as those of Transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """The loss of a batch."""
        logits = self.layers(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def transformers(race: Race, folder: str) -> None:
    """Transformers' Trainer without logs, bar, checkpoints and clipping."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    if race.world_size == 1:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            os.environ.pop(name)
    clock = race.clock

    class Epochs(TrainerCallback):
        def on_epoch_begin(self, *_: Any, **__: Any) -> None:
            clock.begin()

        def on_epoch_end(self, *_: Any, **__: Any) -> None:
            clock.end()

    model = Computing()
    args = TrainingArguments(
        folder,
        num_train_epochs=race.epochs,
        per_device_train_batch_size=race.size,
        max_grad_norm=0.0,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
        ddp_backend="gloo" if race.world_size > 1 else None,
    )
    optimizer = adam(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    Trainer(
        model,
        args,
        train_dataset=Rows(race.x, race.y),
        optimizers=(optimizer, schedule),
        callbacks=[Epochs()],
    ).train()


def keras(race: Race, _: str) -> None:
    """Keras on torch, compiled as its users have it there."""
    os.environ["KERAS_BACKEND"] = "torch"
    import keras

    layers = [keras.layers.Dense(width, activation="relu") for width in (256, 256)]
    model = keras.Sequential([keras.Input((784,)), *layers, keras.layers.Dense(10)])
    model.compile(
        optimizer=keras.optimizers.Adam(1e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    callback = keras.callbacks.LambdaCallback(
        on_epoch_begin=race.clock.begin, on_epoch_end=race.clock.end
    )
    model.fit(
        race.x.numpy(),
        race.y.numpy(),
        batch_size=race.size,
        epochs=race.epochs,
        verbose=0,
        callbacks=[callback],
    )


SIDES: dict[str, Callable[[Race, str], None]] = {
    "fit": fit,
    "loader": loader,
    "lightning": lightning,
    "transformers": transformers,
    "keras": keras,
}

if __name__ == "__main__":
    main()
