from __future__ import annotations

import logging
import math
from typing import Any

import pytest

from spartito.training.callbacks import TerminateOnNaN

EPOCHS = [{"loss": 1.0}, {"loss": 1.0}]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_it_stops_at_the_step(trainer: Any, caplog: pytest.LogCaptureFixture, value: float) -> None:
    assert trainer.fit(TerminateOnNaN(), epochs=EPOCHS, losses=[1.0, value, 1.0, 1.0]) == 1
    assert trainer.step == 2
    assert [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING] == [
        f"the loss is {value} at step 1: training stops"
    ]


def test_numbers_go_on(trainer: Any) -> None:
    assert trainer.fit(TerminateOnNaN(), epochs=EPOCHS, losses=[1.0, 1e30, 0.0, -1.0]) == 2


def test_a_batch_that_is_only_accumulated_has_no_loss_yet(trainer: Any) -> None:
    callback = TerminateOnNaN()
    callback.set_trainer(trainer)
    callback.on_train_begin()
    callback.on_train_batch_end(0, {"loss": math.nan})
    assert not trainer.stop_training
    trainer.step = 1
    callback.on_train_batch_end(1, {"loss": math.nan})
    assert trainer.stop_training
