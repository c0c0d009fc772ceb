"""Tasks that keep shards, and are killed at every moment of an update: nothing is lost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from spartito.cluster.recovery import Recovery
from spartito.engine.sharding.shard_copies import VALUES, ShardCopies, Snapshot
from spartito.engine.sharding.sharded_gradients import ShardedGradients
from spartito.engine.updates.divided_update import DividedUpdates
from spartito.errors import UserError
from spartito.registry import strategy_info
from spartito.steps.recovery import ShardsLostError
from spartito.steps.shard_copies import Healing
from spartito.strategies import strategy as named_strategy
from tests.collectives.group import spec
from tests.replicas import Replicas
from tests.strategies.test_recovery import Plan, Spot, difference, run, without


@dataclass(frozen=True)
class Around:
    """Die when a method, or a function of a module by its name, is called, or has returned."""

    cls: Any
    name: str
    before: bool = False

    def __call__(self, die: Callable[[], None]) -> None:
        owner = import_module(self.cls) if isinstance(self.cls, str) else self.cls
        original = getattr(owner, self.name)

        def method(*given: Any, **named: Any) -> Any:
            if self.before:
                die()
            found = original(*given, **named)
            if not self.before:
                die()
            return found

        setattr(owner, self.name, method)


def torn(die: Callable[[], None]) -> None:
    """Die with half of a copy written over the one before the last."""

    def write(self: ShardCopies, now: Snapshot) -> None:
        for slot in now.tensors(self._group.rank) or []:
            slot.fill_(3)
        die()

    ShardCopies._write = write  # type: ignore[method-assign]


BACKWARD = Around(ShardedGradients, "add", before=True)
REDUCED = Around(ShardedGradients, "update", before=True)
OWN_UPDATED = Around(DividedUpdates, "update")
ALL_UPDATED = Around(ShardedGradients, "update")
WRITTEN = Around(ShardCopies, "_write")
COMPLETE = Around(ShardCopies, "keep")
SPOTS: list[Spot] = [BACKWARD, REDUCED, OWN_UPDATED, ALL_UPDATED, torn, WRITTEN, COMPLETE]
PLANS: list[tuple[str, Plan]] = [
    (
        "memory",
        Plan(
            2,
            spots={(1, 1): BACKWARD, (0, 4): OWN_UPDATED, (1, 7): torn},
            strategy={"name": "sharded", "block_bytes": 200},
            training={"optimizer": "AdamW", "accumulate": 2, "norm": True},
        ),
    ),
    (
        "sockets",
        Plan(
            3,
            spots={(2, 3): WRITTEN, (0, 8): ALL_UPDATED},
            strategy={"name": "sharded", "block_bytes": 200, "communication": "sockets"},
            training={
                "optimizer": "SGD", "options": {"momentum": 0.9}, "frozen": True, "bad": [30]
            },
        ),
    ),
]  # fmt: skip


def check(plan: Plan, folder: Path) -> None:
    """Everything is bitwise as if nobody had died, on every task."""
    killed = run(plan, folder / "killed")
    assert len(list((folder / "killed").glob("killed *"))) == len(plan.spots)
    whole = Plan(plan.workers, strategy=plan.strategy, training=plan.training)
    expected = run(whole, folder / "whole")[0]
    for result in killed:
        assert [name for name in expected if difference(result[name], expected[name])] == []


@pytest.mark.parametrize("plan", [plan for _, plan in PLANS], ids=[name for name, _ in PLANS])
def test_tasks_are_killed_within_updates(plan: Plan, tmp_path: Path) -> None:
    check(plan, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("communication", ["auto", "sockets"])
def test_the_chief_and_a_worker_are_killed_at_every_spot(
    zero: int, communication: str, tmp_path: Path
) -> None:
    options = {"zero": zero, "block_bytes": 200, "communication": communication}
    spots = {(number % 2, 2 * number): spot for number, spot in enumerate(SPOTS)}
    spots |= {(1 - number % 2, 18 + 2 * number): spot for number, spot in enumerate(SPOTS)}
    training = {"optimizer": "NAdam", "epochs": 6, "batch": 8}
    check(
        Plan(2, spots=spots, strategy={"name": "sharded", **options}, training=training), tmp_path
    )


@pytest.mark.slow
@pytest.mark.parametrize("communication", ["auto", "sockets"])
def test_shards_are_cut_anew_for_fewer_tasks(communication: str, tmp_path: Path) -> None:
    """3 tasks, of which the chief is lost for good; the shards are uneven before and after."""
    training = {"norm": True, "optimizer": "Adam", "batch": 9}
    options = {"name": "sharded", "block_bytes": 200, "communication": communication}
    fewer = Plan(
        3, restarts=False, recovery=Recovery(2, 0.1), strategy=options, training=training,
        spots={(0, 8): OWN_UPDATED},
    )  # fmt: skip
    chief, *others = run(fewer, tmp_path / "fewer")
    expected = run(Plan(3, strategy=options, training=training), tmp_path / "whole")[0]
    assert chief is None
    assert [result["tasks"] for result in others] == [2, 2]
    for result in others:
        assert difference(without(result, "tasks"), without(expected, "tasks")) <= 1e-12


@pytest.mark.slow
def test_one_goes_on_alone_and_takes_in_who_comes_later(tmp_path: Path) -> None:
    training = {"optimizer": "Adam", "dropout": 0.0, "epochs": 12}
    options = {"name": "sharded", "block_bytes": 200}
    plan = Plan(
        2, recovery=Recovery(1, 0.1), strategy=options, training=training, alone_until=20,
        spots={(0, 5): WRITTEN},
    )  # fmt: skip
    later = run(plan, tmp_path / "later")
    expected = run(Plan(2, strategy=options, training=training), tmp_path / "whole")[0]
    assert [result["tasks"] for result in later] == [2, 2]
    for result in later:
        assert difference(without(result, "tasks"), without(expected, "tasks")) <= 1e-12


def test_a_task_and_the_one_that_keeps_its_copy_are_killed(tmp_path: Path) -> None:
    """A shard is nowhere: all go on from the newest backup."""
    options = {"name": "sharded", "block_bytes": 200, "communication": "sockets"}
    training = {"backup": True, "epochs": 2}
    kills = frozenset({(1, 8), (2, 8)})
    killed = run(Plan(3, kills, strategy=options, training=training), tmp_path / "killed")
    expected = run(Plan(3, strategy=options, training=training), tmp_path / "whole")[0]
    for result in killed:
        assert difference(without(result, "here"), without(expected, "here")) == 0.0
    assert len((tmp_path / "killed" / "run" / "history.jsonl").read_text().splitlines()) == 2


def lose(who: tuple[int, ...], writer: int) -> str:
    """What tasks find when some have lost what they had, and one has written beside an update."""
    with named_strategy("mirrored", communication="sockets") as strategy:
        group, value = strategy.engine.groups.world, torch.ones(16)
        copies, shard = ShardCopies(group, strategy.cluster.local_rank), [(0, VALUES, {"": value})]
        for _ in range(2):
            copies.look(shard)
            value.add_(group.rank)
            copies.keep(shard)
        if group.rank == writer:
            value.zero_()
        copies.look(shard)
        if group.rank in who:
            copies.forget()
        try:
            return f"version {Healing(group, copies, 'of one model', []).version}"
        except ShardsLostError as error:
            return str(error)


@pytest.mark.parametrize(
    ("who", "writer", "text"),
    [
        ((1,), -1, "version 1"),
        ((1, 2), -1, "worker 1 and the task that kept a copy of its shard were lost together"),
        ((1,), 0, "were written into after the last update"),
    ],
)
def test_what_is_nowhere_is_named(
    replicas: Replicas, who: tuple[int, ...], writer: int, text: str
) -> None:
    for found in replicas(lose, 3, who, writer):
        assert text in found


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"copies": 2}, "copies=2 with recovery"),
        ({"communication": "process_group"}, "process_group"),
    ],
)
def test_what_cannot_recover_is_refused(options: dict[str, Any], text: str) -> None:
    made = strategy_info("sharded").load()
    with pytest.raises(UserError, match=text):
        _ = made(cluster=spec(0, 2, 29500), recovery=Recovery(), **options).engine
