"""What a closed strategy leaves: the numbers of plain torch, or an error that says what to do."""

from __future__ import annotations

import pytest

from tests.replicas import Replicas
from tests.strategies import close_jobs as jobs
from tests.strategies.test_contracts import close

GATHERED = {"zero": 3, "communication": "sockets"}


@pytest.mark.parametrize(
    ("then", "options"),
    [("", {}), ("mirrored", {}), ("sharded", GATHERED), ("mesh", {"model": 2})],
)
def test_a_model_leaves_the_memory_of_central_storage(
    replicas: Replicas, then: str, options: jobs.Options
) -> None:
    """Else each replica's updates would be those of all."""
    expected = jobs.epochs("Adam", "Adam")
    for found in replicas(jobs.go_on, 2, "central_storage", {}, then, options, "Adam", "Adam"):
        close(found, expected)
