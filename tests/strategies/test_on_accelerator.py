"""Each strategy on a simulated accelerator: quickly. All contracts are with the slow tests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests import simulated
from tests.replicas import Replicas
from tests.skips import shares_memory
from tests.strategies import central_jobs, jobs, meta_jobs
from tests.strategies.test_contracts import (
    CASES,
    OVER_GLOO,
    SEVERAL_SERVED,
    Case,
    agree,
    close,
    named,
    of_one_device,
    run,
)
from tests.strategies.test_meta import CASES as OF_META
from tests.strategies.test_recovery import Plan, difference
from tests.strategies.test_recovery import run as recovered

FIRST = {case[0]: case for case in reversed(CASES)}
"""The first form of each strategy."""

OPTIONS = {"clip": 0.05, "accumulate": 3, "schedule": True}


@pytest.mark.parametrize("name", ["mirrored", "sharded"])
def test_who_is_killed_is_replaced_and_all_is_as_without_it(name: str, tmp_path: Path) -> None:
    """Bitwise, with dropout: a device's generator is set for each step, too."""
    simulated.built()
    plan = Plan(2, frozenset({(1, 4)}), strategy={"name": name}, begin=simulated.begin)
    killed = recovered(plan, tmp_path / "killed")
    expected = recovered(replace(plan, kills=frozenset()), tmp_path / "whole")
    for result in killed:
        assert difference(result, expected[0]) == 0.0


@pytest.mark.parametrize("name", ["sharded", "mesh", "pipeline", "parameter_server"])
def test_models_without_values_and_with_buffers(
    replicas: Replicas, accelerators: Replicas, name: str
) -> None:
    """Each task makes what it keeps on its device; servers get buffers from there."""
    case = next(case for case in OF_META if case[0] == name and case[1] == 2)
    there, here = (run(pool, case, meta_jobs.trained) for pool in (accelerators, replicas))
    close(there, here)


@shares_memory
def test_what_the_chief_writes_is_the_one_copy(accelerators: Replicas) -> None:
    """Under central_storage each replica on a device has the values for a step alone."""
    for who in ([0], [0, 1, 2]):
        for found in accelerators(central_jobs.written, 3, who):
            assert set(found) == {7.0}
    for found in accelerators(central_jobs.written, 3, [1]):
        assert "written on replicas that are not the chief" in found


@pytest.mark.parametrize("case", [pytest.param(case, id=named(case)) for case in FIRST.values()])
def test_numbers_are_those_of_the_cpu(
    replicas: Replicas, accelerators: Replicas, case: Case
) -> None:
    options = {**OPTIONS, "loss": "weighted"}
    there, here = (run(pool, case, jobs.fit_mlp, **options) for pool in (accelerators, replicas))
    close(there, here)


BY_GROUP = [
    *(case for case in FIRST.values() if case[0] not in ("one_device", "central_storage")),
    *(case for case in OVER_GLOO if case[0] in ("sharded", "mesh")),
    SEVERAL_SERVED,
]
"""Those whose tasks are joined by the process group that torch has for their devices."""


@pytest.mark.parametrize("case", [pytest.param(case, id=named(case)) for case in BY_GROUP])
def test_numbers_by_a_process_group_of_the_devices(
    replicas: Replicas, accelerator_groups: Replicas, case: Case
) -> None:
    """As by NCCL: by DDP, by FSDP2, by groups inside of others. A CPU's tensor ends the job."""
    there = run(accelerator_groups, case, jobs.fit_mlp, **OPTIONS)
    agree(case, there, of_one_device(replicas, jobs.fit_mlp, **OPTIONS))
