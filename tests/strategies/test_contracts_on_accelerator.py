"""All contracts of every strategy once more, on a simulated accelerator (`tests.simulated`)."""

from __future__ import annotations

import pytest

from tests.replicas import Replicas
from tests.strategies.test_contracts import *  # noqa: F403

pytestmark = [pytest.mark.slow, pytest.mark.night]


@pytest.fixture(scope="session")
def replicas(accelerators: Replicas) -> Replicas:
    """Those of the contracts here."""
    return accelerators
