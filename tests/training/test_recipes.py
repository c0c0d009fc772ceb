"""The run folder of a recipe is one for all tasks."""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from threading import Thread

import pytest

import spartito as sp
from spartito.errors import PreemptedError
from spartito.recipes import mnist
from spartito.recipes.options import Options, run_folder
from spartito.strategies import Strategy
from spartito.training.backups import fit_count
from tests.commands import eventually
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


def figures(out: Path) -> list[tuple[int, int, float, float]]:
    """Epoch, step and losses of each line of a run's history."""
    lines = map(json.loads, (out / "history.jsonl").read_text().splitlines())
    return [(line["epoch"], line["step"], line["loss"], line["val_loss"]) for line in lines]


def test_a_recipe_goes_on_in_the_middle_of_an_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(out: Path, *words: str) -> None:
        argv = ["mnist", "--epochs=4", "--batch-size=256", "--out", str(out), *words]
        monkeypatch.setattr(sys, "argv", argv)
        mnist.main()

    def end() -> None:
        file = tmp_path / "told" / "history.jsonl"
        assert eventually(lambda: file.exists() and file.read_text() != "")
        os.kill(os.getpid(), signal.SIGTERM)

    train(tmp_path / "whole")
    telling = Thread(target=end)
    telling.start()
    with pytest.raises(PreemptedError, match="is saved"):
        train(tmp_path / "told")
    telling.join()
    assert len(figures(tmp_path / "told")) < 4
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")  # that is as good as --resume
    train(tmp_path / "told")
    assert figures(tmp_path / "told") == figures(tmp_path / "whole")
    fit_count.end()
    assert not (tmp_path / "told" / "backup").exists()
