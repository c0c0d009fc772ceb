"""Deterministic training draws one device's random numbers, wherever torch draws."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.replicas import ReplicaError, Replicas
from tests.strategies import random_jobs as jobs
from tests.strategies.test_contracts import CASES, Case, close, run

FEW = [case for case in CASES if case[0] == "mirrored"]
COVERED = [kind for kind in jobs.KINDS if kind not in jobs.REFUSED]


@pytest.fixture(scope="module")
def alone(replicas: Replicas) -> dict[str, dict[str, torch.Tensor]]:
    found: dict[str, dict[str, torch.Tensor]] = run(replicas, CASES[0], jobs.train, kinds=COVERED)
    return found


@pytest.mark.parametrize("case", FEW, ids=str)
def test_every_way_to_draw_equals_one_device(
    replicas: Replicas, alone: dict[str, Any], case: Case
) -> None:
    # torch's DDP refuses reentrant checkpoints itself.
    kinds = [kind for kind in COVERED if not (case[2] and kind.endswith("reentrant"))]
    results = replicas(jobs.train, case[1], case[0], case[2], kinds=kinds)
    for kind in kinds:
        for result in results:
            close(result[kind], alone[kind])


def test_checkpointing_draws_the_same_again(alone: dict[str, Any]) -> None:
    close(alone["blocks again"], alone["blocks"])
    close(alone["blocks again, reentrant"], alone["blocks"])


@pytest.mark.parametrize("kind", jobs.REFUSED)
def test_what_cannot_be_divided_is_refused_by_name(replicas: Replicas, kind: str) -> None:
    with pytest.raises(ReplicaError, match=jobs.REFUSED[kind]):
        replicas(jobs.train, 2, "mirrored", {}, kinds=[kind])
