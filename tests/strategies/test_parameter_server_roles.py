"""Jobs with a chief that computes nothing, and with an evaluator."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from spartito.data.sets.packaged import TRAINING
from tests.commands import commands_in
from tests.strategies import ps_jobs
from tests.strategies.ps_jobs import Asked
from tests.strategies.ps_processes import job as processes

# With a chief that computes nothing, and an evaluator


@pytest.mark.parametrize("bound", [None, 2, 0])
def test_a_chief_of_its_own_gives_out_the_work(tmp_path: Path, bound: int | None) -> None:
    asked = Asked(epochs=3, options={"max_staleness": bound}, validation=True, fits=2)
    with processes(tmp_path, asked, chief=1, worker=2, ps=2) as found:
        found.finish()
        weights = found.result("chief 0")["weights"]
        again = ps_jobs.replayed(found.asked, tmp_path / "pushes", 2)
        assert all(torch.equal(weights[name], again[name]) for name in weights)
        histories = [found.result(name)["histories"] for name in ("chief 0", "worker 1")]
        assert histories[0] == histories[1]
        losses = histories[0][0]["val_loss"]
        # Each of another model, where an epoch waits for the last evaluation.
        assert len(set(losses)) == asked.epochs or bound is None
        assert found.record("ps 0")["work_items"] == 2 * asked.plan
        assert found.record("chief 0")["examples"] == 0


def test_an_evaluator_looks_at_the_checkpoints(tmp_path: Path) -> None:
    asked = Asked(
        epochs=4, callbacks="save", checkpoints=str(tmp_path / "checkpoints"), validation=True
    )
    with processes(tmp_path, asked, worker=2, ps=1, evaluator=1) as found:
        found.finish()
        lines = (tmp_path / "run" / "evaluations.jsonl").read_text().splitlines()
        assert json.loads(lines[-1])["epoch"] in (3, 4)
        assert "val_loss" not in found.result("worker 0")["histories"][0]
        assert found.record("ps 0")["work_items"] == 2 * asked.plan


@pytest.mark.slow
def test_the_launcher_starts_all_roles_on_real_digits(tmp_path: Path) -> None:
    with commands_in(tmp_path) as commands:
        words = ["train", "mnist", "--strategy", "parameter_server", "--workers", "2", "--ps", "2"]
        more = ["--chief", "--epochs", "2", "--batch-size", "256", "--out", "run"]
        ended = commands.spartito(*words, *more)
        assert ended.code == 0, ended.text
        assert "parameter_server, 2 replicas" in ended.text  # the chief is none of them
        config = json.loads((tmp_path / "run" / "config.json").read_text())
        assert config["cluster"]["replicas"] == 2
        lines = (tmp_path / "run" / "history.jsonl").read_text().splitlines()
        tasks = {path.stem for path in (tmp_path / "run" / "tasks").iterdir()}
        assert tasks == {"chief-0", "worker-0", "worker-1", "ps-0", "ps-1"}
        record = json.loads((tmp_path / "run" / "tasks" / "ps-0.json").read_text())
        assert record["examples"] == 2 * TRAINING
        accuracy = max(json.loads(line)["val_accuracy"] for line in lines)
        assert accuracy > 0.8
