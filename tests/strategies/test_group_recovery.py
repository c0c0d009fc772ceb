"""Tasks of groups that train apart are killed: the others go on, and nothing else is lost."""

from __future__ import annotations

from collections.abc import Callable
from math import isnan
from pathlib import Path
from typing import Any

import pytest

import spartito as sp
from spartito.cluster.recovery import Recovery
from spartito.engine.gradients.gradient_sum import PackedGradients
from spartito.errors import UserError
from spartito.outer.outer_step import Coupling
from tests.collectives.group import spec
from tests.commands import eventually
from tests.strategies.test_recovery import Killed, Plan, Spot, difference, run, without
from tests.strategies.test_sharded_recovery import Around

BYTES = "bytes_between_groups"
GROUPS: dict[str, Any] = {"name": "local_sgd", "groups": 2, "every": 4, "outer": "diloco"}
LEARNS: dict[str, Any] = {"optimizer": "AdamW", "metrics": ["accuracy", "confusion_matrix"]}
REDUCED: Spot = Around(PackedGradients, "reduce")
MERGED: Spot = Around(Coupling, "_merge")
GIVEN: Spot = Around(Coupling, "_met")
BEGUN: Spot = Around(Coupling, "begin", before=True)


undisturbed: dict[str, list[Any]] = {}
"""What jobs return in which nobody dies, by what is trained: several tests kill tasks of one."""


def whole_of(plan: Plan, folder: Path) -> list[Any]:
    """What each task returns where nobody is killed."""
    alone = Plan(plan.workers, strategy=plan.strategy, training=plan.training)
    if repr(alone) not in undisturbed:
        undisturbed[repr(alone)] = run(alone, folder)
    return undisturbed[repr(alone)]


def check(plan: Plan, folder: Path, *but: str) -> None:
    """All is bitwise as if nobody had died, on every task."""
    killed = run(plan, folder / "killed")
    expected = whole_of(plan, folder / "whole")
    for result, whole in zip(killed, expected, strict=True):
        for each in (result, whole):
            each["history"].pop(BYTES, None)  # what a lost task has sent went with it
        names = "here", *but
        assert difference(without(result, *names), without(whole, *names)) == 0.0


@pytest.mark.parametrize(
    "metrics",
    [pytest.param(["accuracy"], marks=pytest.mark.slow), ["accuracy", "confusion_matrix"]],
)
def test_a_group_gets_back_who_is_lost(metrics: list[str], tmp_path: Path) -> None:
    """Between meetings, the first task of a group and another one."""
    training = {**LEARNS, "metrics": metrics}
    check(Plan(4, frozenset({(3, 2), (2, 7)}), strategy=GROUPS, training=training), tmp_path)


@pytest.mark.parametrize("fragments", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_meeting_that_some_have_held_is_held_by_all(fragments: int, tmp_path: Path) -> None:
    """Who speaks for a group dies with what came of it, or before its group has it."""
    spots = {(2, 3): MERGED, (0, 7): BEGUN, (1, 11): GIVEN}
    strategy = {**GROUPS, **({"fragments": fragments} if fragments > 1 else {})}
    check(Plan(4, spots=spots, strategy=strategy, training=LEARNS), tmp_path)


def heard(die: Callable[[], None]) -> None:
    """Train on no further until another group is known to regroup."""
    own: Killed = die.func.__self__  # type: ignore[attr-defined]
    (own.folder / f"killed {own.rank} {own.trainer.step}").touch()  # it does so once
    groups = own.trainer.strategy.engine.groups
    assert eventually(lambda: groups.others_leave)


@pytest.mark.slow
@pytest.mark.parametrize("step", [3, 6])
def test_another_task_is_lost_while_they_share_the_state(step: int, tmp_path: Path) -> None:
    """At a meeting and between two, in another group."""
    spots: dict[tuple[int, int], Spot] = {
        (3, step): GIVEN if step == 3 else REDUCED,
        (0, step): Around("spartito.steps.outer_loops.group_recovery", "share_state"),
    }
    check(Plan(4, spots=spots, strategy=GROUPS, training=LEARNS), tmp_path)


@pytest.mark.slow
def test_groups_hear_of_a_loss_between_meetings(tmp_path: Path) -> None:
    """The first task of a group looks, the others hear it from that one."""
    strategy = {**GROUPS, "every": 1000}
    plan = Plan(4, frozenset({(1, 3)}), spots={(2, 5): heard}, strategy=strategy)
    check(plan, tmp_path)


def test_a_group_of_which_nobody_is_left_begins_where_groups_have_met(tmp_path: Path) -> None:
    """Lost right after a meeting, with an optimizer without a state, it has lost nothing more."""
    training = {"optimizer": "SGD", "dropout": 0.0}
    kills, spots = frozenset({(2, 4), (3, 4)}), {(0, 4): heard}
    plan = Plan(4, kills, spots=spots, strategy=GROUPS, training=training)
    killed = run(plan, tmp_path / "killed")
    whole = run(Plan(4, strategy=GROUPS, training=training), tmp_path / "whole")
    for result, expected in zip(killed, whole, strict=True):
        assert difference(result["weights"], expected["weights"]) == 0.0
        later = [
            {name: values[1:] for name, values in each["history"].items() if name != BYTES}
            for each in (result, expected)
        ]
        assert difference(*later) == 0.0
        assert result["step"] == expected["step"]


@pytest.mark.parametrize("every", [4, pytest.param(1000, marks=pytest.mark.slow)])
def test_the_others_go_on_without_a_group(every: int, tmp_path: Path) -> None:
    """It had done a part of a stretch; nobody comes instead of it."""
    alone = Recovery(min_workers=2, wait=0.1)
    strategy = {**GROUPS, "every": every}
    plan = Plan(4, frozenset({(2, 6), (3, 6)}), False, alone, strategy)
    found = run(plan, tmp_path / "fewer")
    assert [result and result["tasks"] for result in found] == [2, 2, None, None]
    assert difference(found[0], found[1]) == 0.0
    history = found[0]["history"]
    assert not isnan(history["loss_of_group_0"][-1])
    assert isnan(history["loss_of_group_1"][-1])


@pytest.mark.slow
@pytest.mark.parametrize("restarts", [False, True])
def test_a_group_trains_on_with_fewer_tasks(restarts: bool, tmp_path: Path) -> None:
    """Its first task is lost, and another one speaks for it, until that is there again."""
    alone = Recovery(min_workers=3, wait=0.1)
    training = {"optimizer": "SGD", "dropout": 0.0, "epochs": 6}
    plan = Plan(
        4,
        frozenset({(2, 5)}),
        restarts,
        alone,
        GROUPS,
        training,
        alone_until=20 if restarts else None,
    )
    found = run(plan, tmp_path / "job")
    tasks = [result and result["tasks"] for result in found]
    assert tasks == ([4] * 4 if restarts else [3, 3, None, 3])
    for other in filter(None, found[1:]):
        assert difference(without(found[0], "losses"), without(other, "losses")) == 0.0


@pytest.mark.slow
def test_all_are_killed_and_go_on_from_a_backup(tmp_path: Path) -> None:
    training = {"backup": True}
    kills = frozenset({(0, 8), (1, 8)})  # of callbacks a backup has the chief's
    check(Plan(2, kills, strategy=GROUPS, training=training), tmp_path, "losses")


@pytest.mark.slow
def test_all_who_speak_for_groups_are_lost_together(tmp_path: Path) -> None:
    """Nobody has what groups have in common: they go on from a backup."""
    training = {"backup": True}
    kills = frozenset({(0, 8), (2, 8)})
    check(Plan(4, kills, strategy=GROUPS, training=training), tmp_path, "losses")


@pytest.mark.parametrize(
    "options", [{"overlap": 2}, {"compress": "bf16"}, {"sites": 2, "groups": 4, "every": [2, 4]},
                {"inside": "sharded(zero=1)"}, {"inside": "mesh(model=2)"}]
)  # fmt: skip
def test_what_could_not_be_brought_back_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="recovery under local_sgd"):
        sp.LocalSGDStrategy(cluster=spec(0, 4, 1), recovery=Recovery(), **options).engine  # noqa: B018
