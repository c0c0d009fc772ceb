"""Groups of several workers over servers: each has the numbers of one worker with all its rows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import spartito as sp
from tests.commands import cluster_of, tf_config
from tests.replicas import Replicas
from tests.strategies import decoupled_jobs, local_by_torch
from tests.strategies import local_jobs as jobs
from tests.strategies.test_contracts import close, run

SMALL = {"servers": {"min_shard_bytes": 16}}
SOON = {"min_shard_bytes": 16, "lease_seconds": 2.0}
APART = {"min_shard_bytes": 16, "shared_memory": False}
Case = tuple[str, int, dict[str, Any]]


def case(workers: int, **options: Any) -> Case:
    """One server less than workers, as in the contracts."""
    return "parameter_server", workers, {**SMALL, **options}


@pytest.mark.parametrize(
    ("workers", "options", "inner", "batch"),
    [
        (3, {"groups": [[0, 2], [1]], "every": 3}, "adamw", 8),
        pytest.param(
            4, {"groups": 2, "every": 4, "outer": "diloco", "servers": APART}, "sgd", 8,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            4, {"groups": [[0], [1, 2, 3]], "every": 2}, "adamw", 7, marks=pytest.mark.slow
        ),
        pytest.param(
            4, {"groups": 2, "every": 50, "outer": "adam", "weights": "equal"}, "sgd", 5,
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)  # fmt: skip
def test_groups_have_the_numbers_of_plain_torch(
    replicas: Replicas, workers: int, options: dict[str, Any], inner: str, batch: int
) -> None:
    """However a group's part of a batch is cut among its members; the last one is smaller."""
    result = run(
        replicas, case(workers, quorum=2, **options), jobs.trained, inner=inner, batch=batch
    )
    expected = local_by_torch.by_torch(
        [[0], [1]],
        options["every"],
        options.get("outer", "average"),
        inner,
        options.get("weights") == "equal",
        batch=batch,
    )
    close(result["weights"], expected["weights"])
    close(result["here"], expected["weights"])
    for name in ("loss", "val_loss", "loss_of_group_0", "loss_of_group_1"):
        close(result["history"][name], expected[name])


@pytest.mark.parametrize(
    ("groups", "workers", "many"),
    [
        ([[0, 1], [2]], 3, {"accumulate": 2, "clip": 0.05, "schedule": True}),
        pytest.param(2, 4, {"norm": True}, marks=pytest.mark.slow),
        pytest.param(1, 2, {"norm": True, "schedule": True}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_what_an_update_has_is_that_of_the_whole_group(
    replicas: Replicas, groups: Any, workers: int, many: dict[str, Any]
) -> None:
    """Accumulation, clipping, a schedule of global steps, and BatchNorm over the group's rows."""
    count = groups if isinstance(groups, int) else len(groups)
    found = run(
        replicas, case(workers, groups=groups, quorum=count, every=2), decoupled_jobs.featured,
        **many,
    )  # fmt: skip
    expected = decoupled_jobs.featured_by_torch(count, every=2, **many)
    close(found["weights"], expected["weights"])
    close(found["loss"], expected["loss"])
    close(found["accuracy"], expected["accuracy"])


@pytest.mark.parametrize(
    "many", [{"accumulate": 2, "clip": 0.05, "schedule": True}, {"norm": True}], ids=str
)
@pytest.mark.parametrize(
    ("inside", "workers", "groups"),
    [
        ("sharded(zero=2)", 4, 2),
        ("mesh(model=2)", 4, 2),
        pytest.param("sharded(zero=3)", 3, [[0, 1], [2]], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_figures_are_those_of_the_whole_group_whatever_it_holds(
    replicas: Replicas, inside: str, workers: int, groups: Any, many: dict[str, Any]
) -> None:
    """Tasks of one model have the same rows, which count once."""
    name, _, options = case(workers, groups=groups, quorum=2, every=2, inside=inside)
    expected = decoupled_jobs.featured_by_torch(2, every=2, **many)
    chief, *others = replicas(
        decoupled_jobs.featured, workers + 1, name, options, servers=2, chief=1, **many
    )
    close(chief["weights"], expected["weights"])
    for found in (chief, *others):
        close(found["loss"], expected["loss"])
        close(found["accuracy"], expected["accuracy"])


@pytest.mark.parametrize(
    ("groups", "workers", "at"),
    [
        ([[0, 1], [2]], 3, (2,)),
        pytest.param(2, 4, (4,), marks=pytest.mark.slow),
        pytest.param(2, 4, (), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_it_goes_on_exactly_from_a_checkpoint(
    replicas: Replicas, tmp_path: Path, groups: Any, workers: int, at: tuple[int, ...]
) -> None:
    """Also where the chief alone can read it."""
    given = case(workers, groups=groups, quorum=2, every=4)
    expected = local_by_torch.by_torch([[0], [1]], 4)["weights"]
    close(run(replicas, given, decoupled_jobs.kept, path=str(tmp_path), at=at), expected)
    checkpoint = str(tmp_path / (str(at[0]) if at else "epoch-0"))
    for all_load in (True, False):
        more = {"path": checkpoint, "all_load": all_load, "epochs": jobs.EPOCHS}
        close(run(replicas, given, decoupled_jobs.gone_on, **more), expected)


@pytest.mark.parametrize("inside", ["sharded(zero=1)", "sharded(zero=3)"])
def test_members_with_parts_go_on_exactly_from_a_checkpoint(
    replicas: Replicas, tmp_path: Path, inside: str
) -> None:
    """Also where the chief alone can read it: each takes its part of its group's state."""
    name, workers, options = case(4, groups=2, quorum=2, every=4, inside=inside)
    expected = local_by_torch.by_torch([[0], [1]], 4)["weights"]

    def weights(job: Any, **more: Any) -> Any:
        path = str(tmp_path / ("epoch-0" if "all_load" in more else ""))
        found = replicas(job, workers + 1, name, options, servers=2, chief=1, path=path, **more)
        return found[0]

    close(weights(decoupled_jobs.kept, at=()), expected)
    for all_load in (True, False):
        gone_on = weights(decoupled_jobs.gone_on, all_load=all_load, epochs=jobs.EPOCHS)
        close(gone_on, expected)


@pytest.mark.slow
@pytest.mark.parametrize("at", [3, 4, 6])
def test_an_epoch_that_is_gone_on_with_has_all_its_figures(
    replicas: Replicas, tmp_path: Path, at: int
) -> None:
    """Those of all members, also right after a meeting, before the lease is reported."""
    given = case(4, groups=2, quorum=2, every=4)
    path = str(tmp_path / "saved")
    whole = run(replicas, given, decoupled_jobs.figures, path=path, at=at)
    close(whole["loss"], local_by_torch.by_torch([[0], [1]], 4, epochs=2)["loss"])
    close(run(replicas, given, decoupled_jobs.figures, path=path, at=0), whole)


@pytest.mark.slow
def test_looking_at_it_in_the_middle_changes_nothing(replicas: Replicas) -> None:
    """Members of the chief's group do not look when it does."""
    given = case(4, groups=2, every=4, quorum=2)
    left = run(replicas, given, jobs.glanced, looks=False)
    close(run(replicas, given, jobs.glanced, looks=True), left)
    assert left["1.num_batches_tracked"] == 2 * 6


@pytest.mark.slow
def test_a_callback_may_evaluate_amid_an_epoch(replicas: Replicas) -> None:
    name, workers, options = case(4, groups=2, every=4, quorum=2)
    results = replicas(decoupled_jobs.evaluating, workers, name, options, servers=1)
    chief, *others = results
    assert len(chief["found"]) == 2 * jobs.EPOCHS
    close(chief["found"][0], decoupled_jobs.at_first())  # none has pushed yet
    for result in others:
        assert result["found"] == []
        close(result["history"], chief["found"][1::2])
        close(result["after"], chief["found"][-1])


def test_a_checkpoint_says_of_which_group_nothing_came(replicas: Replicas, tmp_path: Path) -> None:
    """Group 1 is worker 2."""
    name, workers, options = case(3, groups=[[0, 1], [2]], quorum=2, every=4, servers=SOON)
    job, log, path = decoupled_jobs.saved_alone, tmp_path / "log", str(tmp_path / "saved")
    replicas(decoupled_jobs.heard, workers, name, options, job, str(log), servers=1, path=path)
    assert "nothing came of group 1. Training" in log.read_text()


@pytest.mark.slow
def test_a_member_that_fails_keeps_no_other_waiting(replicas: Replicas) -> None:
    """Also where its process lives on: in a notebook, or where a script catches the error."""
    name, workers, options = case(2, groups=1, every=4, servers=SOON)
    first, second = replicas(decoupled_jobs.failing, workers, name, options, servers=1, timeout=40)
    assert "worker 1 did not come within 2 s" in first
    assert second == "the loss of worker 1"


@pytest.mark.slow
def test_the_chief_may_be_longer_at_the_end_of_an_epoch_than_a_wait_may_take(
    replicas: Replicas,
) -> None:
    """And in an evaluation: over sockets too."""
    name, workers, options = case(2, groups=1, every=4, servers=APART, timeout=4.0)
    found = replicas(decoupled_jobs.lengthy, workers, name, options, servers=1, seconds=7.0)
    close(found[1], found[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"groups": 3}, "groups=3 of 4"),
        ({"groups": 0}, "groups=0 of 4"),
        ({"groups": [[0, 1], [2]]}, "worker 3 is in none"),
        ({"groups": [[0, 1], [1, 2, 3]]}, "worker 1 is in more than one"),
        ({"groups": [[0, 1], [], [2, 3]]}, "without members"),
        ({"groups": [[0, 1], [2, 4], [3]]}, "there is no worker 4"),
        ({"groups": 2, "quorum": 3}, "quorum=3 of 2 groups"),
        ({"groups": "machines"}, "groups='machines'"),
    ],
    ids=str,
)
def test_groups_that_cannot_be_are_refused(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: str
) -> None:
    """Before any task connects to another."""
    for name, value in tf_config(cluster_of(worker=4, ps=1), "worker", 0).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(sp.UserError, match=re.escape(message)):
        _ = sp.ParameterServerStrategy(**options).engine
