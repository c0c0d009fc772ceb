"""Work reaches the workers over real sockets, and outlives those who die, freeze or stray."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from spartito.collectives.membership.versions import Versions
from spartito.errors import SpartitoError, TaskLostError, UserError
from spartito.ps.client.work_source import WorkerLink
from spartito.ps.protocol.work import (
    MAX_PUBLISHED,
    PURPOSE,
    Complete,
    Heartbeat,
    Hello,
    Lease,
    Pause,
    Refused,
    Report,
    Take,
    Totals,
    ToWorker,
)
from spartito.ps.scheduler.coordinator import Coordinator
from spartito.ps.scheduler.local import LocalLink
from spartito.ps.scheduler.queue import WorkRange
from spartito.steps.servers.leased_batches import NO_EPOCH
from spartito.wire.frames import Wire
from tests.callers import call
from tests.ps import coordination as co

HELLO = Hello(1, Versions.own())


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], str]:
    caplog.set_level(logging.INFO, "spartito")
    return lambda: caplog.text


def test_a_chief_that_works_alone() -> None:
    with co.serving(1) as (coordinator, _):
        local = LocalLink(coordinator, 0)
        coordinator.open(0, co.plan(epochs=2))
        leases = co.work(local, 2)
        assert {lease.epoch for lease in leases} == {0, 1}
        assert coordinator.sums(0, 1) == Totals(co.whole(), 40, 2, 20)
        assert coordinator.frontier(0) == (2, 0)
        local.close()


def test_another_order_of_a_pass_ends_the_job_and_no_batch_is_no_order() -> None:
    with co.serving(2) as (coordinator, port):
        local, link = LocalLink(coordinator, 0), co.link(port, 1)
        coordinator.open(0, co.plan())
        found = [link.take(0, 0, None), local.take(0, 0, None)]
        for drawn in (0, 5, 5, 0):  # both in turn; the first has found no batch
            source = (link, local)[len(found) % 2]
            lease = found[-2]
            assert isinstance(lease, Lease)
            found.append(source.take(0, 0, co.report(lease, drawn=drawn)))
            coordinator.check()
        lease = found[-2]
        assert isinstance(lease, Lease)
        link.take(0, 0, co.report(lease, drawn=7), wait=False)
        with pytest.raises(UserError, match=r"worker 1 has trained on other .* worker 0"):
            coordinator.check()
        link.close()
        local.close()


@pytest.mark.parametrize("options", [{}, {"gated": True}, {"together": True}])
def test_workers_and_chief_share_the_epochs(options: dict[str, Any]) -> None:
    with (
        co.serving(3, expect_all=True) as (coordinator, port),
        ThreadPoolExecutor(3) as threads,
    ):
        links = [LocalLink(coordinator, 0), co.link(port, 1), co.link(port, 2)]
        coordinator.open(0, co.plan(data_shards=3, epochs=3, **options))
        running = [threads.submit(co.work, link, 3) for link in links]
        for epoch in range(3):
            assert co.wait(coordinator, 0, epoch).sums == co.whole(data_shards=3)
            coordinator.close_epoch(0, epoch)
        leases = [future.result(co.LIMIT) for future in running]
        if options == {"together": True}:
            steps = [[(x.pass_, x.start, x.stop, x.group) for x in found] for found in leases]
            assert steps[0] == steps[1] == steps[2]
        assert isinstance(links[1], WorkerLink)
        assert min(links[1].sent, links[1].received) > 0
        for link in links:
            link.close()


def test_timetables_and_published_values_reach_the_workers() -> None:
    with co.serving(2) as (coordinator, port), ThreadPoolExecutor(1) as threads:
        link = co.link(port, 1)
        assert link.timetable == b""
        early = threads.submit(link.published, 3)
        coordinator.timetable = b"0.1"
        large = b"history" * 100_000
        coordinator.key_values.publish(3, large)
        assert early.result(co.LIMIT) == large
        for timetable in (b"0.1", b"0.1", b"0.05", large, b""):
            coordinator.timetable = timetable
            assert isinstance(link.take(0, 0, None, wait=False), Pause)
            assert link.timetable == timetable
        with pytest.raises(ValueError, match="more than"):
            coordinator.key_values.publish(4, bytes(MAX_PUBLISHED + 1))
        link.close()
        link.close()


def test_a_stream_that_is_stopped_early() -> None:
    with co.serving(2) as (coordinator, port):
        link = co.link(port, 1)
        coordinator.open(0, co.plan(epochs=9))
        lease = link.take(0, 0, None)
        assert isinstance(lease, Lease)
        coordinator.end_stream(0)
        assert link.take(0, 0, co.report(lease)) == Complete(0, stop=True)
        assert co.wait(coordinator, 0, 8).work_items == 0
        assert coordinator.sums(0, 0).work_items == lease.stop - lease.start
        link.close()


def test_a_group_that_was_granted_before_the_stop_is_done_by_all() -> None:
    """Worker 1 hears of its lease after the stop; worker 0 waits for its pushes."""
    with co.serving(2, expect_all=True) as (coordinator, port):
        local, link = LocalLink(coordinator, 0), co.link(port, 1)
        coordinator.open(0, co.plan(together=True))
        assert isinstance(link.take(0, 0, None, wait=False), Pause)
        mine = local.take(0, 0, None)
        coordinator.end_stream(0)
        theirs = link.take(0, 0, None)
        assert isinstance(mine, Lease)
        assert isinstance(theirs, Lease)
        assert theirs.group == mine.group > 0
        for source, lease in ((link, theirs), (local, mine)):
            assert source.take(0, 0, co.report(lease)) == Complete(0, stop=True)
        assert coordinator.held(0) == []
        local.close()
        link.close()


def test_a_worker_that_leaves_a_lease_in_the_middle_stays() -> None:
    with co.serving(1) as (coordinator, port):
        link = co.link(port, 0)
        coordinator.open(0, co.plan(data_shards=1))
        first = link.take(0, 0, None)
        assert isinstance(first, Lease)
        given_up = co.report(first, abandoned=True)
        assert link.take(0, NO_EPOCH, given_up, wait=False) == Complete(NO_EPOCH)
        assert co.work(link, 1)
        assert co.wait(coordinator, 0, 0).sums == co.whole(data_shards=1)
        link.close()


def test_an_exception_of_a_worker_is_raised_by_the_chiefs_next_call() -> None:
    with co.serving(2) as (coordinator, port):
        link = co.link(port, 1)
        coordinator.open(0, co.plan())
        link.fail("ValueError: no\x1b[31m such class" + "!" * 5000)
        why = r"^worker 1 failed: ValueError: no\?\[31m such"
        with pytest.raises(TaskLostError, match=why) as told:
            co.wait(coordinator, 0, 0)
        assert len(str(told.value)) < 1000
        link.close()


def test_an_end_of_the_chiefs_training_is_told_to_all_who_ask_or_come() -> None:
    with co.serving(3) as (coordinator, port):
        links = [co.link(port, index) for index in range(2)]
        coordinator.give_up(TaskLostError("worker 9 ended the job: ValueError: no", "Look."))
        links.append(co.link(port, 2))
        asks: list[Callable[[], object]] = [
            lambda: links[0].take(0, 0, None), lambda: links[1].published(1),
            lambda: links[2].take(0, 0, None), lambda: coordinator.open(0, co.plan()),
        ]  # fmt: skip
        for ask in asks:
            with pytest.raises(TaskLostError, match="worker 9 ended the job: ValueError: no\n  Lo"):
                ask()
        for link in links:
            link.close()


def test_it_is_told_only_when_the_chief_has_done_what_it_still_wants_to_do() -> None:
    """Nobody gets more work, or what the chief publishes meanwhile."""
    with co.serving(2) as (coordinator, port), ThreadPoolExecutor(2) as pool:
        links = [co.link(port, index) for index in range(2)]
        coordinator.open(0, co.plan())
        error = TaskLostError("worker 9 ended the job: ValueError: no", "Look.")
        coordinator.give_up(error, quiet=True)
        assert coordinator.take(0, 0, 0, None, wait=False) == Pause()
        asked: list[Future[Any]] = [
            pool.submit(links[0].take, 0, 0, None), pool.submit(links[1].published, 1)
        ]  # fmt: skip
        coordinator.publish(1, b"[]")
        coordinator.publish(2, b"[]")
        assert not any(one.done() for one in asked)
        coordinator.give_up(error)
        for one in asked:
            assert isinstance(one.exception(10.0), TaskLostError)
        for link in links:
            link.close()


def test_an_abandoned_lease_is_done_again_and_counted_once() -> None:
    with co.serving(2) as (coordinator, port):
        link = co.link(port, 1)
        coordinator.open(0, co.plan())
        first = link.take(0, 0, None)
        assert isinstance(first, Lease)
        again = link.take(0, 0, co.report(first, abandoned=True))
        assert isinstance(again, Lease)
        assert (again.data_shard, again.start, again.counts) == (
            first.data_shard,
            first.start,
            True,
        )
        link.take(0, 0, co.report(again), wait=False)
        assert coordinator.sums(0, 0).work_items == again.stop - again.start
        assert coordinator.begun_in(0)[0] == WorkRange(0, 1, 0, 1)
        assert not coordinator.poll(0, 0, 0.0)
        link.close()


def test_lost_work_is_computed_again() -> None:
    with co.serving(2) as (coordinator, port):
        link = co.link(port, 1)
        coordinator.open(0, co.plan(data_shards=1))
        first = link.take(0, 0, None)
        assert isinstance(first, Lease)
        second = link.take(0, 0, co.report(first))
        assert coordinator.held(0) == [(1, second)]
        assert coordinator.reopen(0, [WorkRange(0, 0, 0, 1)]) == 1
        assert isinstance(second, Lease)
        again = link.take(0, 0, co.report(second))
        assert isinstance(again, Lease)
        assert (again.start, again.stop, again.counts) == (0, 1, False)
        assert isinstance(link.take(0, 0, co.report(again), wait=False), Lease)
        link.close()


def test_gradients_that_are_not_finite_are_counted_up_to_a_limit(
    warnings: Callable[[], str],
) -> None:
    with co.serving(2, bad_limit=2) as (coordinator, port):
        link = co.link(port, 1)
        coordinator.open(0, co.plan())
        lease = link.take(0, 0, None)
        assert isinstance(lease, Lease)
        lease2 = link.take(0, 0, co.report(lease, bad=2, detail="step 4 of pass 0"))
        coordinator.check()
        assert "worker 1: 2 pushes were not finite and dropped: step 4 of pass 0" in warnings()
        assert isinstance(lease2, Lease)
        last = co.report(lease2, bad=1, detail="step 5 of pass 0")
        assert isinstance(link.take(0, 0, last, wait=False), Pause)  # nobody gets more
        with pytest.raises(SpartitoError, match=r"3 pushes .* more than 2; .* worker 1: step 5"):
            co.wait(coordinator, 0, 0)
        link.close()


def test_a_stream_without_examples_ends_the_chief() -> None:
    with co.serving(1) as (coordinator, _):
        local = LocalLink(coordinator, 0)
        coordinator.open(0, co.plan(steps_per_pass=None))
        lease = local.take(0, 0, None)
        assert isinstance(lease, Lease)
        with pytest.raises(UserError, match="no examples"):
            local.take(0, 0, Report(lease.id, [], ended=0))


def test_who_comes_after_the_end_is_told() -> None:
    with co.serving(2) as (coordinator, port):
        link = co.link(port, 0)
        coordinator.key_values.publish(1, b"history")
        coordinator.end()
        assert link.take(0, 0, None) == Complete(0, stop=True)
        assert link.published(1) == b"history"
        with pytest.raises(UserError, match="the job has ended"):
            co.link(port, 1)
        with pytest.raises(UserError, match="the job has ended"):
            link.published(2)
        link.close()


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n", b"SPTO" + bytes(64), b"\xff" * 64])
def test_unknown_peers_are_refused_and_the_next_is_served(data: bytes) -> None:
    with co.serving(2) as (coordinator, port):
        co.unknown_peer(port, data)
        coordinator.open(0, co.plan())
        link = co.link(port, 1)
        assert isinstance(link.take(0, 0, None), Lease)
        link.close()


@pytest.mark.parametrize("messages", [[Heartbeat()], [HELLO, HELLO], [Take(0, 0, None, True)]])
def test_messages_out_of_turn_end_the_connection(messages: list[Any]) -> None:
    with co.serving(2) as (coordinator, port):
        wire = Wire(call(port, PURPOSE), ToWorker, timeout=co.LIMIT)
        for message in messages:
            wire.send(message)
        with pytest.raises(ConnectionError):
            deque(iter(wire.receive, None))
        wire.close()
        co.eventually(lambda: coordinator.live() == [])
        coordinator.open(0, co.plan())
        link = co.link(port, 1)
        assert isinstance(link.take(0, 0, None), Lease)
        link.close()


def turned_away(port: int) -> str:
    """What worker 1 is told that has another Spartito."""
    wire = Wire(call(port, PURPOSE), ToWorker, timeout=co.LIMIT)
    wire.send(Hello(1, Versions("0.0.1", Versions.own().torch)))
    reply = wire.receive()
    wire.close()
    assert isinstance(reply, Refused)
    return reply.what


def test_a_worker_with_another_version_ends_a_job_that_has_not_begun() -> None:
    with co.serving(2) as (coordinator, port):
        assert "0.0.1 on worker 1" in turned_away(port)
        with pytest.raises(UserError, match=r"0\.0\.1 on worker 1"):
            coordinator.gather(co.LIMIT)
        with pytest.raises(UserError, match=r"0\.0\.1 on worker 1"):
            coordinator.open(0, co.plan())


def test_a_worker_with_another_version_is_refused_alone_once_there_is_work(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with co.serving(2) as (coordinator, port), caplog.at_level(logging.WARNING):
        coordinator.open(0, co.plan())
        assert "0.0.1 on worker 1" in turned_away(port)
        link = co.link(port, 0)
        assert isinstance(link.take(0, 0, None), Lease)
        link.close()
        co.eventually(lambda: "0.0.1 on worker 1" in caplog.text)
        coordinator.check()


def test_workers_hear_why_a_job_ended_that_was_not_begun() -> None:
    with co.serving(2) as (coordinator, port):
        link = co.link(port, 0)
        turned_away(port)
        with pytest.raises(UserError):
            coordinator.gather(co.LIMIT)
        coordinator.end()
        with pytest.raises(UserError, match=r"0\.0\.1 on worker 1"):
            link.take(0, 0, None)
        link.close()


def test_a_stream_is_opened_once() -> None:
    with co.serving(1) as (coordinator, _):
        coordinator.open(0, co.plan())
        with pytest.raises(ValueError, match="opened before"):
            coordinator.open(0, co.plan())


def test_closing_again_changes_nothing() -> None:
    coordinator = Coordinator(["worker 0"], timeout=1.0)
    coordinator.close()
    coordinator.close()


def test_who_drains_a_stream_waits_for_the_leases_that_are_out() -> None:
    with co.serving(1) as (coordinator, _), ThreadPoolExecutor(1) as threads:
        local = LocalLink(coordinator, 0)
        coordinator.open(0, co.plan(epochs=1))
        lease = local.take(0, 0, None)
        assert isinstance(lease, Lease)
        coordinator.end_stream(0)
        drained = threads.submit(coordinator.drain, 0)
        with pytest.raises(TimeoutError):
            drained.result(0.2)
        local.take(0, 0, co.report(lease), wait=False)
        drained.result(co.LIMIT)
        local.close()
