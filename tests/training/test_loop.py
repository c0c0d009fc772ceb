from __future__ import annotations

import mmap
import time
from math import isnan

import pytest
import torch

from spartito import heartbeat
from spartito.data.batch import Batch
from spartito.heartbeat import SIZE, Beat
from spartito.training.loops.clock import Clock, StepLogs
from spartito.training.metrics.gathering import MetricSet
from spartito.training.metrics.names import make_metrics
from tests.training.jobs import data, trainer


@pytest.mark.parametrize(("goes_on", "rate"), [(True, 100 / 15), (False, 100 / 5)])
def test_an_evaluation_counts_where_others_train_meanwhile(
    monkeypatch: pytest.MonkeyPatch, goes_on: bool, rate: float
) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    clock = Clock(overlaps=goes_on)
    clock.start()
    now += 20
    clock.stop()
    now += 10  # the evaluation
    clock.start()
    now += 5
    clock.examples += 100
    assert clock.rate == pytest.approx(rate)
    assert clock.seconds == 5


def test_what_was_not_seen_is_not_among_the_figures() -> None:
    metrics = MetricSet(make_metrics(["accuracy"], None))
    logs = StepLogs(metrics)
    assert dict(logs) == {}
    assert len(logs) == 0
    assert isnan(logs["loss"])
    logs.last = torch.tensor(1.0), 2.0
    assert dict(logs) == {"loss": 0.5}
    target = torch.tensor([0, 1, 2, 0])
    metrics.update(torch.eye(4), Batch((torch.eye(4), target), 4, 4, torch.arange(4), 0, 0))
    assert dict(logs) == {"loss": 0.5, "accuracy": 0.75}


def test_the_end_of_an_epoch_is_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chief that computes nothing, or an evaluation, would make a straggler of the task."""
    memory = mmap.mmap(-1, SIZE)
    monkeypatch.setattr(heartbeat, "_heart", heartbeat._Heart(memory, -1))
    trainer().fit(data(), epochs=3, batch_size=5, validation_data=data(), verbose=0)
    assert Beat.read_from(memory).steps == 3 * 4
