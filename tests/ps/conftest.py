"""What several tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from spartito.ps.protocol.rules import Rules
from tests.ps.bench import threads
from tests.ps.served import Job, Start


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with threads() as found:
        yield found


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Start]:
    """Starts servers and their clients, which end with the test."""
    made: list[Job] = []

    def start(count: int = 1, rules: Rules | None = None, **options: Any) -> Job:
        made.append(Job(tmp_path, count, rules or Rules(2), **options))
        return made[-1]

    yield start
    for one in made:
        one.close()
