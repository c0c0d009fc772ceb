from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.supervised import Start, supervised


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts scripts under a supervisor; at the end nothing of them may be left."""
    with supervised(tmp_path) as starter:
        yield starter
