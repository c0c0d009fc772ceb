"""Pushes of many workers become the updates that the rules say, in threads as on a server."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from queue import Empty, Queue
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from spartito.errors import SpartitoError
from spartito.ps.layout import Span
from spartito.ps.messages import Push
from spartito.ps.shard import Shard
from spartito.ps.store import Rules, Store
from spartito.ps.vector import Copies, Vector

LIMIT = 60.0  # seconds that no passing test comes near
SIZE = 8
ZEROS = torch.zeros(SIZE, dtype=torch.float64)


class Bench:
    """A store with one parameter of eight doubles, all zero, and a buffer that counts."""

    def __init__(
        self, rules: Rules, *, gates: bool = True, kind: type[Optimizer] = SGD, **options: Any
    ) -> None:
        model = nn.Module()
        self.weight = nn.Parameter(ZEROS.clone())
        self.other = nn.Parameter(ZEROS.clone())
        model.weight, model.other = self.weight, self.other
        model.register_buffer("count", torch.tensor(0))
        make: Any = kind
        optimizer = make([self.weight, self.other], **({"lr": 1.0} | options))
        vector = Vector(model, optimizer)
        span = Span(0, vector.layout.size)
        shard = Shard(vector.layout, span, optimizer, vector.tensors)
        self.store = Store(shard, rules, gates=gates, log=None)
        self.store.ready = True
        self._copies = Copies(vector, span, shard.values)
        self._model = model

    def push(self, worker: int, push: Push, *numbers: float) -> str:
        """The gradient of the first parameter is ``numbers``; the other has none."""
        gradient = torch.zeros_like(self.store.shard.values)
        gradient[: 8 * SIZE].view(torch.float64)[: len(numbers)] = torch.tensor(
            numbers, dtype=torch.float64
        )
        gradient[-64:-56].view(torch.int64)[0] = 1
        with self.store.turn:
            return self.store.push(worker, push, gradient)[0]

    def values(self) -> list[float]:
        """The first parameter, as far as it is not zero."""
        self._copies.load()
        assert not self.other.any()
        found = [float(number) for number in self.weight.detach()]
        while found and found[-1] == 0:
            found.pop()
        return found

    @property
    def count(self) -> int:
        """What the buffer counted."""
        self._copies.load()
        return int(self._model.count)  # type: ignore[arg-type]

    def numbers(self) -> tuple[int, int, int, int]:
        """Updates, pushes, pieces, examples."""
        store = self.store
        return store.version, store.pushes, store.pieces, store.examples


def push(step: int, part: int = 0, /, **facts: Any) -> Push:
    given: dict[str, Any] = {
        "keys": [(1, 0, step, part)], "pulled": 0, "weight": 1.0, "examples": 4,
        "absent": [1], "settings": None,
    }  # fmt: skip
    return Push(**(given | facts))


@contextmanager
def threads(count: int = 8) -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(count) as pool:
        yield pool


def results(futures: Sequence[Future[str]]) -> list[str]:
    return [future.result(LIMIT) for future in futures]


# One push, one update


def test_every_push_is_an_update_and_works_once() -> None:
    bench = Bench(Rules(2))
    assert bench.push(0, push(0, 0), 1.0) == "applied"
    assert bench.push(1, push(0, 1, examples=3), 2.0, 5.0) == "applied"
    assert bench.push(0, push(0, 1), 100.0) == "duplicate"
    assert bench.values() == [-3.0, -5.0]
    assert bench.count == 2
    assert bench.numbers() == (2, 2, 2, 7)
    assert bench.store.duplicates == 1
    assert bench.store.staleness.to_dict() == {"0": 1, "1": 1}
    assert bench.store.applied((1, 0, 0, 1))
    assert not bench.store.applied((1, 0, 1, 1))


def test_a_push_of_several_pieces_counts_them_all() -> None:
    bench = Bench(Rules(2))
    keys = [(1, 0, step, 1) for step in range(3)]
    assert bench.push(1, push(0, keys=keys, examples=12), 1.0) == "applied"
    assert bench.push(0, push(2, 1), 1.0) == "duplicate"
    assert bench.numbers() == (1, 1, 3, 12)


def test_a_dropped_push_counts_and_changes_nothing() -> None:
    bench = Bench(Rules(1))
    assert bench.push(0, push(0, dropped=True), float("nan")) == "applied"
    assert bench.values() == []
    assert bench.numbers() == (0, 1, 1, 4)
    assert bench.store.dropped == 1
    assert bench.push(0, push(0), 1.0) == "duplicate"


def test_new_options_hold_from_their_push_on() -> None:
    bench = Bench(Rules(1))
    bench.push(0, push(0), 1.0)
    bench.push(0, push(1, settings=[{"lr": 0.5}]), 1.0)
    bench.push(0, push(2), 1.0)
    assert bench.values() == [-2.0]


# Stale pushes


@pytest.mark.parametrize(("limit", "expected"), [(1, -(1 + 1 + 2 / 3 + 2 / 4)), (3, -4.0)])
def test_a_stale_push_moves_less_far(limit: int, expected: float) -> None:
    bench = Bench(Rules(1, limit, "compensate"))
    for step in range(4):
        assert bench.push(0, push(step), 1.0) == "applied"
    assert bench.values() == pytest.approx([expected], rel=1e-12)
    assert bench.store.shard.optimizer.param_groups[0]["lr"] == 1.0


def test_a_push_beyond_the_bound_is_refused_until_it_is_fresh() -> None:
    bench = Bench(Rules(1, 1, "reject"))
    assert [bench.push(0, push(step), 1.0) for step in range(3)] == ["applied", "applied", "stale"]
    assert bench.values() == [-2.0]
    assert not bench.store.applied((1, 0, 2, 0))
    assert bench.store.refused == 1
    assert bench.push(0, push(2, pulled=1), 1.0) == "applied"
    assert bench.store.staleness.max == 1


# Several pushes, one update


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(-8, 8), st.sampled_from([1.0, 2.0, 5.0])), max_size=9),
    st.integers(2, 4),
)
def test_pushes_are_put_together_by_weight(pushes: list[tuple[int, float]], size: int) -> None:
    bench = Bench(Rules(1, aggregate=size))
    expected = 0.0
    for start in range(0, len(pushes), size):
        part = pushes[start : start + size]
        for step, (number, weight) in enumerate(part, start):
            assert bench.push(0, push(step, weight=weight), float(number)) == "applied"
            assert bench.push(0, push(step, weight=weight), 99.0) == "duplicate"
        if len(part) < size:
            assert bench.numbers()[:3] == (start // size, start, start)
            with bench.store.turn:
                bench.store.flush()
        expected -= sum(number * weight for number, weight in part) / sum(w for _, w in part)
        assert sum(bench.values()) == pytest.approx(expected, rel=1e-12, abs=1e-12)
    updates = -(-len(pushes) // size)
    assert bench.numbers() == (updates, len(pushes), len(pushes), 4 * len(pushes))
    assert bench.count == updates
    with bench.store.turn:
        bench.store.flush()
    assert bench.store.version == updates


def test_what_waits_to_be_put_together_is_not_in_a_snapshot() -> None:
    bench = Bench(Rules(1, aggregate=2))
    for step in range(3):
        bench.push(0, push(step), 1.0)
    assert bench.store.applied((1, 0, 2, 0))
    fresh = Bench(Rules(1, aggregate=2)).store
    fresh.restore(*bench.store.dump())
    assert [fresh.applied((1, 0, step, 0)) for step in range(3)] == [True, True, False]


def test_an_entry_is_absent_from_a_mean_if_it_is_from_all() -> None:
    bench = Bench(Rules(1, aggregate=2), momentum=0.5)
    bench.push(0, push(0, absent=[]), 4.0)
    bench.push(0, push(1, absent=[0, 1]))
    assert bench.values() == [-2.0]
    bench.push(0, push(2, absent=[0, 1]))
    bench.push(0, push(3, absent=[0, 1]))
    assert bench.values() == [-2.0]  # momentum would have moved it


# Rounds: one push of every member makes an update


@settings(deadline=None, max_examples=40)
@given(
    rounds=st.lists(
        st.lists(
            st.tuples(
                st.integers(-8, 8),
                st.sampled_from([1.0, 3.0]),
                st.sampled_from(["push", "push", "push", "drop", "die", "push and die"]),
            ),
            min_size=3,
            max_size=3,
        ),
        max_size=5,
    )
)
def test_a_round_is_the_mean_of_who_came(rounds: list[list[tuple[int, float, str]]]) -> None:
    bench = Bench(Rules(3, 0))
    live, expected, pieces = {0, 1, 2}, 0.0, 0
    with threads() as pool:
        for index, members in enumerate(rounds):
            here = [(w, *members[w]) for w in sorted(live)]
            coming = [
                pool.submit(
                    bench.push,
                    worker,
                    push(index, worker, weight=weight, group=1, index=index, parties=3,
                         dropped=what == "drop"),
                    float(number),
                )
                for worker, number, weight, what in here
                if what != "die"
            ]  # fmt: skip
            for worker, _, _, what in here:
                if what == "die":
                    live.discard(worker)
                    with bench.store.turn:
                        bench.store.lose(worker, 1, len(rounds))
            assert set(results(coming)) <= {"applied"}
            good = [(number, weight) for _, number, weight, what in here if what[:4] == "push"]
            if good:
                expected -= sum(n * w for n, w in good) / sum(w for _, w in good)
            assert sum(bench.values()) == pytest.approx(expected, rel=1e-12, abs=1e-12)
            pieces += len(coming)
            assert bench.numbers()[1:] == (pieces, pieces, 4 * pieces)
            for worker, _, _, what in here:
                if what == "push and die":
                    live.discard(worker)
                    with bench.store.turn:
                        bench.store.lose(worker, 1, len(rounds))
            if not live:
                break
    assert set(bench.store.staleness.to_dict()) <= {"0"}


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with threads() as made:
        yield made


def round_of(worker: int, step: int = 0, group: int = 1, **facts: Any) -> Push:
    return push(step, worker, group=group, index=step, parties=2, **facts)


def waits_in(bench: Bench, worker: int) -> bool:
    """Whether the push of this worker is in a round that waits for others."""
    return any(worker in mean.came for mean in bench.store._rounds.values())


def wait_until(bench: Bench, true: Callable[[], bool]) -> None:
    """Until a thread of the test has come as far as this; a limit instead of a hang."""
    with bench.store.turn:
        for _ in range(int(LIMIT * 100)):
            if true():
                return
            bench.store.turn.wait(0.01)
    raise AssertionError("it did not come to this in time")


def test_a_push_that_is_said_again_counts_once_in_its_round(pool: ThreadPoolExecutor) -> None:
    bench = Bench(Rules(2, 0))
    first = pool.submit(bench.push, 0, round_of(0), 4.0)
    wait_until(bench, lambda: waits_in(bench, 0))
    again = pool.submit(bench.push, 0, round_of(0), 4.0)  # by a new connection
    wait_until(bench, lambda: bench.store.duplicates == 1)
    assert bench.push(1, round_of(1), 2.0) == "applied"
    assert results([first, again]) == ["applied", "duplicate"]
    assert bench.values() == [-3.0]
    assert bench.numbers() == (1, 2, 2, 8)


def test_a_push_that_is_said_again_after_its_round_waits_for_nobody(
    pool: ThreadPoolExecutor,
) -> None:
    bench = Bench(Rules(2, 0))
    first = pool.submit(bench.push, 0, round_of(0), 4.0)
    bench.push(1, round_of(1), 2.0)
    assert results([first]) == ["applied"]
    assert results([pool.submit(bench.push, 0, round_of(0), 4.0)]) == ["duplicate"]
    assert bench.values() == [-3.0]
    later = pool.submit(bench.push, 0, round_of(0, 1), 1.0)
    bench.push(1, round_of(1, 1), 1.0)
    assert results([later]) == ["applied"]
    assert bench.values() == [-4.0]


def test_another_stream_has_groups_of_the_same_numbers(pool: ThreadPoolExecutor) -> None:
    bench = Bench(Rules(2, 0))
    for stream in (1, 2):
        keys = [[(stream, 0, 0, worker)] for worker in range(2)]
        first = pool.submit(bench.push, 0, round_of(0, keys=keys[0]), 4.0)
        assert bench.push(1, round_of(1, keys=keys[1]), 2.0) == "applied"
        assert results([first]) == ["applied"]
    assert bench.values() == [-6.0]


def test_known_pieces_make_up_a_round_with_unknown_ones(pool: ThreadPoolExecutor) -> None:
    """As when another server has forgotten some of them, and all is computed again."""
    bench = Bench(Rules(2, 0))
    with bench.store.turn:
        bench.store.lose(1, 1, 1)
    assert bench.push(0, round_of(0), 4.0) == "applied"
    known = pool.submit(bench.push, 0, round_of(0, group=2), 99.0)
    assert bench.push(1, round_of(1, group=2), 2.0) == "applied"
    assert results([known]) == ["duplicate"]
    assert bench.values() == [-6.0]
    assert bench.numbers() == (2, 2, 2, 8)


def test_who_was_given_up_is_told_that_the_others_went_on(pool: ThreadPoolExecutor) -> None:
    bench = Bench(Rules(2, 0))
    waiting = pool.submit(bench.push, 0, round_of(0), 4.0)
    with bench.store.turn:
        bench.store.lose(1, 1, 3)
    assert results([waiting]) == ["applied"]
    assert bench.push(1, round_of(1), 2.0) == "expired"
    assert bench.values() == [-4.0]
    assert not bench.store.applied((1, 0, 0, 1))


def test_who_has_no_piece_in_a_round_is_not_missed(pool: ThreadPoolExecutor) -> None:
    bench = Bench(Rules(3, 0))
    with bench.store.turn:
        bench.store.lose(2, 1, 1)  # its lease had one piece: the second round never was its
    waiting = pool.submit(bench.push, 0, round_of(0, 1), 4.0)
    wait_until(bench, lambda: waits_in(bench, 0))
    assert not waiting.done()
    assert bench.push(1, round_of(1, 1), 2.0) == "applied"
    assert results([waiting]) == ["applied"]
    assert bench.values() == [-3.0]


def test_the_mean_of_a_round_is_clipped() -> None:
    bench = Bench(Rules(1, 0, clip_norm=1.0))
    assert bench.push(0, push(0, group=1, parties=1), 3.0, 4.0) == "applied"
    assert bench.values() == pytest.approx([-0.6, -0.8], rel=1e-6)


# The gate


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
                with store.turn:
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
                status = self.bench.push(worker, push(step, pulled=pulled, dropped=dropped), 1.0)
                if status != "applied":
                    self.problems.append(f"a push of worker {worker} is {status}")
        finally:
            with store.turn:
                store.release(worker)
            self.done.put(worker)


@settings(deadline=None, max_examples=40)
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
            with bench.store.turn:
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
        with store.turn:
            store.admit(worker)
        return "admitted"

    for worker in (0, 1):
        assert admit(worker) == "admitted"
    bench.push(0, push(0), 1.0)
    waiting = pool.submit(admit, 0)
    wait_until(bench, lambda: 0 in store._asked)
    with store.turn:
        store.lose(0, 0, 0)
    bench.push(1, push(1), 1.0)
    assert results([waiting]) == ["admitted"]


def test_a_worker_that_comes_again_takes_the_place_of_its_old_self(
    pool: ThreadPoolExecutor,
) -> None:
    bench = Bench(Rules(2, 1))
    store = bench.store

    def admit(worker: int) -> str:
        with store.turn:
            try:
                store.admit(worker)
            except SpartitoError as error:
                return str(error)
        return "admitted"

    admit(0)
    admit(1)
    bench.push(0, push(0), 1.0)
    old = pool.submit(admit, 0)
    wait_until(bench, lambda: len(store._asked) == 2)
    before = store._asked[0]
    new = pool.submit(admit, 0)
    wait_until(bench, lambda: store._asked[0] is not before)
    bench.push(1, push(1), 1.0)
    assert results([new]) == ["admitted"]
    assert "come again" in results([old])[0]
    assert bench.push(0, push(2, pulled=2), 1.0) == "applied"


def test_who_was_given_up_at_the_gate_computes_again() -> None:
    bench = Bench(Rules(1, 1))
    with bench.store.turn:
        bench.store.admit(0)
        bench.store.lose(0, 0, 0)
    assert bench.push(0, push(0), 1.0) == "stale"
    assert bench.values() == []
    with bench.store.turn:
        bench.store.admit(0)
    assert bench.push(0, push(0), 1.0) == "applied"


def test_a_failure_ends_all_waits(pool: ThreadPoolExecutor) -> None:
    bench = Bench(Rules(2, 0))
    waiting = pool.submit(bench.push, 0, round_of(0), 4.0)
    wait_until(bench, lambda: waits_in(bench, 0))
    with bench.store.turn:
        bench.store.fail(SpartitoError("the disk is full"))
    with pytest.raises(SpartitoError, match="the disk is full"):
        waiting.result(LIMIT)


# What a restarted server knows


@pytest.mark.parametrize(("kind", "options"), [(SGD, {"momentum": 0.9}), (Adam, {"lr": 0.1})])
@pytest.mark.parametrize("rules", [Rules(2), Rules(2, aggregate=2), Rules(2, 2, "compensate")])
def test_a_restored_store_goes_on_with_the_same_bits(
    kind: type[Optimizer], options: dict[str, Any], rules: Rules
) -> None:
    one, other = (Bench(rules, kind=kind, **options) for _ in range(2))
    one.store.job = "ours"
    one.push(0, push(0, settings=[{"lr": 0.3}]), 0.1, 0.7)
    one.push(1, push(0, 1, dropped=True))
    one.push(1, push(1, 1), 0.3)
    one.push(0, push(0), 0.3)
    one.store.lost = 5
    tensors, about = one.store.dump()
    before: dict[str, Tensor] = {name: tensor.clone() for name, tensor in tensors.items()}
    other.store.ready = False
    other.store.restore(tensors, about)
    assert other.store.ready
    assert other.store.job == "ours"
    assert other.numbers() == one.numbers()
    assert other.store.staleness == one.store.staleness
    for name in ("duplicates", "dropped", "refused", "lost"):
        assert getattr(other.store, name) == getattr(one.store, name)
    for step in range(2, 6):
        for bench in (one, other):
            assert bench.push(0, push(step, pulled=step - 1), 0.1 * step, -1.0) == "applied"
            assert bench.push(0, push(1, 1), 5.0) == "duplicate"
        assert torch.equal(one.store.shard.values, other.store.shard.values)
    again = one.store.dump()[0]
    assert before.keys() == again.keys()
    assert not torch.equal(before["values"], again["values"])  # it was a copy


def test_another_job_begins_with_nothing_known() -> None:
    bench = Bench(Rules(1, 1))
    with bench.store.turn:
        bench.store.begin("first")
        bench.store.admit(0)
    bench.push(0, push(0), 1.0)
    with bench.store.turn:
        bench.store.begin("first")  # other values for the same job
    assert bench.numbers() == (1, 1, 1, 4)
    with bench.store.turn:
        bench.store.admit(0)
        bench.store.begin("second")
    assert bench.numbers() == (0, 0, 0, 0)
    assert not bench.store.applied((1, 0, 0, 0))
    assert bench.store.staleness.total == 0
    assert bench.push(0, push(0), 1.0) == "stale"  # it pulled in the other job
