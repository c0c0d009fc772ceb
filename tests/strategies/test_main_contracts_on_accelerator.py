"""The contracts that compute most, on a simulated accelerator (`tests.simulated`).

All of them run there at night.
"""

from __future__ import annotations

import pytest

from tests.replicas import Replicas
from tests.strategies.test_contracts import (  # noqa: F401 - these are tests here too
    test_a_checkpoint_in_the_middle_of_an_update_loads_anywhere,
    test_a_custom_loop_trains_a_gan,
    test_a_parameter_that_nobody_uses_is_left_alone,
    test_batchnorm_dropout_and_augmentation_too,
    test_numbers_are_those_of_one_device,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def replicas(accelerators: Replicas) -> Replicas:
    """Those of the contracts here."""
    return accelerators
