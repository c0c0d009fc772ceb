from __future__ import annotations

import math

import pytest

from spartito.report.figures import clock_time, figure, higher_is_better, label, metric_names


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("accuracy", 0.97315, "97.31%"),
        ("val_binary_accuracy", 1.0, "100.00%"),
        ("top_5_accuracy", 0.5, "50.00%"),
        ("data_wait_fraction", 0.0123, "1.2%"),
        ("loss", 0.123456, "0.1235"),
        ("loss", 0.0, "0.0000"),
        ("loss", 0.00001234, "1.234e-05"),
        ("mean_absolute_error", 1234567.0, "1.235e+06"),
        ("epoch", 3, "3"),
        ("step", 12000, "12,000"),
        ("examples_per_second", 78443.2, "78,443"),
        ("examples_per_second", 42.25, "42.2"),
        ("seconds", 75.0, "1:15"),
        ("loss", math.nan, "NaN"),
        ("loss", math.inf, "∞"),
        ("accuracy", -math.inf, "−∞"),
        ("loss", None, "–"),
    ],
)
def test_a_figure_as_a_person_reads_it(name: str, value: float | None, text: str) -> None:
    assert figure(name, value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (59.94, "59.9 s"), (59.99, "1:00"), (185, "3:05"), (3785, "1:03:05")],
)
def test_a_time_as_a_clock_shows_it(seconds: float, text: str) -> None:
    assert clock_time(seconds) == text


@pytest.mark.parametrize("name", ["accuracy", "val_acc", "val_top_5_accuracy", "auc", "f1"])
def test_more_is_better(name: str) -> None:
    assert higher_is_better(name)


@pytest.mark.parametrize(
    "name", ["loss", "val_loss", "mean_absolute_error", "accuracy_loss", "rate"]
)
def test_less_is_better(name: str) -> None:
    assert not higher_is_better(name)


def test_names_without_bookkeeping_loss_first() -> None:
    logs = ["epoch", "step", "accuracy", "loss", "val_loss", "val_mae", "seconds"]
    assert metric_names(logs) == ["loss", "accuracy", "mae"]


def test_a_label() -> None:
    assert label("val_binary_accuracy") == "validation binary accuracy"
