"""Workers of the suite: every test runs once, whatever becomes of its worker."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path

import pytest

from tests.commands import commands_in, eventually
from tests.inner import workers

SUITE = Path(workers.__file__)
PYTEST = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--numprocesses=2", SUITE)


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return {workers.FOLDER: str(tmp_path)}


@pytest.mark.slow
def test_each_test_is_reported_once_and_a_worker_that_dies_is_replaced(env: dict[str, str]) -> None:
    with commands_in(SUITE.parents[2]) as commands:
        ended = commands.start(*PYTEST, "-k", "not waits", env=env, forks=True).end()
    assert ended.code == 1
    assert "2 failed, 22 passed, 1 skipped" in ended.out
    assert "worker 0 ended here with exit code 3" in ended.out.replace("worker 1", "worker 0")
    assert "said by one" in ended.out
    assert "said by nobody" not in ended.out


@pytest.mark.slow
def test_ctrl_c_tears_down_what_runs(env: dict[str, str], tmp_path: Path) -> None:
    with commands_in(SUITE.parents[2]) as commands:
        program = commands.start(*PYTEST, "-k", "waits or passes", env=env, forks=True)
        assert eventually((tmp_path / "waits").exists)
        program.send(signal.SIGINT)
        ended = program.end()
    assert ended.code == pytest.ExitCode.INTERRUPTED
    assert "1 passed" in ended.out
    assert (tmp_path / "ended").exists()


@pytest.mark.slow
def test_the_first_failure_can_be_the_last(env: dict[str, str]) -> None:
    with commands_in(SUITE.parents[2]) as commands:
        ended = commands.start(*PYTEST, "-x", "-k", "fails or waits", env=env, forks=True).end()
    assert ended.code == pytest.ExitCode.TESTS_FAILED
    assert "stopping after 1 failures" in ended.out


@pytest.mark.slow
def test_a_worker_that_cannot_go_on_ends_the_run_and_says_why(env: dict[str, str]) -> None:
    with commands_in(SUITE.parents[2]) as commands:
        ended = commands.start(
            *PYTEST, "-p", "tests.inner.broken", "-k", "passes", env=env, forks=True
        ).end()
    assert ended.code == pytest.ExitCode.INTERNAL_ERROR
    assert "cannot go on" in ended.text
    assert "RuntimeError: a mistake of the plugin" in ended.text


@pytest.mark.slow
def test_time_limits_and_durations_are_as_without_workers(env: dict[str, str]) -> None:
    with commands_in(SUITE.parents[2]) as commands:
        words = ("-k", "waits", "--timeout=1", "--durations=1")
        ended = commands.start(*PYTEST, *words, env=env, forks=True).end()
    assert ended.code == pytest.ExitCode.TESTS_FAILED
    assert "1 failed" in ended.out
    assert "Failed: Timeout (>1.0s) from pytest-timeout" in ended.out
    assert re.search(r"s call +tests/inner/workers.py::test_waits", ended.out)
