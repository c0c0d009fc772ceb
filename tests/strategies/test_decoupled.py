"""Groups over parameter servers: their numbers are those of plain torch, and nobody waits."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import spartito as sp
from spartito.cluster.recovery import Recovery
from tests.commands import cluster_of, tf_config
from tests.replicas import Replicas
from tests.strategies import local_jobs as jobs
from tests.strategies.ps_jobs import Asked, Job, job
from tests.strategies.test_contracts import close, run

SMALL = {"min_shard_bytes": 16}


@pytest.mark.parametrize(
    ("workers", "options", "inner"),
    [
        (2, {"every": 3}, "adamw"),
        (2, {"every": 4, "outer": "diloco", "shared_memory": False}, "sgd"),
        (3, {"every": 2, "outer": "diloco"}, "adamw"),
        (3, {"every": 50, "outer": "adam", "weights": "equal"}, "sgd"),
    ],
    ids=str,
)
@pytest.mark.parametrize("batch", [8, 3])
def test_a_quorum_of_all_has_the_numbers_of_plain_torch(
    replicas: Replicas, workers: int, options: dict[str, Any], inner: str, batch: int
) -> None:
    """Also with three examples in a batch, on two servers, and with two epochs and more."""
    given = {"groups": workers, "quorum": workers, **SMALL, **options}
    case = ("parameter_server", workers, given)
    result = run(replicas, case, jobs.trained, inner=inner, batch=batch)
    expected = jobs.by_torch(
        [[index] for index in range(workers)],
        options["every"],
        options.get("outer", "average"),
        inner,
        options.get("weights") == "equal",
        batch=batch,
    )
    close(result["weights"], expected["weights"])
    close(result["here"], expected["weights"])
    for name in ("loss", "val_loss", *(f"loss_of_group_{index}" for index in range(workers))):
        close(result["history"][name], expected[name])


def applied_once(found: Job) -> None:
    """Every example of all epochs was applied once, and all workers have the same in the end."""
    asked, record = found.asked, found.record("ps 0")
    workers = len(found.cluster["worker"])
    assert record["work_items"] == asked.plan * workers
    assert record["examples"] == asked.epochs * asked.examples


def test_a_group_that_is_killed_holds_up_nobody_and_joins_again(tmp_path: Path) -> None:
    """It dies in the middle of a stretch; others do its work, and its replacement trains on."""
    apart = {"groups": 3, "every": 4}
    holds = {"worker 1": 6, "worker 0": 30, "worker 2": 30}
    asked = Asked(options=apart, holds=holds, epochs=6, examples=288, validation=True)
    with job(tmp_path, asked, worker=3, ps=1) as found:
        found.held(*holds)  # the others have gone on for 30 batches while it stands still
        found.kill("worker 1")
        found.start("worker 1", asked=replace(found.asked, holds={"worker 1": 6}))
        found.held("worker 1")
        found.go(*holds)
        found.finish()
        assert found.said("worker 0", "worker 1 is gone: its work goes to others")
        applied_once(found)
        (history,) = found.result("worker 0")["histories"]
        assert history["val_loss"] == found.result("worker 2")["histories"][0]["val_loss"]
        assert sum(history["merges_of_group_1"]) > 0
        assert sum(history["merged_alone"]) > 0
        assert history["rejected"] == [0.0] * asked.epochs
        assert history["val_loss"][-1] < 0.75 * history["val_loss"][0]


def test_a_group_and_the_chief_are_killed_and_others_take_over(tmp_path: Path) -> None:
    asked = Asked(
        options={"groups": 2, "every": 4, "recovery": Recovery(wait=100.0)},
        holds={"worker 0": 16, "worker 1": 16},
        validation=True,
    )
    with job(tmp_path, asked, chief=1, worker=2, ps=1) as found:
        found.held(*asked.holds)
        found.kill("worker 1", "chief 0")
        found.start("chief 0")
        found.start("worker 1", asked=replace(found.asked, holds={}))
        found.go("worker 0")
        found.finish()
        assert found.said("chief 0", "chief 0 .* goes on with the job")
        applied_once(found)
        (history,) = found.result("chief 0")["histories"]
        assert history["val_loss"] == found.result("worker 1")["histories"][0]["val_loss"]
        assert history["val_loss"][-1] < history["val_loss"][0]


def test_what_is_too_old_is_done_again(tmp_path: Path) -> None:
    apart = {"groups": 2, "every": 3, "max_staleness": 1}
    asked = Asked(options=apart, holds={"worker 1": 2, "worker 0": 20}, epochs=3, examples=192)
    with job(tmp_path, asked, worker=2, ps=1) as found:
        found.held(*asked.holds)
        found.go("worker 1")
        found.go("worker 0")
        found.finish()
        applied_once(found)
        (history,) = found.result("worker 0")["histories"]
        assert sum(history["rejected"]) >= 1
        counted = found.record("ps 0")["staleness"]
        assert max(map(int, counted)) <= 1
        assert sum(counted.values()) == sum(history["merges"])


def test_looking_at_it_in_the_middle_changes_nothing(replicas: Replicas) -> None:
    case = ("parameter_server", 2, {"groups": 2, "every": 4, "quorum": 2, **SMALL})
    left = run(replicas, case, jobs.glanced, looks=False)
    close(run(replicas, case, jobs.glanced, looks=True), left)
    assert left["1.num_batches_tracked"] == 2 * 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quorum": 2}, "quorum=2 without groups"),
        ({"outer": "diloco"}, "outer='diloco' without groups"),
        ({"groups": 2, "quorum": 3}, "quorum=3 of 2 groups"),
        ({"groups": 2, "quorum": 0}, "quorum=0 of 2 groups"),
        ({"groups": 2, "grace": -1}, "grace=-1"),
        ({"groups": 2, "every": 0}, "every=0"),
        ({"groups": 3}, "groups=3 of 2"),
        ({"groups": 1}, "each worker is a group of its own"),
        ({"groups": [[0], []]}, "without members"),
        ({"groups": 2, "weights": "even"}, "weights='even'"),
        ({"groups": 2, "outer": "adam"}, "outer='adam'"),
        ({"groups": 2, "aggregate": 2}, "aggregate=2 with groups=2"),
        ({"groups": 2, "on_stale": "scale"}, "on_stale='scale' with groups=2"),
    ],
    ids=str,
)
def test_what_it_cannot_do_is_refused(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: str
) -> None:
    """Before any task connects to another."""
    for name, value in tf_config(cluster_of(worker=2, ps=1), "worker", 0).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(sp.UserError, match=re.escape(message)):
        sp.ParameterServerStrategy(**options)
