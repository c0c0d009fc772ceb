"""max_staleness=0: an epoch that was saved in its middle has all its figures in the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.replicas import Replicas
from tests.strategies import halfway_jobs as jobs
from tests.strategies.test_contracts import close, run

slow = pytest.mark.slow
SMALL = {"max_staleness": 0, "servers": {"min_shard_bytes": 16}}


@pytest.mark.parametrize(
    ("workers", "at", "more"),
    [
        (2, 3, {}),
        pytest.param(2, 1, {}, marks=slow),
        pytest.param(
            3, 5, {"servers": {"min_shard_bytes": 16, "shared_memory": False}}, marks=slow
        ),
        pytest.param(2, 9, {}, marks=slow),  # in the second epoch
        pytest.param(2, 6, {}, marks=slow),  # after its last batch, before it ends
    ],
    ids=str,
)
def test_an_epoch_that_is_gone_on_with_has_all_its_figures(
    replicas: Replicas, tmp_path: Path, workers: int, at: int, more: dict[str, Any]
) -> None:
    case = ("parameter_server", workers, {**SMALL, **more})
    path = str(tmp_path / "saved")
    expected = jobs.by_torch(1)
    whole = run(replicas, case, jobs.figures, path=path, at=at)
    close(whole, expected)
    resumed = run(replicas, case, jobs.figures, path=path, at=0)
    close(resumed, {name: curve[-len(resumed["loss"]) :] for name, curve in expected.items()})
    # What was saved is what plain torch has found by then, on any number of replicas.
    alone = run(replicas, ("one_device", 1, {}), jobs.figures, path=path, at=0)
    close(alone, resumed)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", ["mirrored", "central_storage"])
def test_gradients_that_wait_are_taken_up_once(
    replicas: Replicas, tmp_path: Path, name: str, weighted: bool
) -> None:
    """By one of the replicas that go on, however many these are."""
    given = {"path": str(tmp_path / "saved"), "accumulate": 2, "weighted": weighted}
    whole = run(replicas, (name, 2, {}), jobs.figures, at=3, **given)
    if not weighted:
        close(whole, jobs.by_torch(2))
    for count in (1, 2, 3):
        close(run(replicas, (name, count, {}), jobs.figures, at=0, **given), whole)


@slow
@pytest.mark.parametrize("at", [2, 3])
def test_also_between_the_batches_of_an_update(replicas: Replicas, tmp_path: Path, at: int) -> None:
    """Those that no update has yet are done again, and count once."""
    case = ("parameter_server", 2, SMALL)
    given = {"path": str(tmp_path / "saved"), "accumulate": 2}
    expected = jobs.by_torch(2)
    close(run(replicas, case, jobs.figures, at=at, **given), expected)
    close(run(replicas, case, jobs.figures, at=0, **given), expected)


@slow
def test_who_is_told_to_end_saves_what_all_have_done(replicas: Replicas, tmp_path: Path) -> None:
    case = ("parameter_server", 2, SMALL)
    given = {"path": str(tmp_path / "saved")}
    assert run(replicas, case, jobs.interrupted, at=2, **given) == {}
    close(run(replicas, case, jobs.interrupted, at=0, **given), jobs.by_torch(1))
