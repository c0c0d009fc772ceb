from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.replicas import Replicas


@pytest.fixture(scope="session")
def replicas() -> Iterator[Replicas]:
    """``replicas(job, world_size, ...)`` runs a job in real processes that outlive one test."""
    pool = Replicas()
    yield pool
    pool.close()
