"""Tasks of a mesh or of pipelines that are killed: all go on as if they were not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import spartito as sp
from spartito.cluster.recovery import Recovery
from spartito.engine.gradients.gradient_sum import PackedGradients
from spartito.errors import UserError
from spartito.pipeline.messages import Messages
from spartito.steps.placements.tensor_parallel import InColumns
from tests.collectives.group import spec
from tests.strategies.test_recovery import Plan, Spot, difference, run, without
from tests.strategies.test_sharded_recovery import Around

MESH: dict[str, Any] = {"name": "mesh", "model": 2}
LINES: dict[str, Any] = {"name": "pipeline", "stages": 2, "microbatches": 2, "split": ["3"]}
BOTH = pytest.mark.parametrize("strategy", [MESH, LINES], ids=["mesh", "pipeline"])
BACKWARD: Spot = Around(PackedGradients, "reduce", before=True)
REDUCED: Spot = Around(PackedGradients, "reduce")
MET: Spot = Around(InColumns, "_meet")
BEFORE: Spot = Around(InColumns, "_meet", before=True)
SENT: Spot = Around(Messages, "send")


def check(plan: Plan, folder: Path) -> None:
    killed = run(plan, folder / "killed")
    expected = run(
        Plan(plan.workers, strategy=plan.strategy, training=plan.training), folder / "whole"
    )[0]
    for result in killed:
        assert difference(without(result, "here"), without(expected, "here")) == 0.0


def unheard(die: Callable[[], None]) -> None:
    """All have met, and this task is the one that has not heard of it before another is lost."""
    folder: Path = die.func.__self__.folder  # type: ignore[attr-defined]
    meet, finish = InColumns._meet, InColumns._finish

    def once(copies: InColumns) -> None:
        InColumns._meet = meet  # type: ignore[method-assign]
        meet(copies)
        meet(copies)  # it ends with the loss: nobody comes to it

    def noted(copies: InColumns) -> None:
        finish(copies)
        (folder / "finished").touch()

    InColumns._meet, InColumns._finish = once, noted  # type: ignore[method-assign,assignment]


@BOTH
def test_an_update_that_some_have_made_is_made_by_all(
    strategy: dict[str, Any], tmp_path: Path
) -> None:
    """Tasks 1 and 3 have one part of the model: 3 dies, and 1 does not know what 0 and 2 did."""
    training = {"optimizer": "AdamW", "metrics": ["accuracy", "confusion_matrix"]}
    spots = {(3, 6): MET, (1, 6): unheard}
    plan = Plan(4, spots=spots, strategy=strategy, training=training)
    check(plan, tmp_path)
    assert (tmp_path / "killed" / "finished").exists()


def test_who_comes_at_the_end_of_an_epoch_draws_as_its_data_shard(tmp_path: Path) -> None:
    """The others compare before it has computed anything."""
    check(Plan(4, spots={(3, 5): MET}, strategy=MESH), tmp_path)


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize("communication", ["auto", "sockets"])
def test_a_task_is_killed_wherever_it_is(
    communication: str, strategy: dict[str, Any], tmp_path: Path
) -> None:
    spots = {(0, 2): REDUCED, (3, 5): BEFORE, (1, 8): MET, (2, 11): REDUCED}
    training = {"optimizer": "NAdam", "batch": 9, "metrics": ["accuracy", "confusion_matrix"]}
    strategy = {**strategy, "communication": communication}
    check(Plan(4, spots=spots, strategy=strategy, training=training), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [MESH, LINES, {"name": "mirrored"}])
def test_another_task_is_lost_while_they_share_the_state(
    strategy: dict[str, Any], tmp_path: Path
) -> None:
    """Some have taken over parameters, or made an update, and all meet once more."""
    cuts = strategy["name"] != "mirrored"
    module = "spartito.steps." + ("placements.tensor_parallel" if cuts else "recovery")
    spots: dict[tuple[int, int], Spot] = {
        (3, 6): MET if cuts else BACKWARD,
        (0, 6): Around(module, "share_state"),
    }
    training = {"optimizer": "AdamW", "metrics": ["confusion_matrix"]}
    check(Plan(4, spots=spots, strategy=strategy, training=training), tmp_path)


@pytest.mark.slow
@BOTH
def test_all_who_have_a_part_are_killed_and_go_on_from_a_backup(
    strategy: dict[str, Any], tmp_path: Path
) -> None:
    training = {"backup": True}
    kills = frozenset({(1, 8), (3, 8)})
    check(Plan(4, kills, strategy=strategy, training=training), tmp_path)


@pytest.mark.slow
def test_stages_that_are_cut_are_brought_back(tmp_path: Path) -> None:
    strategy = {"name": "pipeline", "mesh": {"pipeline": 2, "data": 2, "model": 2}, "split": ["3"]}
    spots = {(7, 2): MET, (2, 5): REDUCED}
    check(Plan(8, spots=spots, strategy={**strategy, "microbatches": 2}), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["interleaved", "zero_bubble"])
def test_a_task_is_lost_before_and_after_the_first_batch(schedule: str, tmp_path: Path) -> None:
    """The others know where stages begin, or they do not yet; others have the messages' forms."""
    split = ["1", "3", "4"] if schedule == "interleaved" else ["3"]
    stages = len(split) + 1
    strategy = {**LINES, "stages": stages, "split": split, "schedule": schedule}
    spots = {(0, 0): REDUCED, (3, 1): BEFORE, (1, 2): SENT}
    check(Plan(4, frozenset({(2, 0)}), spots=spots, strategy=strategy), tmp_path)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"model": 4}, "one data shard"),
        ({"model": 2, "zero": 1}, "zero=1"),
        ({"model": 2, "recovery": Recovery(min_workers=3)}, "min_workers=3 of 4 tasks under mesh"),
        ({"stages": 4}, "one data shard"),
        ({"stages": 2, "zero": 1}, "zero=1"),
        ({"stages": 2, "recovery": Recovery(min_workers=3)}, "min_workers=3 of 4"),
    ],
)
def test_what_could_not_be_brought_back_is_refused(options: dict[str, Any], why: str) -> None:
    kind = sp.PipelineStrategy if "stages" in options else sp.MeshStrategy
    with pytest.raises(UserError, match=why):
        kind(cluster=spec(0, 4, 1), **{"recovery": Recovery(), **options}).engine  # noqa: B018
