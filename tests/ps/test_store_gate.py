"""The gate: who may pull, so that no push gets staler than the bound."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from queue import Empty, Queue
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spartito.errors import SpartitoError
from spartito.ps.protocol.messages import Outcome
from spartito.ps.protocol.rules import Rules
from tests.ps.bench import Bench, push, results, round_of, wait_until, waits_in

LIMIT = 60.0  # seconds that no passing test comes near


class Crowd:
    """Workers as threads that pull and wait until the test has them push or die."""

    def __init__(self, bench: Bench, workers: int, pushes: int) -> None:
        self.bench, self.pushes = bench, pushes
        self.holding: Queue[tuple[int, threading.Event, list[str]]] = Queue()
        self.done: Queue[int] = Queue()
        self.problems: list[str] = []
        self._steps = iter(range(10_000))
        self.threads = [self._start(worker) for worker in range(workers)]

    def _start(self, worker: int) -> threading.Thread:
        thread = threading.Thread(target=self._work, args=(worker,), daemon=True)
        thread.start()
        return thread

    def _work(self, worker: int) -> None:
        store = self.bench.store
        try:
            for _ in range(self.pushes):
                with store.lock:
                    store.admit(worker)
                    pulled, step = store.version, next(self._steps)
                told: list[str] = []
                event = threading.Event()
                self.holding.put((worker, event, told))
                if not event.wait(LIMIT):
                    self.problems.append(f"worker {worker} was forgotten by the test")
                if told == ["die"]:
                    return
                dropped = told == ["drop"]
                outcome = self.bench.push(worker, push(step, pulled=pulled, dropped=dropped), 1.0)
                if outcome is not Outcome.APPLIED:
                    self.problems.append(f"a push of worker {worker} is {outcome}")
        finally:
            with store.lock:
                store.release(worker)
            self.done.put(worker)


@settings(max_examples=40)
@given(
    limit=st.integers(1, 4),
    workers=st.integers(1, 5),
    choices=st.lists(
        st.tuples(st.integers(0, 4), st.sampled_from(["push", "push", "push", "drop", "die"])),
        max_size=25,
    ),
)
def test_slow_and_dying_workers_keep_the_bound_and_nobody_waits_for_ever(
    limit: int, workers: int, choices: list[tuple[int, str]]
) -> None:
    bench = Bench(Rules(workers, limit))
    crowd = Crowd(bench, workers, pushes=5)
    waiting: list[tuple[int, threading.Event, list[str]]] = []
    ended = pushed = 0
    script = iter(choices)
    while ended < workers:
        if not waiting:
            # Somebody must come to hold values, or all are through: else a thread waits for ever.
            while ended < workers and not waiting:
                ended += take_all(crowd.done)
                waiting += take_some(crowd.holding)
            continue
        waiting += take_some(crowd.holding, 0.0)
        which, what = next(script, (0, "push"))
        worker, event, told = waiting.pop(which % len(waiting))
        told.append(what)
        pushed += what == "push"
        event.set()
        if what == "die":  # the chief finds out
            with bench.store.lock:
                bench.store.lose(worker, 0, 0)
    for thread in crowd.threads:
        thread.join(LIMIT)
        assert not thread.is_alive()
    assert crowd.problems == []
    assert bench.store.staleness.max <= limit
    assert bench.store.staleness.total == pushed == bench.store.version


def take_some(queue: Queue[Any], seconds: float = 0.02) -> list[Any]:
    with suppress(Empty):
        return [queue.get(timeout=seconds) if seconds else queue.get_nowait()]
    return []


def take_all(queue: Queue[Any]) -> int:
    count = 0
    while take_some(queue, 0.0):
        count += 1
    return count


def test_who_waits_is_let_in_though_it_was_given_up_meanwhile(pool: ThreadPoolExecutor) -> None:
    """A frozen worker that waits for values goes on when it is back."""
    bench = Bench(Rules(2, 1))
    store = bench.store

    def admit(worker: int) -> str:
        with store.lock:
            store.admit(worker)
        return "admitted"

    for worker in (0, 1):
        assert admit(worker) == "admitted"
    bench.push(0, push(0), 1.0)
    first = store._asked[0]
    waiting = pool.submit(admit, 0)
    wait_until(bench, lambda: store._asked[0] is not first)
    with store.lock:
        store.lose(0, 0, 0)
    bench.push(1, push(1), 1.0)
    assert results([waiting]) == ["admitted"]


def test_a_worker_that_comes_again_replaces_its_old_self(
    pool: ThreadPoolExecutor,
) -> None:
    bench = Bench(Rules(2, 1))
    store = bench.store

    def admit(worker: int) -> str:
        with store.lock:
            try:
                store.admit(worker)
            except SpartitoError as error:
                return str(error)
        return "admitted"

    admit(0)
    admit(1)
    bench.push(0, push(0), 1.0)
    first = store._asked[0]
    old = pool.submit(admit, 0)
    wait_until(bench, lambda: store._asked[0] is not first)
    before = store._asked[0]
    new = pool.submit(admit, 0)
    wait_until(bench, lambda: store._asked[0] is not before)
    bench.push(1, push(1), 1.0)
    assert results([new]) == ["admitted"]
    assert "come again" in results([old])[0]
    assert bench.push(0, push(2, pulled=2), 1.0) == Outcome.APPLIED


def test_who_was_given_up_at_the_gate_computes_again() -> None:
    bench = Bench(Rules(1, 1))
    with bench.store.lock:
        bench.store.admit(0)
        bench.store.lose(0, 0, 0)
    assert bench.push(0, push(0), 1.0) == Outcome.STALE
    assert bench.values() == []
    with bench.store.lock:
        bench.store.admit(0)
    assert bench.push(0, push(0), 1.0) == Outcome.APPLIED


def test_a_failure_ends_all_waits(pool: ThreadPoolExecutor) -> None:
    bench = Bench(Rules(2, 0))
    waiting = pool.submit(bench.push, 0, round_of(0), 4.0)
    wait_until(bench, lambda: waits_in(bench, 0))
    with bench.store.lock:
        bench.store.fail(SpartitoError("the disk is full"))
    with pytest.raises(SpartitoError, match="the disk is full"):
        waiting.result(LIMIT)
