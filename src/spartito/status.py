"""What each task says of itself in the run folder, once a second: ``tasks/worker-0.now``.

A thread of the task writes it, so it tells the same on one machine and over a shared folder on
many; who looks needs neither the launcher nor the task.
"""

from __future__ import annotations

import atexit
import json
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from spartito import heartbeat
from spartito.names import ENV_RUN_DIR
from spartito.system import resident_memory

FOLDER, SUFFIX = "tasks", ".now"
EVERY = 1.0
"""Seconds between two writes."""
WINDOW = 10
"""Writes over which speed and waiting are counted."""
SILENT = 5.0
"""Seconds after which a task that said nothing counts as one that does not speak."""
OVER, SILENCE = "ended", "silent"

staleness: Callable[[], float] | None = None
"""A parameter server's: updates between pull and push, in the mean."""


@dataclass(frozen=True, slots=True)
class Status:
    """What a task said last.

    Attributes:
        task: Its name.
        pid: Its process.
        began: When it said something first, in seconds since 1970.
        time: When it said this.
        phase: One of `heartbeat.PHASES`, or ``"ended"``.
        step: The global step that it is at, from 0; of a parameter server its updates.
        steps_per_second: Of its own, lately.
        waiting: The part of the last seconds in which it waited for other tasks.
        data: The part in which it waited for data.
        memory: Bytes that it has in RAM.
        staleness: A parameter server's; None elsewhere.
    """

    task: str
    pid: int
    began: float
    time: float
    phase: str
    step: int
    steps_per_second: float
    waiting: float
    data: float
    memory: int
    staleness: float | None = None

    @property
    def age(self) -> float:
        """Seconds since it said this."""
        return max(0.0, time.time() - self.time)

    @property
    def shown_phase(self) -> str:
        """What it is at, as a table says it."""
        return SILENCE if self.age > SILENT and self.phase != OVER else self.phase


class _Writer:
    """Writes the file of this process."""

    def __init__(self, path: Path, task: str) -> None:
        self._path, self._task, self._began = path, task, time.time()
        # As `spartito.storage.leftovers` has names, which is above this layer.
        self._new = path.with_name(f".spartito-new-{secrets.token_hex(8)}-{path.name}")
        self._seen: deque[tuple[float, heartbeat.Spent]] = deque(maxlen=WINDOW)

    def write(self, phase: str = "") -> None:
        spent = heartbeat.spent()
        self._seen.append((time.monotonic(), spent))
        (before, first), (now, _) = self._seen[0], self._seen[-1]
        seconds = max(now - before, 1e-9)
        status = Status(
            self._task,
            os.getpid(),
            self._began,
            time.time(),
            phase or spent.phase,
            spent.step,
            (spent.steps - first.steps) / seconds,
            min(1.0, (spent.waited - first.waited) / seconds),
            min(1.0, (spent.read - first.read) / seconds),
            resident_memory(),
            _staleness(),
        )
        with suppress(OSError):  # a full disk, or a folder that is gone: training goes on
            self._new.write_text(json.dumps(asdict(status)))
            self._new.replace(self._path)

    def run(self, over: threading.Event) -> None:
        while not over.wait(EVERY):
            self.write()


_told: Path | None = None
_end: Callable[[], None] | None = None
"""Ends what is written there."""


def folder(given: str | Path | None) -> Path | None:
    """The run folder: the one that is ``given``, else what ``SPARTITO_RUN_DIR`` names, if any."""
    found = given or os.environ.get(ENV_RUN_DIR)
    return Path(found) if found else None


def begin(given: str | Path | None, task: str) -> Path | None:
    """Write the status of this process into its run folder from now on, until it ends.

    Args:
        given: The run folder; by default what ``SPARTITO_RUN_DIR`` names.
        task: What this process is called.

    Returns:
        The run folder; None where there is none, and nothing is written.
    """
    global _told, _end
    run_dir = folder(given)
    if run_dir is None:
        return None
    path = run_dir / FOLDER / f"{task.replace(' ', '-')}{SUFFIX}"
    if path == _told:
        return run_dir
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
    heartbeat.keep()
    if _end is not None:
        _end()
    writer, over = _Writer(path, task), threading.Event()
    writer.write()
    thread = threading.Thread(target=writer.run, args=(over,), name="spartito-status", daemon=True)
    thread.start()
    process = os.getpid()

    def end() -> None:
        if not over.is_set() and os.getpid() == process:  # no fork of it
            over.set()
            thread.join()  # it writes into the same file
            writer.write(OVER)

    _told, _end = path, end
    atexit.register(end)
    return run_dir


def statuses(run_dir: Path) -> list[Status]:
    """What the tasks of a run said last, workers first; tasks of an earlier run are left out.

    Args:
        run_dir: The run folder.
    """
    found: list[Status] = []
    for path in (run_dir / FOLDER).glob(f"*{SUFFIX}"):
        with suppress(OSError, ValueError, TypeError):
            found.append(Status(**json.loads(path.read_text())))
    newest = max((one.began for one in found if one.task in ("chief 0", "worker 0")), default=0.0)
    return sorted((one for one in found if one.time >= newest), key=_order)


def _order(status: Status) -> tuple[int, int]:
    kind, _, index = status.task.partition(" ")
    kinds: Sequence[str] = ("chief", "worker", "ps", "evaluator")
    return kinds.index(kind) if kind in kinds else len(kinds), int(index or 0)


def _staleness() -> float | None:
    with suppress(RuntimeError):  # the server counts while we look
        return None if staleness is None else staleness()
    return None
