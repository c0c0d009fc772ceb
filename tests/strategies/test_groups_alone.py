"""Groups over servers that are merged one by one have the numbers of plain torch in that order."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from spartito.ps.protocol.rules import Rules
from spartito.steps.servers.groups import tell_of_statistics
from tests.replicas import Replicas
from tests.strategies import alone_jobs as jobs
from tests.strategies.decoupled_jobs import normalized
from tests.strategies.test_contracts import close


@pytest.mark.parametrize(
    ("workers", "batch", "inner", "options"),
    [
        (2, 8, "sgd", {"every": 4}),
        pytest.param(2, 8, "sgd", {"every": 5, "outer": "diloco"}, marks=pytest.mark.slow),
        pytest.param(2, 8, "adamw", {"every": 4}, marks=pytest.mark.slow),
        pytest.param(3, 6, "adamw", {"every": 3, "weights": "equal"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_each_counts_for_one_of_all(
    replicas: Replicas,
    tmp_path: Path,
    workers: int,
    batch: int,
    inner: str,
    options: dict[str, Any],
) -> None:
    """BatchNorm's statistics too; a stretch at the end of an epoch is shorter than the others."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    given = {"groups": workers, "servers": {"min_shard_bytes": 16}, **options}
    found = replicas(
        jobs.recorded, workers, "parameter_server", given, servers=1,
        batch=batch, inner=inner, pipe=str(pipe),
    )  # fmt: skip
    groups = [stretches for _, stretches, _ in sorted(found, key=lambda one: one[0])]
    every = [stretch for stretches in groups for stretch in stretches]
    assert sorted(after for _, after, *_ in every) == [*range(1, len(every) + 1)]
    assert any(after - began > 1 for began, after, *_ in every), "all were merged at once"
    expected = jobs.replayed(groups, batch, options.get("outer", "average"), inner)
    for _, _, weights in found:
        close(weights, expected)


@pytest.mark.parametrize(
    ("rules", "norm", "warns"),
    [
        (Rules(2, every=4), True, True),
        (Rules(2, every=4), False, False),
        (Rules(2, every=4, quorum=2), True, False),
        (Rules(2, every=4, grace=1.0), True, False),
        (Rules(1, every=4), True, False),
        (Rules(2), True, False),
    ],
    ids=str,
)
def test_it_is_said_that_statistics_do_not_fit_what_nobody_computes_with(
    caplog: pytest.LogCaptureFixture, rules: Rules, norm: bool, warns: bool
) -> None:
    tell_of_statistics(rules, normalized(norm))
    assert ("quorum=2, or a grace" in caplog.text) is warns
