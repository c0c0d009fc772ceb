"""What several tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.ps.bench import threads


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with threads() as found:
        yield found
