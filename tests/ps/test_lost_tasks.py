"""Who dies, freezes or stays away does not keep the others: real processes, real signals."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from spartito.errors import TaskLostError, UserError
from spartito.ps.protocol.work import Lease, Pause
from spartito.ps.scheduler.local import LocalLink
from tests.collectives.group import Group, running
from tests.ps import coordination as co


@pytest.fixture
def group() -> Iterator[Group]:
    with running() as processes:
        yield processes


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], str]:
    caplog.set_level(logging.INFO, "spartito")
    return lambda: caplog.text


def test_work_of_a_killed_worker_goes_to_others(group: Group, warnings: Callable[[], str]) -> None:
    lost: list[tuple[int, Lease | None]] = []
    with co.serving(2, on_lost=lambda *who: lost.append(who)) as (coordinator, port):
        coordinator.open(0, co.plan())
        group.start(1, co.hold, port)
        group.result(1)
        group.signal(1, signal.SIGKILL)
        local = LocalLink(coordinator, 0)
        leases = co.work(local, 1)
        assert {lease.data_shard for lease in leases} == {0, 1}
        assert coordinator.sums(0, 0).sums == co.whole()
        co.eventually(lambda: [(who, bool(lease)) for who, lease in lost] == [(1, True)])
        assert "worker 1 is gone: its work goes to others" in warnings()
        assert coordinator.live() == [0]
        local.close()


def test_a_killed_worker_is_replaced_by_a_new_one(group: Group) -> None:
    with co.serving(2) as (coordinator, port):
        coordinator.open(0, co.plan())
        group.start(1, co.hold, port)
        group.result(1)
        group.signal(1, signal.SIGKILL)
        link = co.link(port, 1)
        co.work(link, 1)
        assert coordinator.sums(0, 0).sums == co.whole()
        link.close()


def test_a_frozen_worker_is_named_and_may_come_back(
    group: Group, warnings: Callable[[], str]
) -> None:
    lost: list[tuple[int, Lease | None]] = []
    options: dict[str, Any] = {"lease_seconds": 3.0, "on_lost": lambda *who: lost.append(who)}
    with co.serving(2, **options) as (coordinator, port):
        local = LocalLink(coordinator, 0)
        coordinator.open(0, co.plan())
        group.start(1, co.hold, port)
        id_, _ = group.result(1)
        group.signal(1, signal.SIGSTOP)
        co.eventually(lambda: 1 in [worker for worker, _ in lost])
        assert "worker 1 has not been heard of for 3 s: its work goes to others" in warnings()
        lease = local.take(0, 0, None)
        assert isinstance(lease, Lease)
        group.signal(1, signal.SIGCONT)
        co.eventually(lambda: "worker 1 is back" in warnings())
        group.tell(1)
        local.take(0, 0, co.report(lease), wait=False)
        local.close()  # what it has goes to the other
        done = group.result(1)
        assert done
        assert id_ not in done
        assert coordinator.sums(0, 0).sums == co.whole()


def test_a_frozen_workers_work_is_counted_once(group: Group) -> None:
    with co.serving(2, lease_seconds=1.0) as (coordinator, port):
        local = LocalLink(coordinator, 0)
        coordinator.open(0, co.plan())
        group.start(1, co.hold, port)
        group.result(1)
        group.signal(1, signal.SIGSTOP)
        co.work(local, 1)  # it waits for what the frozen one holds, and then does that too
        group.signal(1, signal.SIGCONT)
        group.tell(1)
        assert group.result(1) == []
        assert coordinator.sums(0, 0).sums == co.whole()
        local.close()


def test_a_group_goes_on_without_its_dead(group: Group) -> None:
    lost: list[tuple[int, Lease | None]] = []
    with (
        co.serving(2, expect_all=True, on_lost=lambda *who: lost.append(who)) as (
            coordinator,
            port,
        ),
        ThreadPoolExecutor(1) as threads,
    ):
        local = LocalLink(coordinator, 0)
        coordinator.open(0, co.plan(together=True))
        assert isinstance(local.take(0, 0, None, wait=False), Pause)
        group.start(1, co.hold, port)
        mine = threads.submit(local.take, 0, 0, None).result(co.LIMIT)
        _, theirs = group.result(1)
        assert isinstance(mine, Lease)
        assert mine.group == theirs > 0
        assert mine.sizes == (1, 1)
        group.signal(1, signal.SIGKILL)
        found = local.take(0, 0, co.report(mine))
        while isinstance(found, Lease):
            assert found.sizes == (found.stop - found.start,)
            found = local.take(0, 0, co.report(found))
        assert coordinator.sums(0, 0).sums == co.whole()
        co.eventually(lambda: [(who, what and what.group) for who, what in lost] == [(1, theirs)])
        local.close()


def test_nothing_is_given_out_before_all_have_come() -> None:
    with co.serving(3, expect_all=True, timeout=1.0) as (coordinator, port):
        local, link = LocalLink(coordinator, 0), co.link(port, 2)
        coordinator.open(0, co.plan())
        assert isinstance(link.take(0, 0, None, wait=False), Pause)
        with pytest.raises(TaskLostError, match="worker 1 did not come within 1 s"):
            local.take(0, 0, None)
        with pytest.raises(TaskLostError, match="worker 1 did not come within 1 s"):
            co.wait(coordinator, 0, 0)
        link.close()
        local.close()


def test_a_chief_does_not_wait_for_ever_for_workers() -> None:
    with co.serving(2, timeout=0.5) as (coordinator, _):
        coordinator.open(0, co.plan())
        with pytest.raises(TaskLostError, match="worker 0 and worker 1 is gone or did not come"):
            co.wait(coordinator, 0, 0)


def test_a_worker_that_beats_and_does_nothing_loses_its_lease(
    warnings: Callable[[], str],
) -> None:
    with co.serving(2, timeout=1.0) as (coordinator, port):
        local, link = LocalLink(coordinator, 0), co.link(port, 1)
        coordinator.open(0, co.plan())
        assert isinstance(link.take(0, 0, None), Lease)
        co.work(local, 1)
        assert coordinator.sums(0, 0).sums == co.whole()
        co.eventually(lambda: "worker 1 has not finished its work in 1 s" in warnings())
        assert coordinator.live() == [0, 1]
        link.close()
        local.close()


def test_a_worker_that_was_replaced_gets_an_error() -> None:
    with co.serving(2) as (coordinator, port):
        local = LocalLink(coordinator, 0)
        coordinator.open(0, co.plan())
        old = co.link(port, 1)
        first = old.take(0, 0, None)
        new = co.link(port, 1)
        second = new.take(0, 0, None)
        assert isinstance(first, Lease)
        assert isinstance(second, Lease)
        assert (first.data_shard, first.start) == (second.data_shard, second.start)
        with pytest.raises(UserError, match="another process has replaced worker 1"):
            old.take(0, 0, co.report(first))
        assert coordinator.held(0) == [(1, second)]
        for worker, why in ((0, "worker 0 is the chief itself"), (7, "worker 7 in a job of 2")):
            with pytest.raises(UserError, match=why):
                co.link(port, worker)
        for link in (old, new, local):
            link.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_chief_that_is_lost_is_named(group: Group, number: signal.Signals) -> None:
    group.start(0, co.lead)
    port = group.result(0)
    link = co.link(port, 1)
    assert isinstance(link.take(0, 0, None, wait=False), Pause)
    link._wire.timeout = 2.0
    group.signal(0, number)
    why = "is gone" if number == signal.SIGKILL else "did not reply within 2 s"
    with pytest.raises(TaskLostError, match=f"the chief {why}"):
        link.take(0, 0, None)
    link.close()


def test_an_error_while_the_loss_is_told_reaches_the_chief() -> None:
    def fail(worker: int, lease: Lease | None) -> None:
        raise TaskLostError(f"server 0 does not hear that {worker} is lost")

    with co.serving(2, on_lost=fail) as (coordinator, _):
        coordinator.open(0, co.plan())
        session = coordinator.enter(1)
        coordinator.leave(1, session, lost=True)
        coordinator.leave(1, session, lost=True)
        with pytest.raises(TaskLostError, match="server 0"):
            co.wait(coordinator, 0, 0)
