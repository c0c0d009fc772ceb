"""What any strategy has saved any other one loads, and goes on as if nothing had happened."""

from __future__ import annotations

from typing import Any

import pytest

from tests.replicas import Replicas
from tests.strategies import jobs
from tests.strategies.test_contracts import CASES, Case, close, every_strategy, named, run

Answer = dict[str, Any]


@pytest.fixture(scope="module")
def whole(replicas: Replicas) -> Answer:
    """A training that was never interrupted; that it equals plain torch is tested elsewhere."""
    found: Answer = run(replicas, CASES[0], jobs.checkpoint_and_resume, folder="", phase="whole")
    return found


@pytest.fixture(scope="module")
def written(replicas: Replicas, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    """Folders with a checkpoint in the middle of an epoch, one by each strategy."""
    folders = {}
    for case in CASES:
        folder = str(tmp_path_factory.mktemp("written") / named(case).replace("/", "-"))
        run(replicas, case, jobs.checkpoint_and_resume, folder=folder, phase="save")
        folders[folder] = case
    return folders


@every_strategy
def test_a_checkpoint_of_any_strategy_loads(
    replicas: Replicas, case: Case, written: dict[str, Case], whole: Answer
) -> None:
    options = {"phase": "resume"}
    if case[0] == "parameter_server" or case[2].get("communication") == "ddp":
        # Servers, and what DDP builds on, last as long as a job.
        resumed = [
            run(replicas, case, jobs.checkpoint_and_resume, folder=folder, **options)
            for folder in written
        ]
    else:
        resumed = run(replicas, case, jobs.resume_each, folders=[*written])
    for answer, (folder, writer) in zip(resumed, written.items(), strict=True):
        assert answer["epochs"] == [2, 3], folder
        close(answer["weights"], whole["weights"])
        # What asynchronous workers have not reported yet is missing in the epoch's own figures.
        sure = 1 if "parameter_server" in (case[0], writer[0]) else 0
        close(
            {name: values[sure:] for name, values in answer["history"].items()},
            {name: values[2 + sure :] for name, values in whole["history"].items()},
        )
