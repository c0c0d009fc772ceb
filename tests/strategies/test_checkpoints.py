"""What any strategy has saved any other one loads, and goes on as if nothing had happened."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from spartito.storage.atomic import FORMAT
from tests.replicas import Replicas
from tests.strategies import jobs
from tests.strategies.test_contracts import CASES, Case, close, every_strategy, named, run

Outcome = dict[str, Any]


@pytest.fixture(scope="module")
def whole(replicas: Replicas) -> Outcome:
    """A training that was never interrupted; that it equals plain torch is tested elsewhere."""
    found: Outcome = run(replicas, CASES[0], jobs.checkpoint_and_resume, folder="", phase="whole")
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
    replicas: Replicas, case: Case, written: dict[str, Case], whole: Outcome
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
    for outcome, (folder, writer) in zip(resumed, written.items(), strict=True):
        assert outcome["epochs"] == [2, 3], folder
        close(outcome["weights"], whole["weights"])
        # What asynchronous workers have not reported yet is missing in the epoch's own figures.
        sure = 1 if "parameter_server" in (case[0], writer[0]) else 0
        close(
            {name: values[sure:] for name, values in outcome["history"].items()},
            {name: values[2 + sure :] for name, values in whole["history"].items()},
        )


GOLDEN = sorted((Path(__file__).parents[1] / "golden").glob("format-*/*"))


@pytest.mark.parametrize("folder", GOLDEN, ids=lambda path: f"{path.parent.name}-{path.name}")
@pytest.mark.parametrize("case", [CASES[0], CASES[1]], ids=named)
def test_a_checkpoint_of_an_earlier_version_loads(
    replicas: Replicas, case: Case, folder: Path, whole: Outcome
) -> None:
    """They were written by ``tests/golden/make.py``, on another machine and by another torch."""
    job = jobs.checkpoint_and_resume
    if folder.name == "accumulated":
        job = partial(job, accumulate=2)
        whole = run(replicas, CASES[0], job, folder="", phase="whole")
    resumed = run(replicas, case, job, folder=str(folder), phase="resume")
    assert resumed["epochs"] == [2, 3]
    for name, value in whole["weights"].items():
        assert torch.allclose(resumed["weights"][name], value, rtol=0, atol=1e-8), name


def test_each_format_has_its_checkpoints() -> None:
    formats = {path.parent.name for path in GOLDEN}
    assert formats == {f"format-{number}" for number in range(1, FORMAT + 1)}
    assert len(GOLDEN) == 5 * FORMAT
