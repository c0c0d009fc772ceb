"""For pytest in the copy: runs chosen tests in a given order, or notes which one runs now."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests import processes


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--chosen", type=Path, help="a file of the tests to run, with limits")
    parser.addoption("--forms", type=int, help="run so many forms of each test with parameters")
    parser.addoption("--entered", type=Path, help="the folder that the recorder writes to")


def pytest_configure(config: pytest.Config) -> None:
    if folder := config.getoption("--entered"):
        config.pluginmanager.register(Recording(folder))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if forms := config.getoption("--forms"):
        items[:] = some_forms(items, forms)
    if file := config.getoption("--chosen"):
        limits = json.loads(file.read_text())
        order = {test: number for number, test in enumerate(limits)}
        items[:] = sorted(
            (item for item in items if item.nodeid in order), key=lambda item: order[item.nodeid]
        )
        for item in items:
            item.add_marker(pytest.mark.timeout(limits[item.nodeid]), append=False)


def some_forms(items: Sequence[pytest.Item], count: int) -> list[pytest.Item]:
    """``count`` of the tests that differ in their parameters alone, drawn by their names."""

    def drawn(item: pytest.Item) -> bytes:
        return hashlib.sha256(item.nodeid.encode()).digest()

    seen = Counter[str]()
    chosen = set()
    for item in sorted(items, key=drawn):
        name = item.nodeid.partition("[")[0]
        seen[name] += 1
        if seen[name] <= count:
            chosen.add(item)
    return [item for item in items if item in chosen]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Processes of tests are forked from this one, which has imported what they need."""
    if session.config.getoption("--chosen") and session.items:
        processes.preload()
        processes.fork_server()


class Recording:
    """Writes the number of the running test where the recorder reads it, and how each ended."""

    def __init__(self, folder: Path) -> None:
        self._part = os.environ.get("PYTEST_PART", "0")
        self._current = folder / f"current-{self._part}"
        self._tests = (folder / f"tests-{self._part}").open("w")
        self._number = 0

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._number += 1
        with self._current.open("r+b") as file:
            file.write(self._number.to_bytes(4, "little"))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        line = [self._number, report.nodeid, report.duration, report.outcome != "failed"]
        print(json.dumps(line), file=self._tests, flush=True)
