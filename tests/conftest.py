from __future__ import annotations

from tests import known_state

known_state.begin()  # before anything reads the environment

import os  # noqa: E402
import secrets  # noqa: E402
import tempfile  # noqa: E402
from collections import Counter  # noqa: E402
from collections.abc import Generator, Iterator  # noqa: E402
from contextlib import nullcontext  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

from spartito.wire import ports  # noqa: E402
from tests import (  # noqa: E402
    at_night,
    commands,
    costs,
    simulated,
    simulated_group,
    skips,
    stacks,
    workers,
)
from tests.replicas import Replicas  # noqa: E402

# A test waits for its turn on a busy machine.
settings.register_profile(
    "patient", settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("patient")

PROGRAMS = {"Commands", "commands_in", "subprocess"}
"""What modules import whose tests start programs: these take longer than their number says."""

OF_OTHERS = ("test_clouds", "test_libraries", "test_podman", "test_ray")
"""Files whose tests start programs of others in Python: these may warn as they like."""

CLUSTER_SECONDS = 600.0

torch.set_num_threads(1)  # several would wait for each other, spinning, where all cores are busy


def pytest_addoption(parser: pytest.Parser) -> None:
    workers.add_option(parser)
    parser.addoption("--costs-to", metavar="FILE", help="append each test's seconds of a core")
    parser.addoption("--skips-to", metavar="FILE", help="append each skip's kind and reason")


def pytest_configure() -> None:
    skips.required(os.environ)
    begin(0, 1)


def begin(worker: int, count: int) -> None:
    """Each worker draws free ports of its own, which no other takes before their use."""
    ports.BELOW_EPHEMERAL = ports.BELOW_EPHEMERAL[worker::count]
    os.environ[commands.SUITE] = secrets.token_hex(8)
    descriptor, os.environ[stacks.FILE] = tempfile.mkstemp(prefix="stacks-", text=True)
    os.close(descriptor)


def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Tests run in workers that are forked, where ``--numprocesses`` asks for some."""
    return workers.run(session, begin, end)


def end() -> None:
    """A process that has run tests leaves no file, and no process."""
    commands.SERVERS.close()
    Path(os.environ[stacks.FILE]).unlink(missing_ok=True)


def pytest_unconfigure() -> None:
    end()
    known_state.end()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What takes long first, so that in the end no worker is left alone with it.

    Clusters have twice the time: their engines have limits of their own, and no core to spare.
    """

    def order(item: pytest.Item) -> tuple[bool, bool]:
        marks = {mark.name for mark in item.iter_markers()}
        is_long = bool(marks & {"docker", "slurm", "slow"})
        starts = not PROGRAMS.isdisjoint(vars(getattr(item, "module", object)))
        return not is_long and not item.path.stem.endswith("_integration"), not starts

    items.sort(key=order)
    unused = set(at_night.PATTERNS)
    for item in items:
        if workers.kind_of(item) == workers.CLUSTERS and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(CLUSTER_SECONDS))
        started = {"replicas", "accelerators"}.intersection(getattr(item, "fixturenames", ()))
        if "central_storage" in item.nodeid and started:
            item.add_marker(skips.shares_memory)  # as its replicas have to
        if "[spartito chaos " in item.nodeid:
            item.add_marker(skips.on_linux)
        name = item.nodeid.removeprefix("tests/")
        if pattern := at_night.pattern_of(name, item.get_closest_marker("slow") is not None):
            item.add_marker(pytest.mark.night)
            unused.discard(pattern)
        if costs.is_dear(item.nodeid):
            item.add_marker(pytest.mark.slow)
    if unused and config.args == config.getini("testpaths"):  # all were found
        raise pytest.UsageError(f"tests/at_night.py has patterns that no test fits: {unused}")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """Count what the test costs, where that is asked for."""
    file = item.config.getoption("--costs-to")
    with costs.counted(item.nodeid, Path(file)) if file else nullcontext():
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Warnings are errors in programs that a test starts, but where some are Python's of others."""
    marks = {mark.name for mark in item.iter_markers()}
    if marks & {"docker", "slurm"} or item.path.stem.startswith(OF_OTHERS):
        for name in known_state.WARNINGS:
            os.environ.pop(name, None)
    else:
        os.environ.update(known_state.WARNINGS)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call() -> None:
    """All tests have one environment: what is forked from one process needs that of its server."""
    os.environ.pop("PYTEST_CURRENT_TEST", None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """What is required is not skipped; a time limit shows where the children of the test stand."""
    report = yield
    if call.excinfo is not None and "from pytest-timeout" in str(call.excinfo.value):
        report.sections += [*_children(), *commands.outputs()]
    return skips.enforce(report, skips.required(os.environ))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, Any, Any]:
    """A module that skips itself is a skip like any other."""
    return skips.enforce((yield), skips.required(os.environ))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """How many were skipped for want of what."""
    skipped = terminalreporter.stats.get("skipped", [])
    counts = Counter(skips.kind_of(report) or "no kind" for report in skipped)
    if counts:
        of_each = ", ".join(f"{kind} {count}" for kind, count in sorted(counts.items()))
        terminalreporter.write_line(f"{len(skipped)} skipped: {of_each}")
    if file := config.getoption("--skips-to"):
        with Path(file).open("a") as lines:
            lines.writelines(f"{skips.reason_of(report)}\n" for report in skipped)


def _children() -> Iterator[tuple[str, str]]:
    """The stacks of all descendants that show theirs: of those that were forked."""
    pids = stacks.descendants(os.getpid())
    forked = {f"child {pid}": pid for pid in pids if not commands.is_program(pid)}
    yield "children of the test", stacks.of(forked)


@pytest.fixture(scope="session")
def replicas() -> Iterator[Replicas]:
    """``replicas(job, world_size, ...)`` runs a job in real processes that outlive one test."""
    pool = Replicas()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def accelerators() -> Iterator[Replicas]:
    """As ``replicas``, on simulated accelerators, which they share."""
    simulated.built()  # before their time limits begin
    pool = Replicas(simulated.begin)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def accelerator_groups() -> Iterator[Replicas]:
    """As ``accelerators``, with one for each task and a process group for them: as under NCCL."""
    simulated.built()
    pool = Replicas(simulated_group.begin)
    yield pool
    pool.close()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """The ports that a test has held for its tasks are anybody's."""
    commands.HELD.close()


@pytest.fixture
def no_segments_left() -> Iterator[None]:
    """A test that leaves nothing in shared memory."""
    with commands.nothing_left():
        yield
