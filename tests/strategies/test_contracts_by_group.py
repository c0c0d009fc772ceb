"""All contracts once more, on simulated accelerators with a process group (`simulated_group`)."""

from __future__ import annotations

import pytest

from tests.replicas import Replicas
from tests.strategies.test_contracts import *  # noqa: F403

pytestmark = [pytest.mark.slow, pytest.mark.night]


@pytest.fixture(scope="session")
def replicas(accelerator_groups: Replicas) -> Replicas:
    """Those of the contracts here."""
    return accelerator_groups
