"""Backups: what is interrupted goes on as if nothing had been."""

from __future__ import annotations

import shutil
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.replicas import ReplicaError, Replicas
from tests.strategies import backup_jobs
from tests.strategies.test_contracts import (
    CASES,
    Case,
    close,
    crossed,
    firsts,
    is_coupled,
    named,
    servers,
)
from tests.strategies.test_contracts import marks as contract_marks

AFTER = 10  # steps, of which an epoch has 6; a backup is due after each third, or epoch


def run(replicas: Replicas, case: Case, **options: Any) -> list[Any]:
    name, world_size, strategy = case
    found: list[Any] = replicas(
        backup_jobs.train, world_size, name, strategy, servers=servers(case), **options
    )
    return found


def interrupted(replicas: Replicas, case: Case, folder: Path, **options: Any) -> None:
    """Leave backups of a training in ``folder``."""
    with suppress(ReplicaError) if servers(case) else nullcontext():  # workers lose their chief
        found = run(replicas, case, folder=str(folder), interrupt=AFTER, **options)
        assert found == [None] * case[1]
    assert [*folder.glob("fit-1/step-*")]


def same(left: Any, right: Any) -> None:
    """Equal to the last bit."""
    if isinstance(left, dict):
        assert left.keys() == right.keys()
        for name in left:
            same(left[name], right[name])
    elif isinstance(left, torch.Tensor):
        assert torch.equal(left, right)
    else:
        assert left == right


def goes_on(replicas: Replicas, tmp_path: Path, case: Case, options: dict[str, Any]) -> None:
    """That a training of these options goes on after a loss as if nothing had been."""
    if options and (servers(case) or ":" in case[0] or case[0] == "pipeline"):
        options = {"steps": 4}  # who draws what is nobody's promise there: stages go by their time
    whole = run(replicas, case, **options)
    interrupted(replicas, case, tmp_path / "kept", **options)
    shutil.copytree(tmp_path / "kept", tmp_path / "other")
    again = run(replicas, case, folder=str(tmp_path / "kept"), **options)
    assert not [*(tmp_path / "kept").iterdir()]
    for rank, (one, other) in enumerate(zip(whole, again, strict=True)):
        if servers(case):
            # What workers had not reported is in no figure of that epoch.
            assert one["steps"] == other["steps"] or not is_coupled(case)
            if rank == 0:
                close(one["weights"], other["weights"])
            continue
        if is_coupled(case) and rank:  # of the steps before it has those of the chief's group
            one.pop("losses"), other.pop("losses")
        same(one, other)
    if not options and not is_coupled(case):
        other = run(replicas, CASES[0], folder=str(tmp_path / "other"))[0]
        for name in ("weights", "losses", "history", "rate") if not servers(case) else ("weights",):
            close(other[name], whole[0][name])


@crossed("options", {"deterministic": {}}, variants=False)
def test_it_goes_on_at_the_next_step(
    replicas: Replicas, tmp_path: Path, case: Case, options: dict[str, Any]
) -> None:
    goes_on(replicas, tmp_path, case, options)


def marks(case: Case) -> tuple[pytest.MarkDecorator, ...]:
    """One form each of a few strategies is enough for the quick tests."""
    quick = [*CASES[:2], *(next(c for c in CASES if c[0] == n) for n in ("sharded", "local_sgd"))]
    return (
        ()
        if case in quick
        else (pytest.mark.slow, *contract_marks(case, case not in firsts(CASES)))
    )


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=marks(case), id=named(case)) for case in CASES]
)
def test_what_is_drawn_at_random_goes_on_too(
    replicas: Replicas, tmp_path: Path, case: Case
) -> None:
    goes_on(replicas, tmp_path, case, {"deterministic": False, "steps": 4})
