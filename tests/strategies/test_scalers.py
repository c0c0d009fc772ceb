"""A gradient scaler of the user's own, whose decision is one of all tasks."""

from __future__ import annotations

from typing import Any

import pytest

from tests.replicas import Replicas
from tests.strategies import scaler_jobs


@pytest.mark.parametrize(("unscales", "fused"), [(False, False), (True, True), (False, True)])
@pytest.mark.parametrize(
    ("name", "world_size", "options"),
    [
        ("one_device", 1, {}),
        ("mirrored", 3, {}),
        ("mirrored", 3, {"communication": "ddp"}),
        ("sharded", 3, {"zero": 3, "block_bytes": 100}),
        ("mesh", 2, {"model": 2}),
        ("central_storage", 3, {}),
    ],
)
def test_an_infinity_on_one_task_leaves_out_the_update_of_all(
    replicas: Replicas,
    name: str,
    world_size: int,
    options: dict[str, Any],
    unscales: bool,
    fused: bool,
) -> None:
    """The norm is clipped without the scale, and a task without rows has found nothing."""
    expected = scaler_jobs.plain(fused)
    for found in replicas(scaler_jobs.scaled, world_size, name, options, unscales, fused):
        assert isinstance(found, dict), found
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert (found[key] - value).abs().max() <= 1e-12, key


def test_groups_that_train_apart_would_leave_out_other_updates(replicas: Replicas) -> None:
    options = {"every": 2}
    for found in replicas(scaler_jobs.scaled, 2, "local_sgd", options, False, False):
        assert "a GradScaler under local_sgd" in found


@pytest.mark.parametrize("closes", [True, False])
def test_a_scaler_after_the_strategy_is_torchs_own(replicas: Replicas, closes: bool) -> None:
    expected = scaler_jobs.plain(fused=False)
    for found in replicas(scaler_jobs.scaled_later, 2, closes):
        assert all((found[key] - value).abs().max() <= 1e-12 for key, value in expected.items())
