from __future__ import annotations

import time
from math import isnan

import pytest
import torch

from spartito.data.batch import Batch
from spartito.training.clock import Clock, StepLogs
from spartito.training.metrics.gathering import MetricSet
from spartito.training.metrics.names import make_metrics


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
