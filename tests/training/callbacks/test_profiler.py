"""A trace of some steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import spartito as sp
from spartito.errors import UserError


def fit(profiler: sp.Callback) -> None:
    net = nn.Linear(4, 2)
    trainer = sp.Trainer(net, optimizer=torch.optim.SGD(net.parameters(), 0.1), loss=nn.MSELoss())
    trainer.fit(
        (torch.randn(12, 4), torch.randn(12, 2)), batch_size=2, callbacks=profiler, verbose=0
    )


def test_steps_are_in_the_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        fit(sp.callbacks.Profiler(tmp_path / "new", first=2, steps=3))
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [
        "worker-0.trace.json", "worker-0.trace.json.1",
    ]  # fmt: skip
    trace = json.loads((tmp_path / "new" / "worker-0.trace.json").read_text())
    names = [event.get("name") for event in trace["traceEvents"]]
    assert names.count("aten::mse_loss") == 3
    assert "Self CPU" in capsys.readouterr().out


def test_a_training_that_is_too_short(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(sp.callbacks.Profiler(tmp_path / "new", first=50))
    assert not (tmp_path / "new").exists()
    assert "recorded nothing" in caplog.text
    with pytest.raises(UserError, match="record 1 or more"):
        sp.callbacks.Profiler(tmp_path, steps=0)
