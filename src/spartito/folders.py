"""One job at a time writes into a folder: a lock, and a record of who has it.

The lock is an `flock` on ``.spartito.lock`` in the folder. One process holds it for its whole job,
the chief; the kernel drops it with that process, however it ends. The file says who that is, so
that another job can name him in its refusal. Readers ask nobody.

Some file systems lock nothing, or only against processes of the same machine. So the holder sets
the file's time anew every `RENEW_SECONDS`, and who finds the record of another machine waits until
that is `LIMIT_SECONDS` old, by the clock of the file system, and is refused if it is renewed.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shlex
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Self

from spartito.errors import UserError, writable
from spartito.forks import keep_from_forks
from spartito.life import Life
from spartito.names import ENV_SECRET, ENV_SECRET_FILE, ENV_STORE
from spartito.notes import note, shown
from spartito.wire.interfaces import own_name

LOCK = ".spartito.lock"
"""The file, in the folder that it is about; it goes when the folder is let go.

For one file of a folder its name follows: ``.spartito.lock-epochs.csv``.
"""
RENEW_SECONDS = 5.0
LIMIT_SECONDS = 20.0
"""After which the record of another machine is of a process that is gone."""
PATIENCE_SECONDS = 1.0
"""That a process which is just ending has."""
POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that holds a folder.

    Attributes:
        host: The name of its machine.
        life: Which process it is, as `Life` has it: namespace, number, beginning.
        since: When it took the folder, in seconds since 1970.
        command: What was typed.
        job: What all processes of a job share that goes on without a lost one; "" elsewhere.
    """

    host: str
    life: tuple[str, int, int]
    since: float
    command: str
    job: str = ""

    @classmethod
    def own(cls) -> Self:
        """This process."""
        me = Life.own()
        program, *words = sys.orig_argv or ["python"]
        command = shown(shlex.join([os.path.basename(program), *words]), 200)
        life = me.namespace, me.pid, me.began
        return cls(own_name(), life, time.time(), command, job_of(os.environ))

    @classmethod
    def of(cls, content: bytes) -> Self | None:
        """What a record says; None where it says nothing."""
        with suppress(ValueError, TypeError, KeyError, AttributeError):
            raw = json.loads(content.partition(b"\n")[0])  # what follows is the time of a renewal
            namespace, pid, began = raw["life"]
            life = str(namespace), int(pid), int(began)
            since, said = float(raw["since"]), (str(raw["command"]), str(raw.get("job", "")))
            return cls(str(raw["host"]), life, since, *said)
        return None

    @property
    def is_over(self) -> bool:
        """Whether this process has certainly ended."""
        return Life(*self.life).is_over

    @property
    def is_of_this_machine(self) -> bool:
        """Whether it runs, or ran, under the same kernel as this one."""
        boot, own = (name.partition("/")[0] for name in (self.life[0], Life.own().namespace))
        return boot == own if boot and own else self.host == own_name()

    def __str__(self) -> str:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"process {self.life[1]} on {self.host}, since {when}: {self.command}"

    def encode(self) -> bytes:
        """The record."""
        return json.dumps(asdict(self)).encode() + b"\n"


def job_of(env: Mapping[str, str]) -> str:
    """What the processes of a job share that goes on without a lost one; "" for any other job.

    Only there another process may take a folder over from one that is frozen. The store's address
    tells the job from others of the same secret.
    """
    store, secret = env.get(ENV_STORE, ""), env.get(ENV_SECRET, "")
    if not secret and (file := env.get(ENV_SECRET_FILE)):
        with suppress(OSError):
            secret = Path(file).read_text()
    if not store or not secret.strip():
        return ""
    return hashlib.sha256(f"{secret.strip()} {store}".encode()).hexdigest()[:16]


@dataclass
class _Held:
    """A folder that this process holds, and for whom."""

    file: Path
    descriptor: int
    users: dict[str, object] = field(default_factory=dict)

    @property
    def is_there(self) -> bool:
        """Whether the file is still the one that is locked; somebody may have removed it."""
        return is_at(self.descriptor, self.file)

    def let_go(self) -> None:
        with suppress(OSError):
            if self.is_there:
                self.file.unlink()
        os.close(self.descriptor)


_held: dict[tuple[int, int, str], _Held] = {}
_turn = threading.RLock()
_renewing: threading.Thread | None = None
_ends: list[Callable[[], None]] = []


def hold(
    folder: str | os.PathLike[str],
    what: str,
    owner: object,
    inherits: bool = False,
    *,
    file: str = "",
) -> None:
    """Be the only job that writes into ``folder``, until `release` or the end of this process.

    Where this process holds it already nothing happens, unless another owner writes the same.

    Args:
        folder: It is made.
        what: What is written there, in the plural: "checkpoints".
        owner: Who writes it, in this process.
        inherits: Whether this process goes on in place of a lost one of its job, which may be
            frozen and hold the folder still.
        file: The name of the one file that is written, where others may write others there.

    Raises:
        UserError: Another process holds it, which is named, or another owner in this one.
        UnwritableError: The folder cannot be written.
    """
    path = Path(folder)
    with _turn:
        with writable(path):
            path.mkdir(parents=True, exist_ok=True)
            status = path.stat()
        key = status.st_dev, status.st_ino, file
        held = _held.get(key)
        if held is not None and not held.is_there:
            held.let_go()
            users, held = held.users, None
            del _held[key]
        else:
            users = {} if held is None else held.users
        if users.get(what, owner) is not owner:
            raise UserError(
                f"two of this process write {what} into {path / file}",
                f"Name a {'file' if file else 'folder'} for each of them.",
            )
        if held is None:
            lock = path / (f"{LOCK}-{file}" if file else LOCK)
            with writable(path):
                held = _Held(lock, _locked(lock, path / file, inherits), users)
            _held[key] = held
            _renew()
        held.users[what] = owner


def release(owner: object) -> None:
    """Let all folders go that ``owner`` has in this process, unless another one here has them."""
    with _turn:
        for key, held in list(_held.items()):
            for what in [what for what, who in held.users.items() if who is owner]:
                del held.users[what]
            if not held.users:
                del _held[key]
                held.let_go()


def make_folder(path: Path, option: str) -> None:
    """Make the folder that an option names, and those above it, where they are not there.

    Args:
        path: The folder.
        option: What names it, for the message.

    Raises:
        UserError: It cannot be.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"{option} {path} cannot be made: {error.strerror}",
            "Name a folder where you may write.",
        ) from error


def check_free(folder: str | os.PathLike[str]) -> None:
    """Refuse a folder that another process holds, before anything is written there.

    Args:
        folder: It need not be there.

    Raises:
        UserError: Who holds it.
    """
    path = Path(folder)
    with _turn:
        whole = [one.file.parent for one in _held.values() if one.file.name == LOCK]
        if any(mine.samefile(path) for mine in whole if path.exists()):
            return
        try:
            descriptor = os.open(path / LOCK, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return
        try:
            # A shared lock is none that another could take for the holder's: he has an exclusive.
            _wait_for(descriptor, path / LOCK, path, fcntl.LOCK_SH, job_of(os.environ))
        except OSError:  # locks nothing: the record is judged when the folder is taken
            pass
        finally:
            os.close(descriptor)


def at_end(work: Callable[[], None]) -> None:
    """Have ``work`` done at the end of this process, before its folders are let go."""
    _ends.append(work)
    _prepare_end()


def _locked(file: Path, path: Path, inherits: bool) -> int:
    """The descriptor of the lock ``file``, which is ours, and so is ``path``."""
    own = Holder.own()
    while True:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            before = _holder(descriptor)
            locks = True
            try:
                _wait_for(descriptor, file, path, fcntl.LOCK_EX, own.job if inherits else "")
            except OSError:  # of a file system that has no locks
                locks = False
            if not is_at(descriptor, file):  # who had it let it go, or was left behind
                os.close(descriptor)
                continue
            if before is not None and not (locks and before.is_of_this_machine):
                _outlast(before, descriptor, path)
            with suppress(OSError):  # a full disk: then nobody can be named
                os.ftruncate(descriptor, os.pwrite(descriptor, own.encode(), 0))
            keep_from_forks(descriptor)
            return descriptor
        except BaseException:
            os.close(descriptor)
            raise


def _wait_for(descriptor: int, file: Path, path: Path, kind: int, job: str = "") -> None:
    """Lock ``file``, or refuse, and name who has ``path``.

    Raises `OSError` where the file system has no locks.
    """
    end = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _holder(descriptor)
            if job and holder is not None and holder.job == job:
                if kind == fcntl.LOCK_EX and is_at(descriptor, file):
                    file.unlink()  # one of our own job that is frozen, and was left behind
                return None
            if time.monotonic() > end:
                raise refusal(str(path), holder) from None
            if not is_at(descriptor, file):
                return None
            time.sleep(POLL_SECONDS)


def _outlast(before: Holder, descriptor: int, path: Path) -> None:
    """Wait until a record that no lock vouches for is certainly left behind, or refuse."""
    if before.is_over:
        return
    mark, said = os.fstat(descriptor).st_mtime_ns, False
    folder = path if path.is_dir() else path.parent
    while _now(folder) - mark / 1e9 < LIMIT_SECONDS:
        if not said:
            said = True
            note("%s was last written by %s; waiting up to %g s to see whether it lives", path,
                 before, LIMIT_SECONDS)  # fmt: skip
        time.sleep(POLL_SECONDS * 10)
        if os.fstat(descriptor).st_mtime_ns != mark:
            raise refusal(str(path), before)


def refusal(where: str, holder: Holder | None) -> UserError:
    """What is said to a job whose folder another one has."""
    who = "another process" if holder is None else str(holder)
    return UserError(
        f"{where} is in use by another job: {who}",
        "Wait for its end, or end it, or name another one: two jobs would mix what they write.",
    )


def _holder(descriptor: int) -> Holder | None:
    with suppress(OSError):
        return Holder.of(os.pread(descriptor, 1 << 16, 0))
    return None


def is_at(descriptor: int, path: Path) -> bool:
    """Whether an open file is still what has the name ``path``; links are not followed."""
    with suppress(OSError):
        return os.path.samestat(os.fstat(descriptor), path.stat(follow_symlinks=False))
    return False


def _now(path: Path) -> float:
    """The time by the clock of a folder's file system."""
    with tempfile.TemporaryFile(dir=path) as file:
        file.write(b".")
        file.flush()
        return os.fstat(file.fileno()).st_mtime


def _renew() -> None:
    """Have the times of the files set anew from now on."""
    global _renewing
    _prepare_end()
    if _renewing is None:
        _renewing = threading.Thread(target=_keep, name="spartito-folders", daemon=True)
        _renewing.start()


def _keep() -> None:
    while True:
        time.sleep(RENEW_SECONDS)
        with _turn:
            for held in _held.values():
                with suppress(OSError):
                    os.utime(held.descriptor)


_prepared = False


def _prepare_end() -> None:
    """Before the interpreter takes down threads, so that a store can still be reached."""
    global _prepared
    if not _prepared:
        _prepared = True
        import concurrent.futures.thread  # noqa: F401 - it ends after us then

        threading._register_atexit(_end)  # type: ignore[attr-defined]


def _end() -> None:
    while _ends:
        with suppress(Exception):
            _ends.pop()()
    with _turn:
        while _held:
            _held.popitem()[1].let_go()


def _forget() -> None:
    """In a fork: the folders are the parent's."""
    global _turn, _renewing
    _turn, _renewing = threading.RLock(), None
    _held.clear()
    _ends.clear()


os.register_at_fork(after_in_child=_forget)
