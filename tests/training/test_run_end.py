from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import spartito as sp
from spartito.training.callback import Callback, Logs


class StopsAfter(Callback):
    """Ends the training after an epoch."""

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        if epoch + 1 == self._epoch:
            self.trainer.stop_training = True


class Leaves(Callback):
    """Leaves the script in the middle."""

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        if epoch == 1:
            raise SystemExit(0)


def end_of(folder: Path, callbacks: list[Callback], scale: float = 1.0, **given: Any) -> Any:
    """What the settings of a training over four epochs say of its end."""
    model = nn.Linear(2, 1)
    trainer = sp.Trainer(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        loss=nn.MSELoss(),
        strategy=sp.strategy("one_device"),
        run_dir=folder,
        **given,
    )
    data = torch.randn(8, 2), torch.full((8, 1), scale)
    trainer.fit(data, batch_size=4, epochs=4, callbacks=callbacks, verbose=False)
    return json.loads((folder / "config.json").read_text())["fit"].get("end")


def test_the_settings_say_how_a_training_ended(tmp_path: Path) -> None:
    assert end_of(tmp_path / "whole", []) == "complete"
    assert end_of(tmp_path / "last", [StopsAfter(4)]) == "complete"
    assert end_of(tmp_path / "early", [StopsAfter(2)]) == "stopped"
    bad = end_of(tmp_path / "nan", [], scale=math.nan, on_nonfinite="stop")
    assert bad == "not finite"


def test_a_script_that_left_in_the_middle_has_no_end(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        end_of(tmp_path / "left", [Leaves()])
    fit = json.loads((tmp_path / "left" / "config.json").read_text())["fit"]
    assert fit["epochs"] == 4
    assert "end" not in fit
