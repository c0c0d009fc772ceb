"""Trainers that take turns in one process, and fits that follow each other, each as if alone."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spartito as sp
from spartito.training.callback import Logs

ROWS, BATCH = 16, 4


def data(rows: int = ROWS, seed: int = 1, bad: bool = False) -> sp.data.Dataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(rows, 3, generator=generator, dtype=torch.float64)
    y = x.sum(1, keepdim=True)
    if bad:
        x[BATCH] = math.nan
    return sp.data.arrays(x, y).batch(BATCH)


def trainer(net: nn.Module | None = None, **options: Any) -> sp.Trainer:
    torch.manual_seed(0)
    net = nn.Linear(3, 1).double() if net is None else net
    options.setdefault("strategy", sp.strategy("one_device"))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    return sp.Trainer(net, optimizer=optimizer, loss=nn.MSELoss(), **options)


def test_each_does_what_it_was_asked_with_updates_that_are_not_finite() -> None:
    with sp.strategy("one_device") as strategy:
        first = trainer(strategy=strategy, on_nonfinite="skip")
        second = trainer(strategy=strategy)
        found = first.fit(data(bad=True), verbose=0).history
        assert found["skipped"] == [1]
        assert math.isfinite(found["loss"][0])
        assert math.isnan(second.fit(data(bad=True), verbose=0).history["loss"][0])


def test_a_fit_that_is_stopped_did_not_end_by_what_an_earlier_one_left_out(
    tmp_path: Path,
) -> None:
    class Stops(sp.Callback):
        def on_epoch_end(self, epoch: int, logs: Logs) -> None:
            self.trainer.stop_training = True

    one = trainer(on_nonfinite="stop", run_dir=tmp_path)
    one.fit(data(bad=True), verbose=0)
    assert json.loads((tmp_path / "config.json").read_text())["fit"]["end"] == "not finite"
    one.fit(data(), epochs=9, callbacks=Stops(), verbose=0)
    assert json.loads((tmp_path / "config.json").read_text())["fit"]["end"] == "stopped"


def kept(folder: Path) -> Sequence[str]:
    return sorted(path.name for path in folder.glob("step-*"))


def test_what_is_best_is_so_of_one_training(tmp_path: Path) -> None:
    """One that begins far off keeps its own best, though another one was better."""
    checkpoint = sp.callbacks.ModelCheckpoint(monitor="loss", save_best_only=True)
    for name, far in (("near", 1.0), ("far", 100.0)):
        net = nn.Linear(3, 1).double()
        nn.init.constant_(net.weight, far)
        one = trainer(net, run_dir=tmp_path / name)
        one.fit(data(), epochs=2, callbacks=checkpoint, verbose=0)
    assert len(kept(tmp_path / "near" / "checkpoints")) == 2
    assert len(kept(tmp_path / "far" / "checkpoints")) == 2


def test_what_is_best_is_so_of_one_figure(tmp_path: Path) -> None:
    checkpoint = sp.callbacks.ModelCheckpoint(tmp_path)
    one = trainer()
    one.fit(data(), callbacks=checkpoint, verbose=0)
    other = sp.data.arrays(torch.ones(4, 3).double(), torch.full((4, 1), 50.0).double())
    one.fit(data(), epochs=3, validation_data=other.batch(4), callbacks=checkpoint, verbose=0)
    best = json.loads((tmp_path / "best.json").read_text())
    assert best["monitor"] == "val_loss"


def test_what_each_did_is_in_its_own_folder(tmp_path: Path) -> None:
    with sp.strategy("one_device") as strategy:
        names = ("first", "second")
        both = [trainer(strategy=strategy, run_dir=tmp_path / name) for name in names]
        for epochs, one in enumerate(both, 1):
            one.fit(data(), epochs=epochs, verbose=0)
    for epochs, name in enumerate(names, 1):
        record = json.loads((tmp_path / name / "tasks" / "worker-0.json").read_text())
        assert record["examples"] == epochs * ROWS
    left = json.loads((tmp_path / "first" / "tasks" / "worker-0.now").read_text())
    assert left["phase"] == "ended"


class Counts(nn.Linear):
    """Has a buffer that no checkpoint has, and that decides what comes out."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__(3, 1, dtype=torch.float64)
        self.register_buffer("seen", torch.zeros(1, dtype=torch.float64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen = self.seen + 1
        return super().forward(x) * (1 + self.seen)


def test_a_search_leaves_every_buffer_as_it_was() -> None:
    def loss(before: Callable[[sp.Trainer], object]) -> float:
        torch.manual_seed(0)
        one = trainer(Counts())
        before(one)
        found: float = one.fit(data(), verbose=0).history["loss"][0]
        return found

    assert loss(lambda one: one.find_learning_rate(data(), steps=5)) == loss(lambda _: None)


def test_a_fit_of_other_data_after_an_error_begins_with_an_update_of_its_own() -> None:
    """The error came between two batches of an update, of which the first was computed."""

    class Fails(sp.Callback):
        def on_train_batch_end(self, batch: int, logs: Logs) -> None:
            if batch == 2:
                raise ValueError("enough")

    class Notes(sp.Callback):
        def on_train_batch_end(self, batch: int, logs: Logs) -> None:
            steps.append(self.trainer.step)

    def after(first: Callable[[sp.Trainer], object]) -> list[float]:
        one = trainer(accumulate=2)
        first(one)
        steps.clear()
        found: list[float] = one.fit(data(8, 2), callbacks=Notes(), verbose=0).history["loss"]
        assert steps == [1, 2]
        return found

    def fails(one: sp.Trainer) -> None:
        with pytest.raises(ValueError, match="enough"):
            one.fit(chain, callbacks=Fails(), verbose=0)

    steps: list[int] = []
    chain = data(20)
    assert after(fails) == after(lambda one: one.fit(chain, max_steps=1, verbose=0))
