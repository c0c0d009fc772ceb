"""The run folder of a recipe is one for all tasks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import spartito as sp
from spartito.recipes.options import Options, run_folder
from spartito.strategies import Strategy
from tests.training.jobs import on_replicas

UNNAMED = Options(None, 1, None, 8, 0, "fp32", resume=False, json=False)


def folder_for(strategy: Strategy) -> str:
    """The run folder, where each task would name another one, as those do that start later."""
    return str(run_folder(UNNAMED, strategy, f"of-{strategy.cluster.rank}"))


def test_the_chief_names_the_run_folder_of_all() -> None:
    first, second = on_replicas(folder_for, 2)
    assert first == second
    assert first.startswith("runs/of-0-")


@pytest.mark.parametrize("other", ["ps", "evaluator"])
def test_tasks_that_do_not_meet_want_a_name(other: str) -> None:
    alone = sp.ClusterSpec.alone()
    cluster = replace(alone, addresses={"worker": ("a:1",), other: ("b:1",)})
    strategy = (sp.ParameterServerStrategy if other == "ps" else sp.OneDeviceStrategy)(
        cluster=cluster
    )
    with pytest.raises(sp.UserError, match="cannot know the run folder"):
        run_folder(UNNAMED, strategy, "mnist")
    assert run_folder(replace(UNNAMED, named=Path("mine")), strategy, "mnist") == Path("mine")
    strategy.close()
