"""How a fit goes: its epochs, schedules and hooks, and what goes on after it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spartito as sp
from spartito.errors import UserError
from tests.training.jobs import data, largest, net, trainer
from tests.training.test_trainer import equal, weights


def test_history_has_a_value_for_every_epoch() -> None:
    made = trainer(metrics=["accuracy"])
    history = made.fit(data(), epochs=3, batch_size=6, validation_data=data(5), verbose=0)
    assert history.epoch == [0, 1, 2]
    assert list(history.history) == ["loss", "accuracy", "val_loss", "val_accuracy"]
    assert all(len(values) == 3 for values in history.history.values())
    assert (made.step, made.epoch, made.steps_per_epoch) == (12, 3, 4)
    assert made.history is history
    assert made.fit(data(), epochs=0, verbose=0).history == {}


def test_fitting_again_goes_on() -> None:
    chain = sp.data.arrays(*data()).shuffle().batch(6)
    once, twice = trainer(), trainer()
    whole = once.fit(chain, epochs=4, verbose=0)
    first = twice.fit(chain, epochs=1, verbose=0)
    second = twice.fit(chain, epochs=4, initial_epoch=1, verbose=0)
    assert equal(weights(once), weights(twice))
    assert (first.epoch, second.epoch) == ([0], [1, 2, 3])
    assert whole.history["loss"] == first.history["loss"] + second.history["loss"]
    assert twice.step == 16


def test_virtual_epochs_are_stretches_of_the_same_order() -> None:
    chain = sp.data.arrays(*data()).shuffle().batch(6).prefetch(2)  # 4 batches a pass
    plain, virtual = trainer(), trainer()
    plain.fit(chain, epochs=3, verbose=0)
    history = virtual.fit(chain, epochs=4, steps_per_epoch=3, verbose=0)
    assert equal(weights(plain), weights(virtual))
    assert len(history.history["loss"]) == 4
    assert virtual.steps_per_epoch == 3


@pytest.mark.parametrize("steps", [None, 3])
def test_after_an_error_training_can_go_on(steps: int | None) -> None:
    chain = sp.data.arrays(*data()).shuffle().batch(6).prefetch(2)

    class Interrupt(sp.Callback):
        def on_train_batch_end(self, batch: int, logs: Any) -> None:
            if self.trainer.step == 2:
                raise KeyboardInterrupt

    made = trainer()
    with pytest.raises(KeyboardInterrupt):
        made.fit(chain, epochs=2, steps_per_epoch=steps, callbacks=[Interrupt()], verbose=0)
    history = made.fit(chain, epochs=2, steps_per_epoch=steps, verbose=0)
    assert all(math.isfinite(loss) for loss in history.history["loss"])
    assert made.step == 2 * (steps or 4)  # what was begun was ended


def test_an_error_in_the_data_is_not_the_end_of_it() -> None:
    broken = [True]

    def once(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if broken:
            broken.clear()
            raise ConnectionError("no network")
        return x, y

    made = trainer()
    chain = sp.data.arrays(*data()).map(once).batch(5)
    with pytest.raises(ConnectionError):
        made.fit(chain, epochs=1, steps_per_epoch=4, verbose=0)
    history = made.fit(chain, epochs=1, steps_per_epoch=4, verbose=0)
    assert made.step == 4
    assert math.isfinite(history.history["loss"][0])


def test_accumulated_batches_are_one_step() -> None:
    chain = sp.data.arrays(*data(22)).batch(5)
    small = trainer(accumulate=2)
    large = trainer()
    small.fit(chain, verbose=0)
    large.fit(sp.data.arrays(*data(22)).batch(10), verbose=0)
    assert (small.step, large.step) == (3, 3)
    for one, other in zip(weights(small), weights(large), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


SCHEDULES: list[Any] = [
    lambda o: torch.optim.lr_scheduler.StepLR(o, 3, 0.5),
    lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.5, total_steps=12),
    lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
]


@pytest.mark.parametrize("make", SCHEDULES)
def test_schedules_are_stepped_once_per_step(make: Any) -> None:
    made = trainer(scheduler=make)
    made.fit(data(), epochs=3, batch_size=5, verbose=0)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    schedule = make(optimizer)
    x, y = data()
    for _ in range(3):
        for start in range(0, 20, 5):
            optimizer.zero_grad()
            rows = slice(start, start + 5)
            nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
            schedule.step()
    assert made.optimizer is not None
    assert made.optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    for one, other in zip(weights(made), model.parameters(), strict=True):
        torch.testing.assert_close(one, other.detach(), rtol=0, atol=1e-12)


def test_a_schedule_that_watches_the_loss_and_a_given_one() -> None:
    plateau = trainer(
        optimizer=lambda parameters: torch.optim.SGD(parameters, 0.0),
        scheduler=lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0, eps=0),
    )
    assert plateau.optimizer is not None
    plateau.optimizer.param_groups[0]["lr"] = 1e-12  # nothing gets better
    plateau.fit(data(), epochs=3, validation_data=data(), verbose=0)
    assert plateau.optimizer.param_groups[0]["lr"] < 1e-12
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    given = trainer(model=model, optimizer=optimizer, scheduler=schedule)
    given.fit(data(), batch_size=10, verbose=0)
    assert optimizer.param_groups[0]["lr"] == 0.025


def test_a_schedule_by_epochs_is_torchs(caplog: pytest.LogCaptureFixture) -> None:
    made = trainer(
        scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5), scheduler_interval="epoch"
    )
    made.fit(data(), epochs=3, batch_size=5, verbose=0)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    x, y = data()
    for _ in range(3):
        for start in range(0, 20, 5):
            optimizer.zero_grad()
            rows = slice(start, start + 5)
            nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
        schedule.step()
    assert made.optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    for one, other in zip(weights(made), model.parameters(), strict=True):
        torch.testing.assert_close(one, other.detach(), rtol=0, atol=1e-12)
    assert not caplog.records


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5), True),
        (lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 20), False),
        (lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 20), False),
        (lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.5, total_steps=40), False),
        (lambda o: torch.optim.lr_scheduler.LinearLR(o, 1.0, 1e-6, total_iters=20), False),
    ],
)
def test_a_rate_that_collapses_within_an_epoch(
    make: Any, said: bool, caplog: pytest.LogCaptureFixture
) -> None:
    batches = list(zip(*(part.split(4) for part in data(80)), strict=True))
    for given in (data(80), sp.data.per_worker(lambda context: batches)):  # 20 steps; unknown
        caplog.clear()
        made = trainer(scheduler=make)
        made.fit(given, epochs=1, batch_size=4, verbose=0)
        assert ('scheduler_interval="epoch"' in caplog.text) == said
        assert len(caplog.records) == said


@pytest.mark.parametrize(("steps", "epochs"), [(3, 1), (3, 3), (4, 3)])
def test_a_cycle_that_ends_with_a_short_epoch_has_not_collapsed(
    steps: int, epochs: int, caplog: pytest.LogCaptureFixture
) -> None:
    total = steps * epochs
    made = trainer(
        scheduler=lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.5, total_steps=total)
    )
    made.fit(data(4 * steps), epochs=epochs, batch_size=4, verbose=0)
    assert made.step == total
    assert not caplog.records


def test_a_plateau_watches_what_it_is_told() -> None:
    def plateau(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, mode="max", factor=0.5, patience=0
        )

    made = trainer(
        metrics=["accuracy", largest],
        scheduler=plateau,
        scheduler_monitor="val_largest",
        optimizer=lambda parameters: torch.optim.SGD(parameters, 1e-3),
    )

    class Higher(sp.Callback):
        def on_epoch_begin(self, epoch: int) -> None:
            with torch.no_grad():
                made.model[2].bias += 1.0 if epoch < 3 else -1.0  # type: ignore[index]

    made.fit(data(), epochs=5, validation_data=data(), callbacks=[Higher()], verbose=0)
    assert made.optimizer.param_groups[0]["lr"] == 1e-3 / 4  # of the last two, which got lower
    with pytest.raises(UserError, match="monitor is 'val_largest', which no epoch reports"):
        made.fit(data(), verbose=0)
    for options, text in (
        ({"scheduler": plateau}, "without a figure to watch"),
        ({"scheduler": plateau, "scheduler_monitor": "loss"}, "of which less is better"),
        ({"scheduler_monitor": "loss"}, "without a ReduceLROnPlateau"),
        ({"scheduler_interval": "epochs"}, "scheduler_interval='epochs'"),
    ):
        with pytest.raises(UserError, match=text):
            trainer(**options)


class Diary(sp.Callback):
    """Writes down what it is told; ``mark`` is what it remembers over a resume."""

    def __init__(self, name: str, pages: list[str]) -> None:
        self.name, self.pages, self.mark = name, pages, 0

    def _note(self, what: str) -> None:
        self.pages.append(f"{self.name}: {what}")

    def on_train_begin(self) -> None:
        self._note(f"begin {self.trainer.epochs}")

    def on_train_end(self) -> None:
        self._note("end")

    def on_train_error(self, error: BaseException) -> None:
        self._note(f"error {type(error).__name__}")

    def on_epoch_begin(self, epoch: int) -> None:
        self._note(f"epoch {epoch}")

    def on_epoch_end(self, epoch: int, logs: Any) -> None:
        assert {"loss", "accuracy", "seconds", "examples_per_second", "data_wait_fraction"} <= set(
            logs
        )
        self.mark += 1
        self._note(f"epoch {epoch} ended")

    def on_train_batch_end(self, batch: int, logs: Any) -> None:
        assert list(logs) == ["loss", "accuracy"]
        assert math.isfinite(logs["loss"])
        assert 0 <= logs["accuracy"] <= 1
        self._note(f"batch {batch}")

    def state_dict(self) -> dict[str, Any]:
        return {"mark": self.mark}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mark = state["mark"]


class Other(Diary):
    """Another class of callbacks."""


def test_the_order_of_hooks() -> None:
    pages: list[str] = []
    made = trainer(metrics=["accuracy"])
    both = [Diary("a", pages), Diary("b", pages)]
    made.fit(data(), epochs=2, batch_size=10, callbacks=both, verbose=0)
    each = ["begin 2"]
    for epoch in range(2):
        each += [f"epoch {epoch}", "batch 0", "batch 1", f"epoch {epoch} ended"]
    expected = [f"{name}: {what}" for what in [*each, "end"] for name in "ab"]
    assert pages == expected

    pages.clear()
    with pytest.raises(UserError):
        made.fit((data()[0], torch.zeros(20, 7)), callbacks=[Diary("a", pages)], verbose=0)
    assert pages == ["a: begin 1", "a: epoch 0", "a: error UserError"]


def test_states_of_callbacks_find_their_owners(tmp_path: Path) -> None:
    pages: list[str] = []
    made = trainer(metrics=["accuracy"])
    saved = [Diary("a", pages), Other("b", pages), Diary("c", pages)]
    made.fit(data(), epochs=2, callbacks=saved, verbose=0)
    saved[0].mark, saved[1].mark, saved[2].mark = 10, 20, 30
    made.save(tmp_path / "checkpoint")
    again = trainer(metrics=["accuracy", "mae"][:1])
    again.load(tmp_path / "checkpoint")
    first, other, second, third = (
        Other("b", pages),
        sp.callbacks.TerminateOnNaN(),
        Diary("a", pages),
        Diary("c", pages),
    )
    again.fit(data(), epochs=2, callbacks=[first, other, second, third], verbose=0)
    assert (first.mark, second.mark, third.mark) == (20, 10, 30)


@pytest.mark.parametrize("steps", [None, 3])
@pytest.mark.parametrize("after", range(1, 9))
def test_resuming_anywhere_is_going_on(tmp_path: Path, steps: int | None, after: int) -> None:
    def make() -> sp.Trainer:
        return trainer(
            metrics=["accuracy"],
            optimizer=lambda parameters: torch.optim.Adam(parameters, 0.05),
            scheduler=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
            deterministic=True,
        )

    chain = sp.data.arrays(*data()).shuffle().batch(6)

    class Save(sp.Callback):
        def on_train_batch_end(self, batch: int, logs: Any) -> None:
            if self.trainer.step == after:
                self.trainer.save(tmp_path / "middle")

    whole = make()
    history = whole.fit(chain, epochs=3, steps_per_epoch=steps, callbacks=[Save()], verbose=0)
    resumed = make()
    resumed.load(tmp_path / "middle")
    rest = resumed.fit(chain, epochs=3, steps_per_epoch=steps, verbose=0)
    assert equal(weights(whole), weights(resumed))
    assert resumed.step == whole.step
    begun = (after - 1) // (steps or 4)
    assert rest.epoch == list(range(begun, 3))
    for name, values in rest.history.items():
        assert values == pytest.approx(history.history[name][begun:], abs=1e-12)


def test_a_schedule_after_a_warm_up_comes_to_its_turn_after_a_resume(tmp_path: Path) -> None:
    """torch asks the milestones of `MultiStepLR`, a Counter, for more than a dict has."""

    def make() -> sp.Trainer:
        return trainer(scheduler=warm_up)

    def warm_up(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        parts: list[Any] = [
            torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5),
            torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2, 2]),
        ]
        return torch.optim.lr_scheduler.SequentialLR(optimizer, parts, [5])

    whole = make()
    whole.fit(data(), epochs=1, batch_size=5, verbose=0)
    whole.save(tmp_path / "saved")
    whole.fit(data(), epochs=1, batch_size=5, verbose=0)
    resumed = make()
    resumed.load(tmp_path / "saved")
    resumed.fit(data(), epochs=2, batch_size=5, verbose=0)
    assert equal(weights(whole), weights(resumed))
    assert resumed.optimizer.param_groups[0]["lr"] == pytest.approx(1e-4)


def test_other_metrics_after_a_resume(tmp_path: Path) -> None:
    class Save(sp.Callback):
        def on_train_batch_end(self, batch: int, logs: Any) -> None:
            if batch == 1:
                self.trainer.save(tmp_path / "middle")

    made = trainer(metrics=["accuracy"])
    made.fit(data(), batch_size=5, callbacks=[Save()], verbose=0)
    more = trainer(metrics=["top_1_accuracy", "accuracy"])
    more.load(tmp_path / "middle")
    history = more.fit(data(), batch_size=5, verbose=0)
    assert set(history.history) == {"loss", "top_1_accuracy", "accuracy"}
    assert history.history["accuracy"] == made.history.history["accuracy"]


def test_checkpoints_of_a_fit(tmp_path: Path) -> None:
    chain = sp.data.arrays(*data()).shuffle().batch(6)
    whole = trainer()
    whole.fit(chain, epochs=4, verbose=0)
    first = trainer()
    saver = sp.callbacks.ModelCheckpoint(tmp_path)
    first.fit(chain, epochs=2, validation_data=data(), callbacks=[saver], verbose=0)
    second = trainer()
    second.load(tmp_path)
    assert (second.step, second.epoch) == (8, 2)
    assert second.fit(chain, epochs=4, callbacks=[saver], verbose=0).epoch == [2, 3]
    assert equal(weights(whole), weights(second))
    wrong = trainer(model=nn.Linear(3, 2).double())
    with pytest.raises(UserError, match="the checkpoint does not fit the model"):
        wrong.load(tmp_path)
