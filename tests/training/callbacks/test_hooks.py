"""Hooks come in order, under the right numbers, and only those that somebody overrides."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import spartito as sp
from spartito.errors import UserError
from spartito.training.callbacks.lambda_callback import HOOKS
from tests.training import jobs


class Diary(sp.Callback):
    """Writes down each hook with its number."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        for name in HOOKS:
            setattr(self, name, lambda *args, name=name: self.calls.append((name, *args[:1])))

    def names(self) -> list[str]:
        return [call[0].removeprefix("on_") for call in self.calls]


def test_fit_evaluate_and_predict_call_them_in_order() -> None:
    made, diary = jobs.trainer(metrics=["accuracy"]), Diary()
    made.fit(
        jobs.data(8), epochs=1, batch_size=4, validation_data=jobs.data(4), callbacks=diary,
        verbose=0,
    )  # fmt: skip
    step = ["train_batch_begin", "train_batch_end"]
    test = ["test_begin", "test_batch_begin", "test_batch_end", "test_end"]
    whole = ["train_begin", "epoch_begin", *step, *step, *test, "epoch_end", "train_end"]
    assert diary.names() == whole
    assert [call[1] for call in diary.calls if "train_batch" in call[0]] == [0, 0, 1, 1]
    diary.calls.clear()
    found = made.evaluate(jobs.data(8), batch_size=4, callbacks=[diary])
    assert diary.names() == [test[0], *test[1:3], *test[1:3], test[3]]
    assert diary.calls[-1] == ("on_test_end", found)
    diary.calls.clear()
    made.predict(jobs.data(8)[0], batch_size=4, callbacks=diary)
    batch = ["predict_batch_begin", "predict_batch_end"]
    assert diary.names() == ["predict_begin", *batch, *batch, "predict_end"]


def test_logs_of_evaluated_and_predicted_batches() -> None:
    made, seen, rows = jobs.trainer(metrics=["accuracy"]), [], []
    watch = sp.callbacks.LambdaCallback(
        on_test_batch_end=lambda batch, logs: seen.append(dict(logs)),
        on_predict_batch_end=lambda batch, logs: rows.append(logs["outputs"]),
    )
    found = made.evaluate(jobs.data(8), batch_size=3, callbacks=watch)
    assert seen[-1] == pytest.approx(found)
    assert len(seen) == 3
    assert torch.equal(made.predict(jobs.data(8), batch_size=3, callbacks=watch), torch.cat(rows))


def test_functions_may_take_logs_as_in_keras() -> None:
    seen: list[Any] = []
    made = jobs.trainer()
    callback = sp.callbacks.LambdaCallback(
        on_train_begin=lambda logs: seen.append(("begin", logs)),
        on_epoch_begin=lambda epoch, logs: seen.append((epoch, logs)),
        on_epoch_end=lambda epoch, logs: seen.append((epoch, logs["loss"])),
        on_train_end=lambda: seen.append("end"),
    )
    loss = made.fit(jobs.data(), epochs=1, callbacks=callback, verbose=0).history["loss"][0]
    assert seen == [("begin", {}), (0, {}), (0, loss), "end"]


@pytest.mark.parametrize(
    ("function", "text"),
    [
        ({"on_epoch_ends": print}, "Did you mean 'on_epoch_end'"),
        ({"on_epoch_end": lambda: None}, "Callback.on_epoch_end has the arguments: epoch, logs"),
        ({"on_train_begin": lambda a, b: None}, "has the arguments: none"),
    ],
)
def test_functions_that_do_not_fit(function: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError, match=text):
        sp.callbacks.LambdaCallback(**function)


def test_rates_by_epoch() -> None:
    rates: list[float] = []
    made = jobs.trainer()
    note = sp.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch: rates.append(made.optimizer.param_groups[0]["lr"])
    )
    for schedule in (lambda epoch, rate: rate / 2, lambda epoch: 1.0 / (1 + epoch)):
        scheduler = sp.callbacks.LearningRateScheduler(schedule)
        made.fit(jobs.data(), epochs=2, callbacks=[scheduler, note], verbose=0)
    assert rates == [0.05, 0.025, 1.0, 0.5]
    wrong = sp.callbacks.LearningRateScheduler(lambda epoch: float("nan"))
    with pytest.raises(UserError, match="the schedule returned nan for epoch 0"):
        made.fit(jobs.data(), epochs=1, callbacks=wrong, verbose=0)
