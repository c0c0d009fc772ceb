"""Memory that the ranks of a group on one machine share, and how they wait for each other.

Each call of the group takes a number of steps that all ranks know; a rank counts its steps in its
line of the memory, next to the tags of its last calls:

    | steps, parts, 4 marks, left, beat | bell, 4 tags, asleep |  of each rank
    | last words of each rank: why it makes no more calls |
    | what the caller keeps of each rank |
    | slots of step 0: of each rank | slots of step 1 | ...   (used in turn)
    | reserve for messages, of each rank

A rank that has announced step ``t`` has read all that it needs of the steps before, so that others
may write into their slots of these again. Nobody waits for more than that: the source of a
broadcast goes on at once.

A mark is the tag and, in its bits, a checksum of all calls before. So ranks that were at different
calls without waiting for each other, as two that each took themselves for the source of a
broadcast, find out at the next call in which one waits.

A counter is stored behind a `fences.release`, and what it tells of is looked at behind a
`fences.acquire`: on x86-64 they are nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from spartito.collectives.alarm import Alarm
from spartito.collectives.membership.lives import Lives
from spartito.collectives.membership.store import Membership
from spartito.collectives.memory.segment import Segment
from spartito.collectives.sockets.links import MOST_TEXT
from spartito.errors import UserError
from spartito.heartbeat import resume, waits
from spartito.system import fences
from spartito.system.files import memory_folders
from spartito.system.shared import Word, yield_core
from spartito.waiting import Waiting

Bytes = NDArray[np.uint8]

LINE = 128  # bytes of a rank's line: no two ranks write into the same cache line
TAGS = 4  # tags of a line: as many calls may be on their way
TAG = 9  # the position of the first of them in a line, in words
SMALL = 64 << 10  # bytes of a slot of the first memory
LARGE = 2 << 20  # of that of large calls
HUGE = 8 << 20  # of that for which a rank need not wait for others
DEPTH = {SMALL: 4, LARGE: 2, HUGE: 2}  # steps until a slot is used again
PAGE = 4096
PART = 1  # the position of how much of its slot a rank has filled, in its line, in words
LEFT = 6  # the position of the size of a rank's last words, in its line, in words
BEAT = 7  # that of a number that a rank changes while it makes progress elsewhere, in words
BELL = 8  # the position of a rank's bell in its line, in words: a cache line of its own
ASLEEP = 13  # that of whether a rank may sleep, in words
SPINS = 1000  # looks at the memory before the core is offered to others
YIELD_SECONDS = 0.0002  # of offering it, before we sleep
BUSY_SECONDS = 0.00005  # a yield that takes longer went to another process
CHECK_SECONDS = 0.05  # how often a waiter asks whether the others are alive
_BITS = 2**63 - 1  # of a number in a line


def bytes_of(segment: Segment) -> Bytes:
    """All bytes of a segment."""
    return np.frombuffer(segment.map, dtype=np.uint8)


def numbers_of(segment: Segment) -> memoryview[int]:
    """All of a segment as numbers of 64 bits, each of which is read and written as one."""
    return memoryview(segment.map).cast("q")


class Slots:
    """The slots of one size, of all ranks, in turn."""

    def __init__(self, memory: Bytes, size: int, ranks: int) -> None:
        self.size = size
        self.depth = DEPTH[size]
        self._slots = [
            [memory[(turn * ranks + rank) * size :][:size] for rank in range(ranks)]
            for turn in range(self.depth)
        ]

    def at(self, step: int) -> list[Bytes]:
        """The slots of all ranks at a step."""
        return self._slots[step % self.depth]


class Memory:
    """What the ranks of a group share.

    Args:
        group: The ranks; their store is used while they meet.
        spins: Whether there is a core for each rank, so that a wait looks for a while before it
            gives up its own.
        alarm: What errors a wait ends with.
        beside: Bytes that the caller keeps of each rank.
        reserve: Bytes of addresses that each rank has behind it; space is taken by `claim`.
        directories: Where the memory may be, None is `memory_folders`; the first with enough space
            is taken.
    """

    def __init__(
        self,
        group: Membership,
        spins: bool,
        alarm: Alarm,
        *,
        beside: int = 0,
        reserve: int = 0,
        directories: Sequence[Path] | None = None,
    ) -> None:
        self.rank, self.size, self.names = group.rank, group.size, group.names
        self.timeout, self.patience = group.timeout, 0.0
        self.waiting = Waiting(group.rank, group.names)
        self.waited: Callable[[float], object] = float
        """Is told how many seconds each wait took."""
        self.step = self.met = 0
        """Of this rank; the last one at which all were seen."""
        self._alarm = alarm
        self._directories = [
            path
            for path in (memory_folders() if directories is None else directories)
            if path.is_dir()
        ]
        self._spins = SPINS if spins else 0
        self._tag = self._mark = self._calls = self._began = 0
        self._broken: BaseException | None = None
        self.beside_at = (LINE + MOST_TEXT) * self.size
        """Where in the segment what the caller keeps begins."""
        head = self.beside_at + -(-beside * self.size // LINE) * LINE
        self.reserve_at = -(-(head + DEPTH[SMALL] * SMALL * self.size) // PAGE) * PAGE
        self.segment = segment = self._segment_for_all(
            self.reserve_at, self._teller(group), reserve * self.size
        )
        self._file = os.open(segment.path, os.O_RDWR | os.O_NOFOLLOW) if reserve else -1
        memory = bytes_of(segment)
        self._address = memory.ctypes.data
        words_of = memory[LINE * self.size :]
        self._last_words = [words_of[MOST_TEXT * rank :][:MOST_TEXT] for rank in range(self.size)]
        self._lines = numbers_of(segment)
        self._slots = {SMALL: Slots(memory[head:], SMALL, self.size)}
        cells = [rank * LINE // 8 for rank in range(self.size)]
        words = [Word(self._address + 8 * cell) for cell in cells]
        self._own, self._word = cells[self.rank], words[self.rank]
        self._parts = [Word(self._address + 8 * (cell + PART)) for cell in cells]
        self._bells = [Word(self._address + 8 * (cell + BELL)) for cell in cells]
        self._peers = {
            rank: (rank, cells[rank], words[rank]) for rank in range(self.size) if rank != self.rank
        }
        self._all = tuple(self._peers.values())
        self.peers = list(self._peers)
        try:
            self._lives = Lives(self.rank, lambda rank: Path(f"{segment.path}.{rank}"))
            try:
                if missing := group.under("life").missing():
                    raise alarm.late([self.names.index(name) for name in missing], self.timeout)
                self._lives.open(self.size)
                self.meet()
            except BaseException:
                segment.path.unlink(missing_ok=True)  # rank 0 may be gone
                self.close()
                raise
            finally:
                self._lives.unlink()
        finally:
            self._unlink(segment)

    def begin(self, tag: int) -> None:
        """Begin a call, which ``tag`` says."""
        if self._broken is not None:
            raise self._broken
        if self.step != self._began:  # else that call was refused, before anybody heard of it
            self._calls = (self._calls * 1_000_003 ^ self._tag) & _BITS
            self._began = self.step
        self._tag, self._mark = tag, tag ^ self._calls

    def slots(self, nbytes: int, most: int = LARGE) -> Slots:
        """Slots for a call of ``nbytes``, which all ranks know; they are made when first needed.

        ``most`` is the size of the largest ones.
        """
        size = SMALL if nbytes <= SMALL else LARGE if nbytes <= LARGE else most
        if size not in self._slots:
            self.meet()  # at this call: all make it, and with as many bytes
            memory = bytes_of(self.shared(DEPTH[size] * size * self.size))
            self._slots[size] = Slots(memory, size, self.size)
        return self._slots[size]

    def open(self, slots: Slots) -> list[Bytes]:
        """The slots of the next step, of which our own may be written now."""
        self.step += 1
        self._wait_for(self._all, self.step + 1 - slots.depth, compare=False)
        return slots.at(self.step)

    def announce(self) -> None:
        """Tell the others that we are at this step, and what we wrote is there to be read."""
        lines, own, step = self._lines, self._own, self.step
        lines[own + TAG + step % TAGS] = self._tag
        lines[own + 2 + step % TAGS] = self._mark
        fences.release()
        lines[own] = step
        self._wake()

    def _wake(self) -> None:
        """Wake those who sleep until this rank takes a step, if anybody does.

        Who sleeps says so before the kernel compares the word, which is behind a fence of its
        own. So one of the two sees what the other has written.
        """
        fences.full()
        lines = self._lines
        for _, cell, _ in self._all:
            if lines[cell + ASLEEP]:
                self._word.wake()
                return

    def wait(self, ranks: Sequence[int] | None = None) -> None:
        """Wait until ``ranks``, None is all, announced this step, and compare their calls."""
        if ranks is not None:
            self._wait_for([self._peers[rank] for rank in ranks], self.step)
            return
        self._wait_for(self._all, self.step)
        self.met = self.step

    def announce_part(self, part: int) -> None:
        """As `announce`, where the slot has ``part`` of its parts so far."""
        lines, own, step = self._lines, self._own, self.step
        lines[own + TAG + step % TAGS] = self._tag
        lines[own + 2 + step % TAGS] = self._mark
        fences.release()
        lines[own + PART] = step << 20 | part
        fences.release()  # who sees the step sees the part, of which it is not woken again
        lines[own] = step
        (self._word if part == 1 else self._parts[self.rank]).wake()

    def has_part(self, part: int) -> bool:
        """Whether the slots of all others have so many parts at this step."""
        target, lines = self.step << 20 | part, self._lines
        return all(lines[cell + PART] >= target for _, cell, _ in self._all)

    def wait_for_part(self, part: int) -> None:
        """Wait until the slots of all others have so many parts, and compare their calls."""
        self.wait()
        lines, target = self._lines, self.step << 20 | part
        for rank in self.peers:
            cell = self._peers[rank][1]
            if lines[cell + PART] < target:
                self._look_for(self.peers, cell, self._parts[rank], target, PART)
        fences.acquire()

    def meet(self) -> None:
        """A step in which nothing is written; each step of a training has two."""
        lines, own, mark = self._lines, self._own, self._mark
        self.step = step = self.step + 1
        if self.met + TAGS <= step:  # who did not wait may be ahead of others
            self._wait_for(self._all, step + 1 - TAGS, compare=False)
        call = 2 + step % TAGS
        lines[own + TAG - 2 + call] = self._tag
        lines[own + call] = mark
        fences.release()
        lines[own] = step
        self._wake()
        for _, cell, _ in self._all:
            if lines[cell] >= step:
                fences.acquire()
                if lines[cell + call] == mark:
                    continue
            self._wait_for(self._all, step)
            break
        self.met = step

    def meet_at(self, tag: int) -> None:
        """`meet` at the call ``tag``, which may have begun already."""
        if tag != self._tag or self._broken is not None:
            self.begin(tag)
        self.meet()

    def catch_up(self) -> None:
        """Wait until all are where this rank is, and have read what is of the steps before."""
        if self.met < self.step:
            self.wait()

    def shared(self, size: int, has_view: bool = False) -> Segment:
        """A segment of ``size`` bytes, all 0, that all ranks have mapped and nobody else finds.

        With ``has_view`` they are mapped once more, so that what is written there stays here.
        """

        def tell(text: str) -> str:
            slots = self.open(self._slots[SMALL])
            if self.rank == 0:
                said = text.encode()
                slots[0][: len(said) + 1] = np.frombuffer(said + b"\0", dtype=np.uint8)
            self.announce()
            self.wait()
            return bytes(slots[0][:4096]).partition(b"\0")[0].decode()

        segment = self._segment_for_all(size, tell)
        try:
            if has_view:
                segment.open_view()
            self.meet()
        finally:
            self._unlink(segment)
        return segment

    def _segment_for_all(self, size: int, tell: Callable[[str], str], reserve: int = 0) -> Segment:
        """A segment that rank 0 makes and the others map; ``tell`` gives all what rank 0 says."""
        if self.rank != 0:
            path, _, refusal = tell("").partition("\n")
            if refusal:
                raise UserError(f"{self.names[0]}: {refusal}")
            return Segment.attach(Path(path), size + reserve)
        try:
            segment = Segment.create(size, self._directories, reserve)
        except UserError as error:
            tell(f"\n{error}")
            raise
        try:
            tell(str(segment.path))
        except BaseException:
            self._unlink(segment)
            raise
        return segment

    def _unlink(self, segment: Segment) -> None:
        """Take the name away: who has mapped the file keeps it, and nothing is left behind."""
        if self.rank == 0:
            segment.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Leave the group: the others see that we are gone. May be called again."""
        self._broken = self._broken or self._alarm.left()
        self._lives.close()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def claim(self, offset: int, size: int) -> None:
        """Claim the space of a part of the reserve behind the slots."""
        self.segment.claim(self._file, offset, size)

    def ring(self, rank: int) -> None:
        """Wake ``rank``, which may sleep in `listen`: there is something for it in the reserve."""
        fences.release()
        self._lines[rank * LINE // 8 + BELL] += 1
        self._bells[rank].wake()

    def listen(self, done: Callable[[], bool], sources: Callable[[], list[int]]) -> None:
        """Wait until ``done()``, of which a `ring` by one of the ranks ``sources()`` tells."""
        if self._broken is not None:
            raise self._broken
        cell = self._own + BELL
        self.sleep(self._bells[self.rank], lambda: self._lines[cell], done, sources)

    def beat(self) -> None:
        """Show those who wait for this rank that it makes progress: their limit begins anew."""
        self._lines[self._own + BEAT] += 1

    def alive(self, rank: int) -> bool:
        """Whether the process of ``rank`` lives and is in the group."""
        return self._lives.alive(rank)

    def sleep(
        self,
        word: Word,
        value: Callable[[], int],
        done: Callable[[], bool],
        sources: Callable[[], list[int]],
    ) -> None:
        """Wait until ``done()``, of which the change of ``word`` tells.

        Args:
            word: Changes when something comes.
            value: What is in the word.
            done: What is waited for.
            sources: The ranks that could bring it: one that is gone is an error.
        """
        start = checked = moved = time.monotonic()
        beats = [self._lines[cell + BEAT] for _, cell, _ in self._all]
        while True:
            seen = value()
            fences.acquire()
            if done():
                return
            now = time.monotonic()
            if now - start > YIELD_SECONDS:
                self._lines[self._own + ASLEEP] = 1
                word.wait(seen, CHECK_SECONDS)
                self._lines[self._own + ASLEEP] = 0
            else:
                _pause()
                if time.monotonic() - now > BUSY_SECONDS:
                    start -= YIELD_SECONDS
            if now - checked > CHECK_SECONDS:
                checked = now
                ranks, before = sources(), beats
                beats = [self._lines[cell + BEAT] for _, cell, _ in self._all]
                moved = moved if beats == before else now
                self.waiting.look(now - start, ranks, self.timeout)
                lost = [rank for rank in ranks if not self.alive(rank)]
                if done():  # it came, and then left: all is well
                    return
                for rank, cell, _ in self._all:
                    if size := self._lines[cell + LEFT]:
                        fences.acquire()
                        raise self._fail(self._alarm.heard(bytes(self._last_words[rank][:size])))
                if lost:
                    raise self._fail(self._alarm.gone(lost))
                if now - moved > self.timeout + self.patience:
                    raise self._fail(self._alarm.late(ranks, self.timeout))

    def _wait_for(
        self, peers: Collection[tuple[int, int, Word]], step: int, compare: bool = True
    ) -> None:
        lines, call = self._lines, 2 + step % TAGS
        for rank, cell, word in peers:
            if lines[cell] < step:
                self._look_for([one[0] for one in peers], cell, word, step)
            fences.acquire()
            if compare and lines[cell + call] != self._mark:
                raise self._fail(self._different(rank, cell))

    def _different(self, rank: int, cell: int) -> BaseException:
        """The error for a rank that is, or was in the last calls, at another call than we."""
        for step in range(self.step, max(0, self.step - TAGS), -1):
            turn = TAG + step % TAGS
            calls = {self.rank: self._lines[self._own + turn], rank: self._lines[cell + turn]}
            if calls[self.rank] != calls[rank]:
                return self._alarm.different(dict(sorted(calls.items())), {})
        return self._alarm.different(calls, {rank: ", which made another call some time before,"})

    def _look_for(
        self, ranks: Sequence[int], cell: int, word: Word, target: int, offset: int = 0
    ) -> None:
        """Wait for the first of ``ranks`` that is late, whose line is at ``cell``."""
        lines, peers, cell = self._lines, self._peers, cell + offset
        began, before = time.perf_counter(), waits()
        for _ in range(self._spins):
            if lines[cell] >= target:
                break
        else:
            self.sleep(
                word,
                lambda: lines[cell],
                lambda: lines[cell] >= target,
                lambda: [rank for rank in ranks if lines[peers[rank][1] + offset] < target],
            )
        resume(before)
        self.waited(time.perf_counter() - began)

    def leave(self, error: BaseException) -> None:
        """Every later call of the group raises ``error`` too, and so does who waits for us."""
        if self._broken is None:
            self._broken = error
            text = self._alarm.said(error)
            self._last_words[self.rank][: len(text)] = np.frombuffer(text, dtype=np.uint8)
            fences.release()
            self._lines[self._own + LEFT] = len(text)

    def _fail(self, error: BaseException) -> BaseException:
        self.leave(error)
        return error

    def _teller(self, group: Membership) -> Callable[[str], str]:
        def tell(text: str) -> str:
            if self.rank == 0:
                group.store.set("segment", text.encode())
                return text
            return group.ask(lambda: group.store.get("segment").decode())

        return tell


def _pause() -> None:
    """Offer the core to other processes, and the interpreter to other threads."""
    yield_core()
