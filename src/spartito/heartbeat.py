"""Each task says where it is in a small file, which its launcher and its neighbours read.

The launcher makes the file, and tells the task by ``SPARTITO_HEARTBEAT``; without it nothing is
said. A beat is a few numbers written into mapped memory, which takes less than a microsecond.
"""

from __future__ import annotations

import faulthandler
import fcntl
import mmap
import os
import signal
import struct
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import get_ident
from time import monotonic_ns
from typing import Self

from spartito.names import ENV_HEARTBEAT, ENV_RUN_DIR, ENV_STACKS
from spartito.system import STACKS_SIGNAL, cpu_and_state

PHASES = (
    "",
    "start",
    "connect",
    "data",
    "step",
    "exchange",
    "evaluate",
    "save",
    "recover",
    "serve",
    "end",
)
"""What a task may be at; "exchange" is a wait for other tasks."""
NONE, START, CONNECT, DATA, STEP, EXCHANGE, EVALUATE, SAVE, RECOVER, SERVE, END = range(len(PHASES))

SIZE = 128
"""Bytes of a file."""
_BEAT = struct.Struct("@8Q")  # step, steps, phase, generation, time, computed, read, time again
_WHO = struct.Struct("@2Q")  # process id, the signal upon which it writes its stacks
_WHO_AT = 64
_GROUP = struct.Struct("@Q")  # the number of the group, from 1
_GROUP_AT = 80
TRIES, TRY_AGAIN = 20, 0.001
"""How often, and after how many seconds, one that is just written is read again."""


@dataclass(frozen=True, slots=True)
class Beat:
    """What a task said last.

    Attributes:
        step: The global step.
        steps: How many steps this task has begun itself.
        phase: One of `PHASES`, "" before the first word.
        generation: Which members the job has, counted over recoveries.
        time: When it was said, in seconds of the machine's monotonic clock.
        computed: Seconds in its steps so far, without waits for other tasks.
        read: Seconds in which it waited for data so far.
        pid: Its process id.
        stacks_signal: The signal upon which it writes its stacks, 0 for none.
        group: Which tasks end when one of them is lost: those with the same number; 0 for none.
    """

    step: int
    steps: int
    phase: str
    generation: int
    time: float
    computed: float
    read: float
    pid: int
    stacks_signal: int
    group: int = 0

    @classmethod
    def read_from(cls, memory: mmap.mmap | bytes) -> Self:
        """What the bytes of a file say; nothing where it is just being written.

        The writer clears them, and then writes one number after the other, the last one last.

        Args:
            memory: `SIZE` bytes.
        """
        for _ in range(TRIES):
            step, steps, phase, generation, at, computed, read, again = _BEAT.unpack_from(memory)
            if at == again and (at or not phase):
                break
            time.sleep(TRY_AGAIN)
        else:
            phase = NONE
        name = PHASES[phase] if phase < len(PHASES) else ""
        pid, number = _WHO.unpack_from(memory, _WHO_AT)
        (group,) = _GROUP.unpack_from(memory, _GROUP_AT)
        spent = computed / 1e9, read / 1e9
        return cls(step, steps, name, generation, at / 1e9, *spent, pid, number, group)

    def __str__(self) -> str:
        return f"at step {self.step}, in {self.phase!r}"


class _Heart:
    """Ours: the mapped file, and what was written there last."""

    def __init__(self, memory: mmap.mmap, lock: int) -> None:
        self.memory, self.lock = memory, lock
        self.step = self.steps = self.generation = 0
        self.phase, self.at, self.thread = START, monotonic_ns(), get_ident()
        self.spent = [0] * len(PHASES)
        self.beat(0, START)
        _WHO.pack_into(memory, _WHO_AT, os.getpid(), 0)

    def beat(self, step: int, phase: int) -> None:
        now, spent = monotonic_ns(), self.spent
        spent[self.phase] += now - self.at
        self.step, self.phase, self.at = step, phase, now
        _BEAT.pack_into(
            self.memory, 0, step, self.steps, phase, self.generation, now,
            spent[STEP], spent[DATA], now,
        )  # fmt: skip


_heart: _Heart | None = None


def begin() -> None:
    """Take the file that ``SPARTITO_HEARTBEAT`` names, if it is there and nobody has it.

    A task's own children inherit the variable, and leave the file to the task. May be called
    again.
    """
    global _heart
    path = os.environ.get(ENV_HEARTBEAT)
    if _heart is not None or not path:
        return
    with suppress(OSError, ValueError):  # the launcher is gone, or on another machine
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _heart = _Heart(mmap.mmap(file, SIZE), file)
            _write_stacks_when_asked(stacks_file(Path(path)))
        except BaseException:
            os.close(file)
            raise


def keep() -> None:
    """Count where this process is also where no launcher asks for it."""
    global _heart
    begin()
    if _heart is None:
        _heart = _Heart(mmap.mmap(-1, SIZE), -1)


@dataclass(frozen=True, slots=True)
class Spent:
    """Where this process is, and what its time went for.

    Attributes:
        phase: One of `PHASES`.
        step: The global step.
        steps: How many steps it has begun itself.
        waited: Seconds in which it waited for other tasks so far.
        read: Seconds in which it waited for data.
    """

    phase: str
    step: int
    steps: int
    waited: float
    read: float


def spent() -> Spent:
    """What this process has said so far; from any thread."""
    heart = _heart
    if heart is None:
        return Spent("", 0, 0, 0.0, 0.0)
    phase, since = heart.phase, monotonic_ns() - heart.at
    waited, read = (heart.spent[one] + (since if phase == one else 0) for one in (EXCHANGE, DATA))
    return Spent(PHASES[phase], heart.step, heart.steps, waited / 1e9, read / 1e9)


def _write_stacks_when_asked(path: Path) -> None:
    """Have the signal handled, and the file know it."""
    assert _heart is not None
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
    with suppress(ValueError):  # not in the main thread
        # What the interpreter goes back to when it ends: the launcher may ask just then.
        signal.signal(STACKS_SIGNAL, signal.SIG_IGN)
    faulthandler.register(STACKS_SIGNAL, os.open(path, flags, 0o600), all_threads=True)
    _WHO.pack_into(_heart.memory, _WHO_AT, os.getpid(), STACKS_SIGNAL)


def beat(step: int | None, phase: int) -> None:
    """Say where this task is.

    Args:
        step: The global step; None: as it was.
        phase: What begins: one of the numbers `DATA`, `STEP`, ... of this module.
    """
    heart = _heart
    if heart is not None:
        if phase == STEP:
            heart.steps += 1
        heart.beat(heart.step if step is None else step, phase)


def waits() -> int:
    """Say that a wait for other tasks begins.

    Returns:
        What `resume` takes when it is over; 0 where nothing has to be said.
    """
    heart = _heart
    if heart is None or heart.thread != get_ident() or heart.phase in (CONNECT, EXCHANGE):
        return NONE
    before = heart.phase
    heart.beat(heart.step, EXCHANGE)
    return before


def resume(phase: int) -> None:
    """Say that a wait is over.

    Args:
        phase: What `waits` returned.
    """
    if phase and _heart is not None:
        _heart.beat(_heart.step, phase)


@contextmanager
def during(phase: int) -> Iterator[None]:
    """A block in which this task is at something else. After an error it stays there.

    Args:
        phase: One of the numbers of this module.
    """
    heart = _heart
    before = NONE if heart is None else heart.phase
    if heart is not None:
        heart.beat(heart.step, phase)
    yield
    if heart is not None:
        heart.beat(heart.step, before)


def in_generation(number: int) -> None:
    """Say which members the job has from now on.

    Args:
        number: The generation.
    """
    if _heart is not None:
        _heart.generation = number
        _heart.beat(_heart.step, _heart.phase)


def in_group(number: int) -> None:
    """Say which tasks end when one of them is lost, so that they are started again together.

    Args:
        number: The same for all of them; 1 or more.
    """
    if _heart is not None:
        _GROUP.pack_into(_heart.memory, _GROUP_AT, number)


@dataclass(frozen=True, slots=True)
class Life:
    """What the kernel says of a process.

    Attributes:
        state: A letter of the kernel: T is stopped by a signal, t by a debugger.
        cpu: Seconds that it has computed.
    """

    state: str
    cpu: float

    @property
    def stands(self) -> str:
        """Why it stands still: by a signal, a debugger; "" if it does not."""
        return {"T": "is stopped by a signal", "t": "is held by a debugger"}.get(self.state, "")


def life_of(pid: int) -> Life | None:
    """What the kernel says of a process of this machine.

    Args:
        pid: Its process id.

    Returns:
        None where there is no such process.
    """
    found = cpu_and_state(pid)
    return None if found is None else Life(found[1], found[0])


def file_of(folder: Path, name: str) -> Path:
    """Where the task ``name`` writes: ``worker 1`` into ``worker-1``.

    Args:
        folder: The job's folder on this machine.
        name: The task, with or without its address behind it.
    """
    return folder / "-".join(name.split()[:2])


def stacks_file(path: Path) -> Path:
    """Where a task writes its stacks.

    Args:
        path: Where it says where it is.
    """
    return path.with_name(f"{path.name}.stacks")


def dump_stacks(why: str) -> str:
    """Write the stacks of all threads of this process into the folder for them, if there is one.

    Args:
        why: A line above them.

    Returns:
        A sentence that says where, to end an error with; "" where nothing was written.
    """
    run, folder = os.environ.get(ENV_RUN_DIR), os.environ.get(ENV_STACKS)
    if not folder and not run:
        return ""
    own = os.environ.get(ENV_HEARTBEAT, f"process-{os.getpid()}")
    path = Path(folder or f"{run}/stacks") / f"{Path(own).name}.txt"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            print(f"{time.strftime('%H:%M:%S')} {why}", file=file, flush=True)
            faulthandler.dump_traceback(file, all_threads=True)
            print(file=file)
    except OSError:
        return ""
    return f" The stacks of this task are in {path}."


_met: dict[Path, mmap.mmap] = {}


def keep_files(names: Iterable[str]) -> None:
    """Keep where tasks write that this one has met, for `last_words` of those very processes.

    One that is started again writes into a file of its own.

    Args:
        names: The tasks, as messages name them.
    """
    own = os.environ.get(ENV_HEARTBEAT)
    for path in [file_of(Path(own).parent, name) for name in names] if own else ():
        with suppress(OSError, ValueError), path.open("rb") as file:
            _met[path] = mmap.mmap(file.fileno(), SIZE, access=mmap.ACCESS_READ)


def stands(name: str) -> bool:
    """Whether another task is known to stand still, as one that is stopped by a signal.

    Args:
        name: The task, as messages name it.
    """
    beat = _beat_of(name)
    life = None if beat is None else life_of(beat.pid)
    return life is not None and bool(life.stands)


def _beat_of(name: str) -> Beat | None:
    """The last sign of life of a task of this machine; None of any other."""
    own = os.environ.get(ENV_HEARTBEAT)
    if not own:
        return None
    path = file_of(Path(own).parent, name)
    try:
        return Beat.read_from(_met[path] if path in _met else path.read_bytes())
    except (OSError, struct.error):
        return None


def last_words(name: str) -> str:
    """What is known here of another task, for the end of a sentence about it.

    Args:
        name: The task, as messages name it.

    Returns:
        As `` (last seen at step 41, in 'data', 12 s ago; it is stopped by a signal)``; "" for a
        task of another machine, or of no launcher. Of one that this task has met nothing is said
        that its replacement did.
    """
    beat = _beat_of(name)
    if beat is None:
        return ""
    if not beat.phase:
        return " (it has not come to a strategy yet)"
    life = life_of(beat.pid)
    state = f"; it {life.stands}" if life and life.stands else ""
    return f" (last seen {beat}, {monotonic_ns() / 1e9 - beat.time:.0f} s ago{state})"
