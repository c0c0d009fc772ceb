from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.launch.containers import Job, need_image
from tests.launch.supervised import Start, supervised


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts scripts under a supervisor; at the end nothing of them may be left."""
    with supervised(tmp_path) as starter:
        yield starter


@pytest.fixture(scope="session")
def image() -> str:
    """What containers run: the sources as they are now."""
    return need_image()


@pytest.fixture
def container_job(image: str, tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Writes the compose file of a job in containers; at the end nothing of it is left."""
    made: list[Job] = []

    def make(*words: str, script: str | None = None) -> Job:
        folder = tmp_path / f"job-{len(made)}"
        folder.mkdir()
        made.append(Job(folder, *words, script=script))
        return made[-1]

    yield make
    for one in made:
        one.close()
        assert one.remains == []
