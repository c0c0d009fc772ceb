"""Workers of pytest, with ``--numprocesses``: they are forked once all tests are collected.

So nothing is imported or collected twice, and the processes that tests need are forked from what
is loaded here (`tests.processes`). Whichever worker is free takes the next group of tests: those of
one file, a few at a time where the file shares no fixture. Tests with replicas keep two cores busy
or more, and take twice as long where several share these; whole clusters have limits of time that
are right for a machine of their own. So few of either run at a time, beside tests that mostly wait.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from multiprocessing import get_context
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.process import BaseProcess
from typing import Any

import pytest
from _pytest._io import TerminalWriter

from tests import processes

AT_ONCE = 8
"""A group has so many tests, at most, where its file shares no fixture."""

CORES = len(os.sched_getaffinity(0))

CLUSTERS, COMPUTING, WAITING = "clusters", "computing", "waiting"
"""Kinds of tests: in containers or under Slurm; with replicas; all others."""

END_SECONDS = 60.0
"""Workers that are interrupted have so long to end what their tests have started."""

Begin = Callable[[int, int], object]


def add_option(parser: pytest.Parser) -> None:
    """Let pytest know the option."""
    parser.addoption("--numprocesses", type=int, default=0, help="run tests in workers")


def run(session: pytest.Session, begin: Begin, end: Callable[[], object]) -> bool | None:
    """Run all tests in workers, if that is asked for.

    Each calls ``begin(number, count)`` before its first test and ``end()`` after its last.
    """
    count = session.config.getoption("numprocesses")
    if not count or session.testsfailed or session.config.option.collectonly:
        return None
    Workers(session, count, begin, end).run()
    return True


def groups_of(items: Sequence[pytest.Item]) -> Iterator[range]:
    """Where in ``items`` those lie that one worker runs in a row."""
    end = 0
    for _, found in groupby(items, lambda item: item.path):
        those = list(found)
        size = len(those) if any(map(_shares, those)) else AT_ONCE
        start, end = end, end + len(those)
        yield from (range(first, min(first + size, end)) for first in range(start, end, size))


def _shares(item: pytest.Item) -> bool:
    """Whether a fixture outlives the test, but not its file."""
    info = getattr(item, "_fixtureinfo", None)
    fixtures = [one for found in info.name2fixturedefs.values() for one in found] if info else []
    return any(one.scope in ("class", "module", "package") for one in fixtures)


def kind_of(item: pytest.Item) -> str:
    """How a test uses the machine."""
    if any(item.iter_markers("docker")) or any(item.iter_markers("slurm")):
        return CLUSTERS
    return COMPUTING if "replicas" in getattr(item, "fixturenames", ()) else WAITING


@dataclass
class Worker:
    """A worker as its parent sees it, with the tests that it has still to run."""

    number: int
    process: BaseProcess
    pipe: Connection
    left: deque[int] = field(default_factory=deque)
    kind: str = ""


class Workers:
    """All workers of a session, and the groups of tests that none of them has taken yet."""

    def __init__(self, session: pytest.Session, count: int, *around: Callable[..., object]) -> None:
        self._session, self._count, self._around = session, count, around
        self._groups = {kind: deque[range]() for kind in (CLUSTERS, COMPUTING, WAITING)}
        for group in groups_of(session.items):
            kinds = {kind_of(session.items[n]) for n in group}
            self._groups[next(kind for kind in self._groups if kind in kinds)].append(group)
        self._workers: list[Worker] = []

    def run(self) -> None:
        """Run all groups; raises as pytest's own loop where that ends early."""
        if reporter := self._session.config.pluginmanager.getplugin("terminalreporter"):
            reporter.showfspath = False  # tests of several files alternate
        if any(kind_of(item) == COMPUTING for item in self._session.items):
            processes.preload()
        try:
            for number in range(self._count):
                self._start(number)
            while self._workers:
                self._listen(None)
                if self._session.shouldfail:
                    raise self._session.Failed(self._session.shouldfail)
                if self._session.shouldstop:
                    raise self._session.Interrupted(self._session.shouldstop)
        finally:
            self._interrupt()

    def _start(self, number: int, left: Sequence[int] = ()) -> None:
        ours, theirs = Pipe()
        others = [ours, *(worker.pipe for worker in self._workers)]
        task = Task(self._session, theirs, others)
        work = get_context("fork").Process(
            target=task.run, args=(number, self._count, *self._around), name=f"worker {number}"
        )
        work.start()
        theirs.close()
        self._workers.append(Worker(number, work, ours, deque(left)))

    def _listen(self, timeout: float | None) -> bool:
        """Hear what workers say; whether any did in time."""
        ready = wait([worker.pipe for worker in self._workers], timeout)
        for worker in [worker for worker in self._workers if worker.pipe in ready]:
            try:
                said, *words = worker.pipe.recv()
                getattr(self, f"_{said}")(worker, *words)
            except (EOFError, ConnectionError):
                self._ended(worker)
        return bool(ready)

    def _free(self, worker: Worker) -> None:
        """Give a worker its next group; it ends where none may run now."""
        if not worker.left:
            worker.kind = ""
            busy = Counter(one.kind for one in self._workers)
            most = {CLUSTERS: CORES, WAITING: self._count}
            most[COMPUTING] = max(1, CORES // 2) if self._groups[WAITING] else CORES
            for kind, groups in self._groups.items():
                if groups and busy[kind] < most[kind]:
                    worker.kind = kind
                    worker.left.extend(groups.popleft())
                    break
        worker.pipe.send(list(worker.left))

    def _report(self, _: Worker, told: dict[str, Any]) -> None:
        hook = self._session.config.hook
        report = hook.pytest_report_from_serializable(config=self._session.config, data=told)
        hook.pytest_runtest_logreport(report=report)

    def _ran(self, worker: Worker) -> None:
        item = self._session.items[worker.left.popleft()]
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)

    def _broke(self, worker: Worker, text: str) -> None:
        raise RuntimeError(f"{worker.process.name} cannot go on:\n{text}")

    def _ended(self, worker: Worker) -> None:
        """Another worker does what is left, after the test with which this one ended."""
        worker.process.join()
        worker.pipe.close()
        self._workers.remove(worker)
        code = worker.process.exitcode
        if not worker.left and not code:
            return
        if not worker.left:
            raise RuntimeError(f"{worker.process.name} ended between two tests: exit code {code}")
        item = self._session.items[worker.left.popleft()]
        report = pytest.TestReport(
            *(item.nodeid, item.location, {}, "failed"),
            *(f"{worker.process.name} ended here with exit code {code}", "call"),
        )
        item.ihook.pytest_runtest_logreport(report=report)
        self._start(worker.number, worker.left)

    def _interrupt(self) -> None:
        """End all workers, each after what its test has to tear down."""
        for worker in self._workers:
            worker.left.clear()
            if worker.process.pid is not None and worker.process.is_alive():
                os.kill(worker.process.pid, signal.SIGINT)
        end = time.monotonic() + END_SECONDS
        for worker in self._workers:
            worker.process.join(max(0.0, end - time.monotonic()))
            worker.process.kill()
            worker.process.join()
            worker.pipe.close()


class Terminal:
    """What plugins write to the terminal, as pytest-timeout does, is output of their test."""

    @property
    def _tw(self) -> TerminalWriter:
        return TerminalWriter(sys.stderr)


class Task:
    """What runs in a worker."""

    def __init__(
        self, session: pytest.Session, parent: Connection, others: Sequence[Connection]
    ) -> None:
        self._session, self._parent, self._others = session, parent, others

    def run(self, number: int, count: int, begin: Begin, end: Callable[[], object]) -> None:
        """Run groups of tests until there are no more."""
        os.setpgid(0, 0)  # Ctrl-C is for the parent, which tells us once
        for other in self._others:
            other.close()
        begin(number, count)
        config = self._session.config
        manager = config.pluginmanager
        manager.unregister(name="terminalreporter")
        manager.register(Terminal(), "terminalreporter")
        manager.register(self)
        factory = config._tmp_path_factory  # type: ignore[attr-defined]
        factory._basetemp = factory.mktemp(f"worker{number}")
        if capture := manager.getplugin("capturemanager"):
            capture.stop_global_capturing()  # into files that all workers share
            capture.start_global_capturing()
            processes.log_to_stderr()
        processes.fork_server()
        if capture:
            capture.suspend_global_capture()
        try:
            try:
                self._loop()
            finally:
                self._session._setupstate.teardown_exact(None)
        except (KeyboardInterrupt, EOFError, BrokenPipeError):
            pass  # the parent ends, or has ended
        except Exception:  # of pytest or a plugin, for what a test raises is in its report
            self._parent.send(("broke", traceback.format_exc()))
        finally:
            end()

    def _loop(self) -> None:
        items, session = self._session.items, self._session
        while True:
            self._parent.send(("free",))
            group = self._parent.recv()
            if not group:
                return
            for number, following in zip(group, [*group[1:], None], strict=True):
                nextitem = session if following is None else items[following]
                items[number].ihook.pytest_runtest_protocol(item=items[number], nextitem=nextitem)
                self._parent.send(("ran",))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Tell the parent."""
        config = self._session.config
        told = config.hook.pytest_report_to_serializable(config=config, report=report)
        self._parent.send(("report", told))
