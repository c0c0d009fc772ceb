"""What a chief writes down, and what another process makes of it."""

from __future__ import annotations

import os
from pathlib import Path
from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spartito.errors import TaskLostError
from spartito.ps.protocol.work import Lease
from spartito.ps.scheduler import journal, ledger
from spartito.ps.scheduler.journal import FileJournal
from spartito.ps.scheduler.ledger import Book, Entered, Kept, Ledger, Published, Stopped
from spartito.ps.scheduler.plan import Plan
from tests.ps.simulation.disks import MemoryJournal


def plain(book: Book) -> object:
    """All that a ledger holds, whatever the order of its sets."""
    found = msgspec.msgpack.decode(ledger._encode(book.ledger), type=dict, strict=False)
    for queue in found["queues"].values():
        queue["live"], queue["waiting"] = sorted(queue["live"]), sorted(queue["waiting"])
        queue.pop("ids")
    return {**found, "reign": 0, "groups": 0, "stopped": sorted(found["stopped"])}


def worked(book: Book, random: Random, steps: int, together: bool, compact: int) -> None:
    """Any sequence of calls, of workers that come, finish, are lost, and know where data ends."""
    length = random.choice([None, 7])
    plan = Plan(3, length, 1, None, 2, together=together, gated=random.random() < 0.5)
    queue, held, now = book.open(1, plan), dict[int, Lease](), 0.0
    for worker in range(3):
        queue.join(worker)
    for step in range(steps):
        now += random.random()
        worker = random.randrange(4)
        lease = held.pop(worker, None)
        if lease is not None:
            match random.randrange(8):
                case 0:
                    queue.drop(worker)
                case 1:
                    queue.abandon(lease.id)
                case _:
                    ended = min(lease.stop, 9) if length is None and lease.stop >= 9 else None
                    queue.finish(lease.id, [random.random()], ended, now, bytes([worker]))
        if random.random() < 0.1:
            queue.reopen(list(queue.begun())[:2])
        epoch = int(queue.is_complete(0))
        if epoch:
            queue.close(0)
        if (given := queue.take(worker, epoch, now)) is not None:
            held[worker] = given
        if step == compact:
            book.note(Kept(b"here"))


@given(st.integers(0, 1 << 30), st.integers(1, 60), st.booleans(), st.integers(0, 80))
def test_another_process_has_the_same_queues(
    seed: int, steps: int, together: bool, compact: int
) -> None:
    kept = MemoryJournal([])
    book = Book("job", kept)
    book.begin()
    book.note(Entered(1, 4))
    worked(book, Random(seed), steps, together, compact)
    book.note(Published(3, b"x"))
    book.note(Stopped(1))
    again = Book("another", kept)
    assert again.goes_on
    assert plain(again) == plain(book)


def test_leases_of_two_chiefs_have_different_numbers() -> None:
    """One that was frozen may give out leases that its successor does not know of."""
    kept = MemoryJournal([])
    book = Book("job", kept)
    book.begin()
    old = book.open(1, Plan(1, 100, 1, None, 1))
    old.take(0, 0, 0.0)
    new = Book("job", MemoryJournal(list(kept.read()))).ledger.queues[1]
    numbers = {queue.take(1, 0, 1.0).id for queue in (old, new)}  # type: ignore[union-attr]
    assert len(numbers) == 2


def test_a_record_that_is_torn_and_all_after_it_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "chief.journal"
    written = FileJournal(path)
    for text in (b"one", b"two", b"three"):
        written.append(text)
    whole = path.read_bytes()
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        found = written.read()
        assert found == [b"one", b"two", b"three"][: len(found)]
        assert len(found) == sum(size >= end for end in (11, 22, 35))
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert len(written.read()) == sum(at >= end for end in (11, 22))
    written.remove()


def test_what_is_rewritten_is_there_alone_and_for_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "chief.journal"
    written = FileJournal(path)
    written.append(b"one")
    written.rewrite(b"two")
    written.append(b"three")
    assert written.read() == [b"two", b"three"]
    assert {file.stat().st_mode & 0o777 for file in path.parent.iterdir()} == {0o600}
    written.remove()
    assert list(path.parent.iterdir()) == []


def test_one_process_at_a_time_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "LOCK_SECONDS", 0.0)
    path = tmp_path / "chief.journal"
    first = FileJournal(path)
    with pytest.raises(TaskLostError, match=r"another process is the chief: it has .* open"):
        FileJournal(path)
    os.close(first._lock)  # as the kernel does for a process that died
    FileJournal(path).remove()


def test_a_journal_without_a_beginning_is_none() -> None:
    assert not Book("job", MemoryJournal([])).goes_on
    torn = MemoryJournal([msgspec.msgpack.encode({"type": "Stopped", "stream": 1})])
    assert not Book("job", torn).goes_on
    assert isinstance(Book("job").ledger, Ledger)


def test_a_job_that_was_done_is_known_as_such() -> None:
    kept = MemoryJournal([])
    book = Book("job", kept, "about")
    book.begin()
    assert not Book("another", kept, "about").ledger.ended
    book.note(ledger.Ended())
    again = Book("another", kept, "about")
    assert again.goes_on
    assert again.ledger.ended
