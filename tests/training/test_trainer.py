"""One trainer on one device: its errors, its figures, and going on."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spartito as sp
from spartito.errors import UserError
from tests.replicas import Replicas
from tests.training.jobs import data, largest, net, on_replicas, stop_early, trainer, uneven_sizes


def weights(made: sp.Trainer) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in made.model.parameters()]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"metrics": ["acc"]}, "unknown metric 'acc'"),
        ({"loss": nn.MSELoss}, "loss=MSELoss is a class"),
        ({"model": nn.Linear}, "is no module"),
        ({"loss": nn.MSELoss(reduction="sum")}, r"MSELoss\(reduction='sum'\)"),
        ({"precision": "fp8"}, "precision 'fp8'"),
        ({"accumulate": 0}, "accumulate=0"),
        ({"clip_norm": 0.0}, "clip_norm=0.0"),
        ({"optimizer": torch.optim.SGD(net().parameters(), 0.1)}, "are not the model's"),
        ({"optimizer": lambda parameters: 3}, "the optimizer function returned int"),
        (
            {
                "scheduler": torch.optim.lr_scheduler.StepLR(
                    torch.optim.SGD(net().parameters(), 0.1), 3
                )
            },
            "the StepLR schedules another optimizer",
        ),
    ],
)
def test_trainers_that_cannot_be(options: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError, match=text):
        trainer(**options)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"epochs": -1}, r"fit\(epochs=-1"),
        ({"steps_per_epoch": 0}, "steps_per_epoch=0"),
        ({"data": sp.data.arrays(*data()).batch(4).repeat()}, "data that repeats without end"),
        (
            {"validation_data": sp.data.arrays(*data()).batch(4).repeat()},
            "validation data that repeats without end",
        ),
        ({"data": (torch.zeros(0, 3), torch.zeros(0))}, "the data set has no examples"),
        ({"data": "photos"}, "str is no data"),
        ({"callbacks": [sp.callbacks.TerminateOnNaN]}, "TerminateOnNaN is a class"),
        ({"callbacks": [print]}, "is no callback"),
    ],
)
def test_fits_that_cannot_be(options: dict[str, Any], text: str) -> None:
    made = trainer()
    before = weights(made)
    with pytest.raises(UserError, match=text):
        made.fit(options.pop("data", data()), verbose=0, **options)
    assert equal(weights(made), before)


def test_an_output_that_does_not_fit_the_loss() -> None:
    x, y = data()
    with pytest.raises(UserError, match="MSELoss does not fit an output of") as info:
        trainer(loss=nn.MSELoss()).fit((x, y.double()), batch_size=5, verbose=0)
    assert "(5, 2) float64" in str(info.value)
    assert "a target of (5,) float64" in str(info.value)


def test_without_an_optimizer_one_can_only_look() -> None:
    with pytest.raises(UserError, match="without an optimizer"):
        trainer(optimizer=None).fit(data(), verbose=0)
    figures = trainer(optimizer=None).evaluate(data())
    assert set(figures) == {"loss"}


def refused(strategy: sp.Strategy) -> list[str]:
    """What two replicas say of optimizers that they cannot share."""
    messages = []
    for name in ("used", "LBFGS"):
        model = net()
        optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters())
        if name == "LBFGS":
            optimizer = torch.optim.LBFGS(model.parameters())
        else:
            model(data()[0]).sum().backward()
            optimizer.step()
        try:
            trainer(strategy, model=model, optimizer=optimizer)
        except UserError as error:
            messages.append(str(error))
    try:
        trainer(strategy).fit(data(), batch_size=1, verbose=0)
    except UserError as error:
        messages.append(str(error))
    return messages


def test_what_two_replicas_refuse() -> None:
    for used, lbfgs, batch in on_replicas(refused, 2):
        assert "an Adam with state of 4 parameters for 2 replicas" in used
        assert "LBFGS calls a closure" in lbfgs
        assert "a global batch of 1 for 2 replicas" in batch


def test_figures_and_predictions_in_their_order() -> None:
    x, y = data(11)
    made = trainer(metrics=["accuracy"])
    made.model.train()
    output = made.model(x)
    shuffled = sp.data.arrays(x, y).shuffle().batch(4)
    for given in ((x, y), shuffled):
        predicted = made.predict(given, batch_size=4)
        torch.testing.assert_close(predicted, output.detach(), rtol=0, atol=1e-12)
    assert torch.equal(made.predict(x, batch_size=3, steps=2), made.predict(x[:6], batch_size=3))
    figures = made.evaluate(shuffled)
    assert list(figures) == ["loss", "accuracy"]
    assert figures["loss"] == pytest.approx(nn.functional.cross_entropy(output, y).item())
    assert figures["accuracy"] == pytest.approx((output.argmax(1) == y).double().mean().item())
    first = made.evaluate((x, y), batch_size=4, steps=2)
    assert first["loss"] == pytest.approx(nn.functional.cross_entropy(output[:8], y[:8]).item())
    assert made.model.training
    with pytest.raises(UserError, match="a prediction for no examples"):
        made.predict(x, steps=0)
    made.model.register_forward_hook(lambda _, given, output: output.t())
    with pytest.raises(UserError, match=r"an output of \(2, 4\) for 4 examples"):
        made.predict(x, batch_size=4)


def test_float64_arrays_for_a_float32_model() -> None:
    made = trainer(model=net().float())
    history = made.fit(data(), epochs=1, verbose=0)
    assert math.isfinite(history.history["loss"][0])
    assert made.predict(data()[0].numpy()).dtype == torch.float32


def test_a_model_that_changes_its_input_leaves_the_users_arrays_alone() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, x: Tensor) -> Tensor:
            x /= 10
            return self.net(x)  # type: ignore[no-any-return]

    x, y = data()
    before = x.clone()
    made = trainer(model=Scaled())
    made.fit((x, y), epochs=2, batch_size=5, validation_data=(x, y), verbose=0)
    made.predict(x)
    assert torch.equal(x, before)


def test_several_trainers_share_a_strategy() -> None:
    """k-fold, or a notebook whose cells run twice: each trainer keeps to its own model."""
    for shared, alone, seconds in on_replicas(folds, 2):
        assert shared == alone
        assert seconds == 1


def test_trainers_that_are_given_no_strategy_have_one_in_a_job(replicas: Replicas) -> None:
    assert replicas(without_a_strategy, 2) == [(True, True, [0, 1])] * 2


def without_a_strategy() -> tuple[bool, bool, list[int]]:
    """Whether two have one, whether a third has another after the end, and who trained."""
    first, second = (sp.Trainer(net(), optimizer=sgd, loss=nn.CrossEntropyLoss()) for _ in "ab")
    trained = []
    for number, each in enumerate((second, first)):
        each.fit(data(), batch_size=8, epochs=1, verbose=0)
        if each.step == 3:
            trained.append(number)
    is_one = first.strategy is second.strategy
    first.strategy.close()
    third = sp.Trainer(net(), optimizer=sgd, loss=nn.CrossEntropyLoss())
    third.fit(data(), batch_size=8, epochs=1, verbose=0)
    return is_one, third.strategy is not first.strategy, trained


def test_tasks_with_other_data_are_refused(replicas: Replicas) -> None:
    whole, other = replicas(with_data_of_its_own, 2)
    assert whole == other == ["", "worker 1 was given other data than worker 0"]


def with_data_of_its_own() -> list[str]:
    """What two tasks say of data that differ by rounding, and of data that differ."""
    x, y = data()
    said = []
    for change in (1e-9, 1.0):
        made = sp.Trainer(net(), optimizer=sgd, loss=nn.CrossEntropyLoss())
        try:
            mine = torch.where(x > 0, x + change * made.strategy.cluster.rank, x)
            made.fit(torch.utils.data.TensorDataset(mine, y), batch_size=8, verbose=0)
            said.append("")
        except UserError as error:
            said.append(str(error).partition(" (")[0].partition("\n")[0])
    return said


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1)


def test_sparse_gradients_of_one_device_are_torchs() -> None:
    def made() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Flatten(), nn.Linear(12, 2))

    x, y = torch.arange(24).view(8, 3) % 9, torch.arange(8) % 2
    ours, plain = made(), made()
    trainer(model=ours).fit((x, y), batch_size=8, epochs=1, verbose=0)
    nn.CrossEntropyLoss()(plain(x), y).backward()
    sgd(plain.parameters()).step()
    for mine, its in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(mine, its, rtol=0, atol=1e-7)


def folds(strategy: sp.Strategy) -> tuple[list[Any], list[Any], int]:
    """What two interleaved trainers come to, what each comes to alone, and pairs of one net."""
    x, y = data(24)

    def fold(number: int, on: sp.Strategy) -> sp.Trainer:
        torch.manual_seed(number)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 2))
        return trainer(on, model=model.double(), seed=number, deterministic=True)

    def look(made: sp.Trainer) -> list[Any]:
        return [made.history.history, made.evaluate((x, y)), made.predict(x).tolist()]

    def fit(made: sp.Trainer, **options: Any) -> None:
        made.fit((x, y), epochs=2, batch_size=8, verbose=0, **options)

    first, second = fold(1, strategy), fold(2, strategy)

    class Peek(sp.Callback):
        def on_epoch_end(self, epoch: int, logs: Any) -> None:
            second.evaluate((x, y))

    fit(first, callbacks=Peek())
    fit(second)
    shared = [*look(first), *look(second)]
    alone = []
    for number in (1, 2):
        made = fold(number, strategy)
        fit(made)
        alone += look(made)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        trainer(strategy, model=model, optimizer=optimizer)
    return shared, alone, sum(pair.optimizer is optimizer for pair in strategy._pairs.all)


def test_what_is_lazy_gets_its_size_on_one_device_only() -> None:
    x, y = data()
    made = trainer(model=nn.Sequential(nn.LazyLinear(2)).double())
    made.fit((x, y), batch_size=5, verbose=0)
    assert made.model[0].weight.shape == (2, 3)  # type: ignore[index]
    for text in on_replicas(lazy, 2):
        assert "2 lazy parameters, the first '0.weight', on several tasks" in text
        assert "net(x[:1])" in text


def lazy(strategy: sp.Strategy) -> str:
    with pytest.raises(UserError) as info:
        trainer(strategy, model=nn.Sequential(nn.LazyLinear(2)))
    return str(info.value)


def test_targets_that_are_all_left_out(caplog: pytest.LogCaptureFixture) -> None:
    x, y = data()
    nobody = torch.full_like(y, -100)
    made = trainer()
    with pytest.raises(UserError, match="an evaluation of 20 examples of which none counts"):
        made.evaluate((x, nobody))
    before = weights(made)
    made.fit((x, nobody), verbose=0)
    assert equal(weights(made), before)
    assert "none of the 20 examples of this epoch counts" in caplog.text
    with pytest.raises(UserError, match="an evaluation without examples"):
        made.evaluate(sp.data.per_worker(lambda context: [(x[:0], y[:0])]))


def test_a_loss_that_is_no_number_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    x, y = data()
    x[0] = torch.nan
    trainer().fit((x, y), epochs=2, verbose=0)
    assert caplog.text.count("the loss of this epoch is nan") == 1


def test_a_generator_is_read_once() -> None:
    x, y = data()
    made = trainer()
    with pytest.raises(UserError, match="the generator that was given as data is used up"):
        made.fit(((x[n : n + 5], y[n : n + 5]) for n in (0, 5)), epochs=2, verbose=0)
    assert made.step == 2


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


def test_early_stopping_on_two_replicas() -> None:
    deltas = [0.0, -0.5, 3.0, 3.0, 3.0, 3.0]
    results = on_replicas(stop_early, 2, deltas)
    assert results[0] == results[1]
    epochs, history, best = results[0]
    assert (epochs, history) == (best + 3, list(range(best + 3)))
    assert epochs < len(deltas)


def test_a_loss_that_is_no_number_ends_it() -> None:
    x, y = data()
    x[7] = float("nan")
    made = trainer()
    callbacks = [sp.callbacks.TerminateOnNaN()]
    history = made.fit((x, y), epochs=5, batch_size=5, callbacks=callbacks, verbose=0)
    assert made.step <= 3  # the second batch has it
    assert len(history.epoch) == 1
    assert made.stop_training


def test_unequal_batches_of_each_worker_are_weighted() -> None:
    """Rank 0 has twice the examples of rank 1; the update is that of all of them together."""
    x, y = data(12)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for rows in (slice(0, 6), slice(6, 9), slice(9, 12)):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
    for result in on_replicas(uneven_sizes, 2):
        for got, expected in zip(result, model.parameters(), strict=True):
            torch.testing.assert_close(got, expected.detach(), rtol=0, atol=1e-12)


def test_a_model_of_several_dtypes_gets_data_as_it_is() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
            self.net = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            assert x.dtype == torch.float32
            out: Tensor = self.net(x) * self.scale
            return out

    made = trainer(model=Scaled())
    made.fit((torch.randn(6, 3), torch.zeros(6, dtype=torch.long)), epochs=1, verbose=0)
