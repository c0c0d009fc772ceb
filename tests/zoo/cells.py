"""The table: each architecture under each strategy, beside plain torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.replicas import ReplicaError, Replicas
from tests.zoo import jobs, plain
from tests.zoo.models import ANIMALS, LOOPS

_GONE = ("TaskLostError", "LostRankError")

RIGHT = 1e-10
"""The largest difference of any weight, buffer or loss that is one of rounding."""

AS_FAR = 10
"""Or so many times what comes of moving the weights that plain torch begins with by rounding."""


@dataclass(frozen=True)
class Column:
    """One strategy, and how plain torch is to train for the same numbers."""

    strategy: str
    replicas: int
    options: dict[str, Any] = field(default_factory=dict)
    servers: int = 0
    chief: int = 0
    plain: dict[str, int] = field(default_factory=dict)
    steps: bool = True  # whether losses of steps are those of all replicas


ALONE = {
    "one_device": Column("one_device", 1),
    "mirrored": Column("mirrored", 3),
    "multi_worker_mirrored": Column(
        "multi_worker_mirrored", 2, {"communication": "sockets", "bucket_bytes": 1024}
    ),
    "central_storage": Column("central_storage", 2),
    "mesh 2": Column("mesh", 2),
    "mesh 2x2": Column("mesh", 4, {"mesh": {"data": 2, "model": 2}}),
    "sharded 1": Column("sharded", 2, {"zero": 1}),
    "sharded 2": Column("sharded", 2, {"zero": 2, "communication": "sockets"}),
    "sharded 3": Column("sharded", 3, {"zero": 3, "block_bytes": 1024}),
    "pipeline": Column("pipeline", 2, {"microbatches": 2}),
    "local_sgd": Column(
        "local_sgd", 2, {"groups": 2, "every": 2}, plain={"groups": 2, "every": 2}, steps=False
    ),
    "parameter_server": Column(
        "parameter_server",
        2,
        {"max_staleness": 0, "servers": {"min_shard_bytes": 16}},
        servers=1,
        steps=False,
    ),
}

GROUPS = {"groups": 2, "every": 2}


def groups_of(inside: str) -> Column:
    """Two groups of two tasks that have a model between them."""
    return Column("local_sgd", 4, {**GROUPS, "inside": inside}, plain=GROUPS, steps=False)


def served_groups_of(inside: str) -> Column:
    """The same over servers, beside a chief that computes nothing."""
    given = {**GROUPS, "quorum": 2, "servers": {"min_shard_bytes": 16}, "inside": inside}
    return Column("parameter_server", 5, given, servers=1, chief=1, plain=GROUPS, steps=False)


NESTED = {
    "mesh zero 1": Column("mesh", 4, {"model": 2, "zero": 1}),
    "mesh zero 3": Column("mesh", 4, {"model": 2, "zero": 3}),
    "pipeline zero 1": Column("pipeline", 4, {"stages": 2, "microbatches": 2, "zero": 1}),
    "pipeline zero 3": Column("pipeline", 4, {"stages": 2, "microbatches": 2, "zero": 3}),
    "pipeline of mesh": Column(
        "pipeline", 4, {"mesh": {"pipeline": 2, "model": 2}, "microbatches": 2}
    ),
    "local_sgd of sharded": groups_of("sharded(zero=3)"),
    "local_sgd of mesh": groups_of("mesh(model=2)"),
    "local_sgd of pipeline": groups_of("pipeline(stages=2, microbatches=2)"),
    "servers of sharded": served_groups_of("sharded(zero=2)"),
    "servers of mesh": served_groups_of("mesh(model=2)"),
}
COLUMNS = ALONE | NESTED


@dataclass(frozen=True)
class Cell:
    """What came of a training: the difference from plain torch, a refusal, or neither."""

    difference: float = float("nan")
    where: str = ""
    refused: str = ""
    error: str = ""
    limit: float = RIGHT

    @property
    def right(self) -> bool:
        return not self.refused and not self.error and self.difference <= self.limit


def rows() -> list[str]:
    """The names of all architectures."""
    return [*ANIMALS, *LOOPS]


def expected(replicas: Replicas, name: str, column: str, moved: bool = False) -> dict[str, Any]:
    """What plain torch finds; with ``moved``, from weights that are rounded otherwise."""
    given = COLUMNS[column].plain
    found: dict[str, Any] = replicas(plain.train, 1, name, moved=moved, **given)[0]
    return found


def cell(replicas: Replicas, name: str, column: str, right: dict[str, Any]) -> Cell:
    """Train ``name`` as the column says, and compare with ``right``."""
    given = COLUMNS[column]
    try:
        found = replicas(
            jobs.train,
            given.replicas,
            name,
            given.strategy,
            given.options,
            servers=given.servers,
            chief=given.chief,
        )
    except (ReplicaError, TimeoutError) as error:
        return Cell(error=str(error))
    refused = [each["refused"] for each in found if "refused" in each]
    # Where one task refuses, the others find it gone.
    wrong = [
        f"{each['error']}\n{each['trace']}"
        for each in found
        if "error" in each and not (refused and each["error"].startswith(_GONE))
    ]
    if wrong or (refused and any("weights" in each for each in found)):
        return Cell(error="\n".join([*wrong, *refused]))
    if refused:  # one of several that were first, and others found it elsewhere
        return Cell(refused=min(refused, key=lambda text: "different calls" in text))
    worst = max((difference(each, right, given.steps) for each in found), key=lambda one: one[0])
    if worst[0] <= RIGHT:
        return Cell(*worst)
    twice = [expected(replicas, name, column, moved) for moved in (False, True)]
    far, _ = difference(twice[1], twice[0], given.steps)
    return Cell(*worst, limit=max(RIGHT, AS_FAR * far))


def difference(found: dict[str, Any], right: dict[str, Any], steps: bool) -> tuple[float, str]:
    """The largest difference of a number, and which one it is; infinite where one is missing."""
    ours, theirs = found["weights"], right["weights"]
    if set(ours) != set(theirs):
        return float("inf"), f"names: {sorted(set(ours) ^ set(theirs))[:3]}"
    pairs = {name: (ours[name], theirs[name]) for name in theirs}
    pairs["the last loss"] = found["final"], right["final"]
    if steps:
        pairs["the losses of steps"] = found["losses"], right["losses"]
    worst = 0.0, ""
    for name, (mine, other) in pairs.items():
        if mine.shape != other.shape:
            return float("inf"), f"{name}: {tuple(mine.shape)} beside {tuple(other.shape)}"
        far = float((mine - other).abs().max()) if mine.numel() else 0.0
        if not far <= worst[0]:
            worst = (far if far == far else float("inf")), name
    return worst
