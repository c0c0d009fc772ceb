"""The files in which the tasks of a launcher say where they are, and what it makes of them."""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from spartito.cluster.limits import notice_limit
from spartito.errors import UserError
from spartito.heartbeat import SIZE, Beat, file_of, life_of, stacks_file
from spartito.launch.processes.watch import Seen, Watch
from spartito.names import ENV_HEARTBEAT, ENV_STACKS
from spartito.system import reserve
from spartito.system.files import memory_folders, temporary_folder
from spartito.wire.secret import in_file

SHOWN = 4
"""Frames of a stack in a message."""
STACKS_SECONDS = 3.0
"""For tasks to write their stacks, on a busy machine too."""
LEAST = 1 << 20
"""Bytes that a file system must have left for the files of a job: some pages for each task."""


class Watched(Protocol):
    """A task as it is watched.

    ``missed`` is why the others cannot go on after it ended.
    """

    missed: str

    @property
    def name(self) -> str:
        """What it is called."""
        ...

    @property
    def starts(self) -> int:
        """Which start of it this is."""
        ...

    @property
    def code(self) -> int | None:
        """Its exit code."""
        ...

    @property
    def pid(self) -> int:
        """Its process."""
        ...

    @property
    def awaited(self) -> bool:
        """Whether the others cannot do without it."""
        ...

    @property
    def gives_up(self) -> float | None:
        """Seconds for which the others wait for it, where it may be replaced then."""
        ...

    def end(self) -> None:
        """End it at once, with all that it started."""
        ...


class Heartbeats:
    """A folder with a file for each task: in this machine's memory, or else a temporary one.

    Args:
        say: Gets a line for the user.
        stacks: Where the stacks of tasks that do not move are kept; None: nowhere.
        notice: Seconds within which a task that stands still is named; None: what
            `notice_limit` says.
        beside: A folder that the tasks see too, for these files; None: one in memory.

    Raises:
        UserError: They fit neither there nor beside temporary files.
    """

    def __init__(
        self,
        say: Callable[[str], None],
        stacks: Path | None = None,
        notice: float | None = None,
        beside: Path | None = None,
    ) -> None:
        self._say, self._stacks = say, stacks
        self._watch = Watch(notice_limit(notice))
        self.folder = _new_folder(beside)
        self._files: dict[str, mmap.mmap] = {}
        self._next = 0.0

    @property
    def every(self) -> float:
        """Seconds between two looks."""
        return self._watch.every

    def begin(self, name: str, env: Mapping[str, str], remote: bool = False) -> dict[str, str]:
        """Make the files of a task that is about to start.

        Args:
            name: The task.
            env: Its environment; a secret in it goes into a file.
            remote: Whether it runs on another machine, whose launcher makes its heartbeat.

        Returns:
            The environment that says where the files are.
        """
        env = in_file(env, self.folder)
        if remote:
            return env
        path = file_of(self.folder, name)
        self._files.pop(name, None)  # of an earlier start
        for old in (path, stacks_file(path)):
            old.unlink(missing_ok=True)
        try:
            self._files[name] = _mapped(path, SIZE)
        except OSError:  # full by now: a task trains without a heartbeat as well
            return env
        stacks = {} if self._stacks is None else {ENV_STACKS: str(self._stacks)}
        return env | {ENV_HEARTBEAT: str(path)} | stacks

    def look(self, tasks: Sequence[Watched]) -> None:
        """Say what there is to say of the tasks; those that are missed are told so.

        Args:
            tasks: All of them.
        """
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + self.every
        seen = [
            Seen(
                task.name,
                task.starts,
                self.beat_of(task.name),
                None if task.code is not None else life_of(task.pid),
                task.code,
                task.awaited,
                task.gives_up,
            )
            for task in tasks
        ]
        named = {task.name: task for task in tasks}
        notices = self._watch.look(now, seen)
        before = {one.name: self._ask_stacks(one.name) for one in notices if one.stacks}
        end = time.monotonic() + STACKS_SECONDS  # of all: the launcher does nothing else meanwhile
        for notice in notices:
            if notice.ends:
                named[notice.name].missed = notice.text
            else:
                stacks = self._stacks_of(notice.name, before.get(notice.name), end)
                self._say(f"{notice.name} {notice.text}{stacks}")
            if notice.is_lost:
                named[notice.name].end()

    def beat_of(self, name: str) -> Beat | None:
        """What a task said last, None if nothing.

        Args:
            name: The task.
        """
        memory = self._files.get(name)
        beat = None if memory is None else Beat.read_from(memory)
        return beat if beat is not None and beat.phase else None

    def stands(self, name: str) -> bool:
        """Whether a task was named as one that does not move, and has not moved since.

        Args:
            name: The task.
        """
        return self._watch.stands(name)

    def close(self) -> None:
        """Remove the folder."""
        for memory in self._files.values():
            memory.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _ask_stacks(self, name: str) -> int | None:
        """Ask a task for its stacks; how long its file is before, None if it does not hear that."""
        beat = self.beat_of(name)
        if beat is None or not beat.stacks_signal:
            return None
        path = stacks_file(file_of(self.folder, name))
        before = path.stat().st_size if path.exists() else 0
        with suppress(ProcessLookupError, PermissionError):
            os.kill(beat.pid, beat.stacks_signal)
        return before

    def _stacks_of(self, name: str, before: int | None, end: float) -> str:
        """Where the main thread is, and where the stacks of all threads are kept."""
        if before is None:
            return ""
        path = stacks_file(file_of(self.folder, name))
        text = _grown(path, before, end)
        frames = [line.strip() for line in text.rpartition("Thread ")[2].splitlines()]
        shown = [line for line in frames if line.startswith("File ")][:SHOWN]
        kept = self._keep(path.name, text) if text else ""
        return "".join(f"\n  {line}" for line in shown) + kept

    def _keep(self, name: str, text: str) -> str:
        if self._stacks is None:
            return ""
        path = self._stacks / name.replace(".stacks", ".txt")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a") as file:
                file.write(f"{time.strftime('%H:%M:%S')} as the launcher asked\n{text}\n")
        except OSError:
            return ""
        return f"\n  the stacks of all its threads are in {path}"


def _new_folder(beside: Path | None) -> Path:
    """A new folder in ``beside``; among temporary files where that is missing, full or read-only.

    Raises `UserError` where none can be written.
    """
    folders = memory_folders() if beside is None else [beside, temporary_folder()]
    wrong: OSError | None = None
    for parent in folders:
        try:
            return _tried(tempfile.mkdtemp(prefix="spartito-", dir=parent))
        except OSError as error:
            wrong = error
    raise UserError(
        f"{' and '.join(map(str, dict.fromkeys(folders)))} cannot hold {LEAST >> 20} MiB: {wrong}",
        "Free some space there, or set TMPDIR to a folder that can be written.",
    ) from wrong


def _tried(name: str) -> Path:
    """A new folder, in which files as large as `LEAST` fit; else an `OSError`, and it is gone."""
    folder, trial = Path(name), Path(name, "trial")
    try:
        _mapped(trial, LEAST).close()
        trial.unlink()
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder


def _mapped(path: Path, size: int) -> mmap.mmap:
    """A new file in memory, all of it there: a hole in a full file system ends who writes to it."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        reserve(file, 0, size)
        return mmap.mmap(file, size)
    finally:
        os.close(file)


def _grown(path: Path, before: int, end: float) -> str:
    """What was written into the file since it had so many bytes, once that has come."""
    text = ""
    while True:
        with suppress(OSError):
            now = path.read_bytes()[before:].decode(errors="replace")
            if now and now == text:  # it has ceased to grow
                return now
            text = now
        if time.monotonic() > end:
            return text
        time.sleep(0.02)
