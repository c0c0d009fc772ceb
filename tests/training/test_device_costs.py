"""What training asks of an accelerator: no more than a loop that is written for it by hand."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

import spartito
from tests import simulated
from tests.commands import commands_in
from tests.strategies.test_recovery import difference
from tests.training.device_costs import cases

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What the job printed: it has the device for as long as its process lives."""
    simulated.built()
    path = f"{ROOT}{os.pathsep}{Path(spartito.__file__).parents[1]}"
    with commands_in(tmp_path_factory.mktemp("costs")) as commands:
        job = (sys.executable, "-m", "tests.training.device_costs")
        ended = commands.start(*job, env={"PYTHONPATH": path}).end()
    assert ended.code == 0, ended.text
    return json.loads(ended.out.splitlines()[-1])


@pytest.mark.parametrize("name", cases())
def test_a_step_of_fit_asks_no_more_of_a_device_than_one_by_hand(measured: Any, name: str) -> None:
    """No value is read, no operation comes to those of the loop, small batches go together."""
    found = measured["trained"][name]
    fit, loop = found["fit"], found["loop"]
    assert fit["reads"] == 0
    assert fit["copies to device"] <= (2 if name == "large batches" else 2 / 10)
    assert fit["bytes to device"] == loop["bytes to device"]
    if name == "not finite":  # the host decides: in one copy, for which both are put together
        assert (fit["copies to host"], loop["reads"]) == (1, 2)
        assert fit["operations"] <= loop["operations"] + 2
    else:
        assert fit["copies to host"] == 0
        assert fit["operations"] <= loop["operations"]
    ours, *others = found["numbers"]
    assert all(difference(ours, other) <= 1e-12 for other in others)


def test_an_evaluation_waits_once_for_the_device(measured: Any) -> None:
    """All sums of loss and metrics come in one copy, however many batches there were."""
    for counts in measured["evaluated"]["costs"]:
        assert counts["reads"] + counts["copies to host"] == 1
    on_cpu, on_device = ([*found.values()] for found in measured["evaluated"]["figures"])
    assert difference(on_cpu, on_device) <= 1e-12


def test_tensors_of_all_kinds_come_to_the_host_in_one_copy(measured: Any) -> None:
    """What is there already stays; what seldom changes is read again when it has changed."""
    found = measured["read"]
    assert found["same"] == [True] * 6
    assert found["beside"]
    assert found["copies"] == 1
    assert found["sums"] == [3, 3, 3, 6]
    assert found["copies of weights"] == 2
