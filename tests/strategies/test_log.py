"""Figures that a model, a loss or a callback reports are means over all examples, everywhere."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-untyped]
    EventAccumulator,
)
from torch import nn

import spartito as sp
from spartito import log
from spartito.data.batch import Batch
from spartito.errors import UserError
from spartito.training.evaluation.eval_prediction import EvalPrediction, Predictions
from spartito.training.metrics.carried import CarriedMetrics
from spartito.training.metrics.gathering import MetricSet
from spartito.training.metrics.logged import Logged
from tests.replicas import ReplicaError, Replicas
from tests.strategies import log_jobs
from tests.strategies.jobs import blobs, mlp
from tests.strategies.test_contracts import Case, each_of, run

CASES: list[Case] = [
    ("one_device", 1, {}),
    ("mirrored", 3, {}),
    ("mesh", 4, {"mesh": {"data": 2, "model": 2}}),
    ("sharded", 2, {"zero": 3, "block_bytes": 100}),
    ("local_sgd", 3, {"groups": [[0, 2], [1]], "every": 3}),
    ("parameter_server", 2, {"max_staleness": 0, "servers": {"min_shard_bytes": 16}}),
]
EXACT = 1e-9  # the rate is not quite 0, as one that were would be refused


def expected(rows: int) -> dict[str, float]:
    x, y = blobs(50)
    x, y = x[:rows], y[:rows]
    layers: Any = mlp()
    return {
        "rows": x.mean().item(),
        "mean": x.mean().item(),
        "hidden": layers[0](x).square().mean().item(),
        "label": y.double().mean().item(),
        "counted": y.double().sum().item(),  # of each batch, by its rows
    }


@each_of(CASES)
def test_they_are_means_over_all_examples(replicas: Replicas, case: Case) -> None:
    found = run(replicas, case, log_jobs.report)
    history, figures = found["history"], found["figures"]
    for key, value in expected(50).items():
        if key != "counted":
            assert history[key] == pytest.approx([value] * 2, abs=EXACT), key
            assert history[f"val_{key}"] == pytest.approx([expected(13)[key]] * 2, abs=EXACT)
            assert figures[key] == pytest.approx(expected(4)[key], abs=EXACT)
    assert figures["counted"] * 4 <= expected(4)["counted"] * 4 + EXACT
    if case[0] != "parameter_server":  # whose workers call no callbacks
        assert len(history["batch"]) == 2
        assert 0 <= history["batch"][0] <= 7


LATE = [(sum(range(first, first + 7)) * 7 + first + 7) / 50 for first in (0, 9)]
"""The mean of the numbers of eight batches, of which the last has one row, from 0 and from 9."""


@pytest.mark.parametrize("name", ["one_device", "mirrored"])
def test_an_epoch_without_a_figure_has_nan(name: str, replicas: Replicas, tmp_path: Path) -> None:
    count = 1 + (name == "mirrored")
    with pytest.raises(ReplicaError, match="ends here"):
        replicas(log_jobs.late, count, name, tmp_path, True)
    for epochs, history in replicas(log_jobs.late, count, name, tmp_path, False):
        assert epochs == [0, 1, 2, 3]
        assert {len(values) for values in history.values()} == {4}
        nan = float("nan")
        assert history["late"] == pytest.approx([nan, LATE[0], nan, LATE[0]], nan_ok=True)
    with (tmp_path / "epochs.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["late"] != "" for row in rows] == [False, True, False, True]
    assert float(rows[3]["late"]) == pytest.approx(LATE[0])
    text = (tmp_path / "run" / "history.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert ["late" in line for line in lines] == [False, True, False, True]
    assert "late" in (tmp_path / "run" / "report.html").read_text()
    events = EventAccumulator(str(tmp_path / "logs" / "train"))
    events.Reload()
    assert {event.step for event in events.Scalars("epoch_late")} == {2, 4}


def test_a_worker_of_a_server_has_nan_too(replicas: Replicas) -> None:
    options = {"max_staleness": 0}
    ((epochs, history),) = replicas(log_jobs.late_on_a_server, 1, options, servers=1)
    assert epochs == [0, 1, 2]
    assert history["late"] == pytest.approx([math.nan, LATE[1], math.nan], nan_ok=True)


def test_a_chief_that_is_told_in_the_middle_of_a_batch_counts_it_once(replicas: Replicas) -> None:
    found = run(replicas, CASES[-1], log_jobs.report_while_others_lag)
    for key, value in expected(50).items():
        if key != "counted":
            assert found["history"][key] == pytest.approx([value] * 2, abs=EXACT), key


def test_what_is_shown_of_a_batch_that_is_computed_waits_for_its_rows() -> None:
    metrics = MetricSet([])
    metrics.logged.take("a", 3.0, None)
    assert metrics.show() == b""
    metrics.logged.settle(4)
    metrics.logged.take("a", 9.0, None)
    (logged,) = metrics.merged([metrics.show()], {})
    assert logged.compute() == {"a": 3.0}
    metrics.logged.settle(2)
    (logged,) = metrics.merged([metrics.take()], {})
    assert logged.compute() == {"a": 5.0}


def test_a_batch_that_is_computed_again_reports_once(replicas: Replicas) -> None:
    ((*heard,),) = replicas(log_jobs.compute_again, 1, servers=1)
    assert sorted(heard) == ["counted", "hidden", "label", "mean", "rows"]


def test_a_trial_of_what_a_model_draws_reports_nothing(replicas: Replicas) -> None:
    for found in replicas(log_jobs.deterministic, 2, "mirrored"):
        assert found == pytest.approx([expected(50)["rows"]], abs=EXACT)


@each_of([*CASES, ("pipeline", 2, {"microbatches": 3})])
def test_all_predictions_come_in_their_order(replicas: Replicas, case: Case) -> None:
    found = run(replicas, case, log_jobs.of_all_predictions)
    assert found == pytest.approx([0.0] * 5, abs=EXACT)


def test_predictions_of_several_lengths_are_filled_up() -> None:
    seen: list[EvalPrediction] = []

    def compute(found: EvalPrediction) -> dict[str, float]:
        seen.append(found)
        return {"loss": 1.0}

    predictions = Predictions(compute)
    for step, width in ((1, 2), (0, 3)):
        tokens = torch.full((1, width), step)
        output = {"logits": torch.full((1, width, 4), float(step)), "loss": torch.tensor(0.0)}
        predictions.add(output, Batch({"labels": tokens}, 1, 1, torch.tensor([0]), 0, step))
    with pytest.raises(UserError, match="another name"):
        predictions.figures([predictions.state()], ["loss"])
    (found,) = seen
    assert found.label_ids.tolist() == [[0, 0, 0], [1, 1, -100]]
    assert found.predictions.shape == (2, 3, 4)
    assert found.predictions[1, 2].tolist() == [-100] * 4


def test_a_pipeline_counts_what_its_last_stage_reports(replicas: Replicas) -> None:
    case = ("pipeline", 2, {"microbatches": 3})
    found = run(replicas, case, log_jobs.report, in_model=False)
    assert found["history"]["label"] == pytest.approx([expected(50)["label"]] * 2, abs=EXACT)
    assert found["figures"]["label"] == pytest.approx(expected(4)["label"], abs=EXACT)
    outcomes = replicas.outcomes(log_jobs.report, 2, "pipeline", case[2])
    assert any("not the last" in str(each) for each in outcomes)


@each_of([("one_device", 1, {}), ("mirrored", 2, {}), ("pipeline", 2, {"microbatches": 3})])
def test_one_number_counts_as_the_rows_that_it_is_of(replicas: Replicas, case: Case) -> None:
    """Those of a microbatch under a pipeline, whose last stage reports what it sees."""
    found = run(replicas, case, log_jobs.report, late=True)
    x, _ = blobs(50)
    late = mlp()(x).square().mean().item()
    for key, value in {**expected(50), "late": late}.items():
        if key in ("mean", "label", "late"):
            assert found["history"][key] == pytest.approx([value] * 2, abs=EXACT)


def test_what_cannot_be_reported_is_refused() -> None:
    logged = Logged({"accuracy"})
    one = torch.ones(())
    wrong: list[tuple[Any, Any, Any]] = [
        ("loss", 1.0, None), ("accuracy", 1.0, None), ("seconds", 1.0, None), ("", 1.0, None),
        ("val_a", 1.0, None), ("a", "1", None), ("a", one * 1j, None), ("a", 1.0, -1),
        ("a", 1.0, "3"), ("a", 1.0, torch.ones(2)),
    ]  # fmt: skip
    for name, value, count in wrong:
        with pytest.raises(UserError, match=r"sp\.log"):
            logged.take(name, value, count)


def test_a_mean_over_nothing_counts_for_nothing() -> None:
    logged = Logged()
    logged.take("rows", torch.ones(0), None)
    logged.take("items", math.nan, 0)
    logged.take("tokens", torch.tensor(math.nan), torch.zeros(()))
    for name in ("rows", "items", "tokens"):
        logged.take(name, np.float32(2.0), 3)
    logged.settle(1)
    assert logged.compute() == {"rows": 2.0, "items": 2.0, "tokens": 2.0}


class Scale(nn.Module):
    """Reports a parameter, which the update changes in place, and how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.calls = nn.Parameter(torch.ones(())), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        log("scale", self.scale)
        log("calls", self.calls)
        return x * self.scale


class Marks(sp.Callback):
    def on_epoch_begin(self, epoch: int) -> None:
        log("begun", epoch)

    def on_train_batch_end(self, batch: int, logs: Any) -> None:
        log("batch", batch)

    def on_test_batch_end(self, batch: int, logs: Any) -> None:
        log("tested", batch)


def test_what_is_reported_is_of_its_own_batch() -> None:
    net = Scale()
    trainer = sp.Trainer(
        nn.Sequential(net), optimizer=lambda p: torch.optim.SGD(p, 0.1), loss=nn.MSELoss(),
        checkpoint_activations=Scale, strategy="one_device",
    )  # fmt: skip
    x = torch.arange(1.0, 11.0)[:, None]
    data = sp.data.arrays(x, 2 * x).batch(4)
    found = trainer.fit(data, epochs=1, validation_data=data, callbacks=Marks(), verbose=0).history
    scale = torch.ones((), requires_grad=True)  # by plain torch
    total = 0.0
    for rows in x.split(4):
        total += scale.item() * len(rows)
        (slope,) = torch.autograd.grad(nn.functional.mse_loss(rows * scale, 2 * rows), scale)
        scale = (scale.detach() - 0.1 * slope).requires_grad_()
    assert found["scale"] == [pytest.approx(total / 10)]
    assert found["batch"] == found["val_tested"] == [pytest.approx((0 * 4 + 1 * 4 + 2 * 2) / 10)]
    assert found["begun"] == [0]
    assert found["calls"] == [pytest.approx((1 * 4 + 3 * 4 + 5 * 2) / 10)]  # not those again


def test_what_callbacks_report_outlives_a_step_that_is_repeated() -> None:
    metrics = CarriedMetrics([])
    metrics.logged.take("a", 3.0, None)
    metrics.logged.settle(2)
    metrics.keep_reports()
    metrics.logged.take("a", 7.0, None)
    metrics.forget_step()
    (logged,) = metrics.merged([metrics.rest()], {})
    assert logged.compute() == {"a": 3.0}


def test_a_step_without_rows_reports_nothing() -> None:
    logged = Logged()
    logged.take("a", 5.0, None)
    logged.forget()
    logged.take("a", torch.tensor([1.0, 2.0]), None)
    logged.take("a", 6, 2)
    logged.settle(3)
    found: dict[str, Any] = logged.compute()
    assert found == {"a": 15 / 4}
