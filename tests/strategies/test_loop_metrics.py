"""Metrics of torchmetrics in a loop of one's own are those of all examples."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.replicas import Replicas
from tests.strategies import metric_jobs


@pytest.mark.parametrize(
    ("name", "world_size", "options"),
    [
        ("one_device", 1, {}),
        ("mirrored", 3, {}),
        ("mirrored", 3, {"communication": "ddp"}),
        ("sharded", 3, {}),
        ("mesh", 4, {"model": 2}),
    ],
)
def test_figures_are_those_of_all_examples(
    replicas: Replicas, name: str, world_size: int, options: dict[str, Any]
) -> None:
    expected, _ = metric_jobs.measured(None, {})
    results = replicas(metric_jobs.measured, world_size, name, options)
    own = [alone for _, alone in results]
    for found, _ in results:
        assert found["seen"] == metric_jobs.EXAMPLES
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=0, atol=1e-7)
    each = sum(own) / (options.get("model") or 1)  # tasks that share a model have the same
    assert each == metric_jobs.EXAMPLES  # when the strategy is closed, each counts its own
