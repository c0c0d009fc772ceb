from __future__ import annotations

import os
import re
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

from spartito.cluster import ports
from tests.commands import nothing_left
from tests.replicas import Replicas

# A test waits for its turn on a busy machine.
settings.register_profile(
    "patient", settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("patient")

torch.set_num_threads(1)  # several would wait for each other, spinning, where all cores are busy


def pytest_configure() -> None:
    """Each worker of pytest draws free ports of its own, which no other takes before their use."""
    worker = int(re.sub(r"\D", "", os.environ.get("PYTEST_XDIST_WORKER", "0")))
    count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    ports.BELOW_EPHEMERAL = ports.BELOW_EPHEMERAL[worker::count]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes long (containers, nodes, whole jobs) first: in the end no worker is left alone."""

    def is_short(item: pytest.Item) -> bool:
        marks = {mark.name for mark in item.iter_markers()}
        return not marks & {"docker", "slurm"} and not item.path.stem.endswith("_integration")

    items.sort(key=is_short)


@pytest.fixture(scope="session")
def replicas() -> Iterator[Replicas]:
    """``replicas(job, world_size, ...)`` runs a job in real processes that outlive one test."""
    pool = Replicas()
    yield pool
    pool.close()


@pytest.fixture
def no_segments_left() -> Iterator[None]:
    """A test that leaves nothing in shared memory."""
    with nothing_left():
        yield
