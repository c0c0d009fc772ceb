from __future__ import annotations

import json
import logging
import math
from functools import partial
from typing import Any

import pytest
import torch

from spartito.errors import UserError
from spartito.training.callbacks import EarlyStopping
from spartito.training.callbacks.early_stopping import forget_kept


def losses(*values: float) -> list[dict[str, float]]:
    return [{"loss": 1.0, "val_loss": value} for value in values]


@pytest.mark.parametrize(
    ("options", "values", "epochs"),
    [
        ({}, (3, 2, 2, 1), 3),
        ({"patience": 2}, (3, 2, 2, 2, 1), 4),
        ({"patience": 2}, (3, 4, 2, 4, 1), 5),
        ({"patience": 1, "min_delta": 0.5}, (3, 2.6, 1), 2),
        ({"patience": 1, "min_delta": -0.5}, (3, 2.6, 1), 2),
        ({"patience": 1, "start_from_epoch": 2}, (1, 2, 3, 2, 3, 2), 5),
        ({"mode": "max"}, (1, 2, 3, 3, 4), 4),
        ({"patience": 2}, (math.nan, math.nan, 1), 2),
        ({"patience": 1}, (1, math.nan, 0), 2),
        ({}, (3, 2, 1), 3),
    ],
)
def test_it_stops_as_keras_does(
    trainer: Any, options: dict[str, Any], values: tuple[float, ...], epochs: int
) -> None:
    assert trainer.fit(EarlyStopping(**options), epochs=losses(*values)) == epochs


def test_an_accuracy_goes_up(trainer: Any) -> None:
    epochs = [{"accuracy": value} for value in (0.1, 0.2, 0.3, 0.2)]
    callback = EarlyStopping(monitor="accuracy")
    assert trainer.fit(callback, epochs=epochs) == 4
    assert callback.best == 0.3


def test_it_says_where_it_stopped(trainer: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="spartito"):
        trainer.fit(EarlyStopping(patience=2), epochs=losses(3, 1, 2, 2))
    assert "stopped after epoch 4: val_loss has not improved since epoch 2" in caplog.text


@pytest.mark.parametrize("values", [(3, 1, 2, 2), (3, 1, 2)])
def test_the_best_weights_come_back(trainer: Any, values: tuple[float, ...]) -> None:
    trainer.fit(EarlyStopping(patience=2, restore_best_weights=True), epochs=losses(*values))
    assert torch.equal(trainer.model.weight, torch.full((1, 2), 1.0))


def test_the_last_weights_stay_when_none_are_to_come_back(trainer: Any) -> None:
    trainer.fit(EarlyStopping(patience=2), epochs=losses(3, 1, 2, 2))
    assert torch.equal(trainer.model.weight, torch.full((1, 2), 3.0))


def test_a_resume_goes_on_counting_and_a_new_fit_does_not(trainer: Any) -> None:
    first = EarlyStopping(patience=2)
    trainer.fit(first, epochs=losses(1, 2))
    second = EarlyStopping(patience=2)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert (
        trainer.fit(second, epochs=[{"val_loss": 2.0}, {"val_loss": 2.0}, {"val_loss": 2.0}]) == 2
    )
    assert trainer.fit(second, epochs=losses(3, 2, 1)) == 3


def test_a_monitor_that_nobody_reports_is_named(trainer: Any) -> None:
    with pytest.raises(UserError, match=r"'val_loss'.*\n.*Known: accuracy, loss\..*no validation"):
        trainer.fit(EarlyStopping(), epochs=[{"loss": 1.0, "accuracy": 0.5}])


@pytest.mark.parametrize("options", [{"patience": -1}, {"start_from_epoch": -1}, {"mode": "up"}])
def test_options_that_make_no_sense(options: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        EarlyStopping(**options)


def test_weights_that_nobody_else_can_have_are_forgotten() -> None:
    """A task that was replaced would keep its last ones: parts of two models."""
    early, other = EarlyStopping(restore_best_weights=True), EarlyStopping()
    early.kept = lambda: None  # of a mesh: its own part
    other.kept = partial(print, {}, end="")  # of a strategy: its load, and what to load
    for each in (early, other):
        forget_kept(each)
    assert [each.kept is None for each in (early, other)] == [True, False]
