"""Groups over parameter servers: their numbers are those of plain torch, and nobody waits."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import spartito as sp
from spartito.cluster.recovery import Recovery
from tests.commands import cluster_of, tf_config
from tests.replicas import Replicas
from tests.strategies import decoupled_jobs, local_by_torch
from tests.strategies import local_jobs as jobs
from tests.strategies.jobs import CLASSES, make_strategy, mlp
from tests.strategies.ps_jobs import Asked
from tests.strategies.ps_processes import Job, job
from tests.strategies.test_contracts import close, run

SMALL = {"servers": {"min_shard_bytes": 16}}
GUESS = math.log(CLASSES)
"""The loss of who knows nothing."""


@pytest.mark.parametrize(
    ("workers", "options", "inner"),
    [
        (2, {"every": 3}, "adamw"),
        (
            2,
            {
                "every": 4,
                "outer": "diloco",
                "servers": {"min_shard_bytes": 16, "shared_memory": False},
            },
            "sgd",
        ),
        (3, {"every": 2, "outer": "diloco"}, "adamw"),
        (3, {"every": 50, "outer": "adam", "weights": "equal"}, "sgd"),
    ],
    ids=str,
)
@pytest.mark.parametrize("batch", [8, 3])
def test_a_quorum_of_all_has_the_numbers_of_plain_torch(
    replicas: Replicas,
    tmp_path: Path,
    workers: int,
    options: dict[str, Any],
    inner: str,
    batch: int,
) -> None:
    """Also with three examples in a batch, on two servers, and with two epochs and more."""
    given = {"groups": workers, "quorum": workers, **SMALL, **options}
    case = ("parameter_server", workers, given)
    log = str(tmp_path / "log")
    told = {"inner": inner, "batch": batch, "log": log}
    result = run(replicas, case, decoupled_jobs.heard, what=jobs.trained, **told)
    expected = local_by_torch.by_torch(
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
    steps = -(-jobs.EXAMPLES // batch)
    said = Path(log).read_text().count(f"every={options['every']}, and an epoch has {steps} up")
    assert said == (options["every"] > steps)


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
        assert history["val_loss"][-1] < 0.75 * GUESS


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
        # Not below the first one: a chief that is slow to come back evaluates all epochs late.
        assert history["val_loss"][-1] < 0.75 * GUESS


def test_what_is_too_old_is_done_again(tmp_path: Path) -> None:
    apart = {"groups": 2, "every": 3, "max_staleness": 1}
    holds: dict[str, int | tuple[int, ...]] = {"worker 1": 2, "worker 0": (1, 20)}
    asked = Asked(options=apart, holds=holds, epochs=3, examples=192)
    with job(tmp_path, asked, worker=2, ps=1) as found:
        found.held(*holds)  # both have the first values
        found.go("worker 0")
        found.held("worker 0")
        found.go(*holds)
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
    ("workers", "options", "at", "checkpoint"),
    [
        (2, {"every": 4}, (2,), "2"),
        pytest.param(2, {"every": 4}, (4,), "4", marks=pytest.mark.slow),
        pytest.param(3, {"every": 2, "outer": "diloco"}, (), "epoch-0", marks=pytest.mark.slow),
        pytest.param(2, {"every": 4}, (10,), "10", marks=pytest.mark.slow),
        pytest.param(2, {"every": 4}, (6,), "6", marks=pytest.mark.slow),
        pytest.param(2, {"every": 4}, (), "end", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_it_goes_on_exactly_from_a_checkpoint(
    replicas: Replicas,
    tmp_path: Path,
    workers: int,
    options: dict[str, Any],
    at: tuple[int, ...],
    checkpoint: str,
) -> None:
    """Between two meetings, right after one, and after an epoch; saving changes nothing."""
    given = {"groups": workers, "quorum": workers, **SMALL, **options}
    case = ("parameter_server", workers, given)
    epochs = jobs.EPOCHS * (2 if checkpoint == "end" else 1)
    expected = local_by_torch.by_torch(
        [[index] for index in range(workers)],
        options["every"],
        options.get("outer", "average"),
        epochs=epochs,
    )["weights"]
    found = run(replicas, case, decoupled_jobs.kept, path=str(tmp_path), at=at)
    if checkpoint != "end":
        close(found, expected)
    for all_load in (True, False):
        path = str(tmp_path / checkpoint)
        more = {"path": path, "all_load": all_load, "epochs": epochs}
        close(run(replicas, case, decoupled_jobs.gone_on, **more), expected)


@pytest.mark.slow
@pytest.mark.parametrize("at", [3, 4, 6])
def test_an_epoch_that_is_gone_on_with_has_all_its_figures(
    replicas: Replicas, tmp_path: Path, at: int
) -> None:
    """Also right after a meeting, when the chief has not reported its own part yet."""
    case = ("parameter_server", 2, {"groups": 2, "quorum": 2, "every": 4, **SMALL})
    path = str(tmp_path / "saved")
    whole = run(replicas, case, decoupled_jobs.figures, path=path, at=at)
    close(whole["loss"], local_by_torch.by_torch([[0], [1]], 4, epochs=2)["loss"])
    close(run(replicas, case, decoupled_jobs.figures, path=path, at=0), whole)


@pytest.mark.slow
def test_groups_that_wait_for_nobody_get_an_optimizer_from_the_chief(
    replicas: Replicas, tmp_path: Path
) -> None:
    """Where it alone has loaded, as from a disk of its own."""
    given = {"groups": 2, "every": 4, **SMALL}
    case = ("parameter_server", 2, {"quorum": 2, **given})
    run(replicas, case, decoupled_jobs.kept, path=str(tmp_path), at=())
    saved, job = str(tmp_path / "epoch-1"), decoupled_jobs.counted
    found = replicas(job, 2, "parameter_server", given, servers=1, path=saved, epochs=jobs.EPOCHS)
    assert min(found) >= 2 * 6, found


@pytest.mark.parametrize("options", [{"max_staleness": 0}, {"groups": 2, "quorum": 2, "every": 4}])
def test_a_callback_may_evaluate_amid_an_epoch(replicas: Replicas, options: dict[str, Any]) -> None:
    """It runs on the chief alone: the others, which do not call it, never see its figures."""
    results = replicas(
        decoupled_jobs.evaluating, 2, "parameter_server", {**SMALL, **options}, servers=1
    )
    chief, other = results
    assert other["found"] == []
    assert len(chief["found"]) == 2 * jobs.EPOCHS
    if "groups" in options:  # none has pushed yet
        close(chief["found"][0], decoupled_jobs.at_first())
    for result in results:
        close(result["history"], chief["found"][1::2])
        close(result["after"], chief["found"][-1])


def test_what_is_written_into_a_model_that_is_only_shown_is_refused(replicas: Replicas) -> None:
    """The chief alone has callbacks; the others hear of it."""
    given = {"groups": 2, "quorum": 2, "every": 4, **SMALL}
    job = jobs.written_amid
    first, other = replicas(job, 2, "parameter_server", given, "in place", servers=1)
    assert "0.bias and 3.bias of the model changed on worker 0 in a callback" in first
    assert "ended the job: UserError: 0.bias and 3.bias of the model changed" in str(other)
    found = replicas(job, 2, "parameter_server", given, "in a loop", servers=1)
    assert "0.bias and 3.bias changed while the model showed the merged values" in str(found)
    case = ("parameter_server", 2, given)
    found = run(replicas, case, jobs.written_amid, how="back")
    close(found, local_by_torch.by_torch([[0], [1]], 4, epochs=1)["weights"])


@pytest.mark.slow
def test_another_number_of_groups_goes_on_from_the_merged_model(
    replicas: Replicas, tmp_path: Path
) -> None:
    given = {"every": 2, **SMALL}
    case = ("parameter_server", 2, {"groups": 2, "quorum": 2, **given})
    run(replicas, case, decoupled_jobs.kept, path=str(tmp_path), at=())
    other = ("parameter_server", 3, {"groups": 3, "quorum": 3, **given})
    told = {"path": str(tmp_path / "epoch-1"), "all_load": False, "epochs": 3}
    log = tmp_path / "log"
    found = run(
        replicas, other, decoupled_jobs.heard, what=decoupled_jobs.gone_on, log=str(log), **told
    )
    assert "the checkpoint is of 2 groups, and here are 3" in log.read_text()
    assert all(value.isfinite().all() for value in found.values())


@pytest.mark.slow
def test_it_goes_on_exactly_where_the_chief_computes_nothing(tmp_path: Path) -> None:
    """It saves when it likes: wherever the groups are, they stand still where they met last."""
    apart = {"groups": 2, "quorum": 2, "every": 4}
    saved = tmp_path / "saved"
    asked = Asked(options=apart, examples=192, callbacks="often", checkpoints=str(saved))

    def trained(folder: str, asked: Asked) -> dict[str, Any]:
        (tmp_path / folder).mkdir()
        with job(tmp_path / folder, asked, chief=1, worker=2, ps=1) as found:
            found.finish()
            assert not found.said("chief 0", "without the groups' own states")
            weights: dict[str, Any] = found.result("worker 0")["weights"]
            return weights

    whole = trained("first", asked)
    again = {
        path.name: trained(path.name, replace(asked, callbacks="", load=str(path)))
        for path in sorted(saved.glob("step-*"))[:3]
    }
    assert len(again) > 1
    for found in again.values():
        for name, value in whole.items():
            assert (value - found[name]).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quorum": 2}, "quorum=2 without groups"),
        ({"outer": "diloco"}, "outer='diloco' without groups"),
        ({"groups": 2, "quorum": 3}, "quorum=3 of 2 groups"),
        ({"groups": 2, "quorum": 0}, "quorum=0 of 2 groups"),
        ({"groups": 2, "quorum": {"grace": -1}}, "a grace of -1"),
        ({"groups": 2, "quorum": {"grace": 1, "group": 2}}, "Did you mean 'groups'"),
        ({"quorum": {"grace": 1}}, "grace=1 without groups"),
        ({"groups": 2, "every": 0}, "every=0"),
        ({"groups": 3}, "groups=3 of 2"),
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
        _ = sp.ParameterServerStrategy(**options).engine


def nothing_learns() -> str:
    with make_strategy("parameter_server", groups=2, quorum=2, every=2) as strategy:
        try:
            sp.Trainer(mlp(), loss=torch.nn.CrossEntropyLoss(), strategy=strategy)
        except sp.UserError as error:
            return str(error)
    return ""


def test_groups_without_an_optimizer_are_refused(replicas: Replicas) -> None:
    for found in replicas(nothing_learns, 2, servers=1):
        assert "an optimizer without parameters" in found
