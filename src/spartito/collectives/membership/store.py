"""The job's key-value store, and what a group of tasks does with it."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, Self, TypeVar

import torch

from spartito.cluster.store.client import FencedError, StoreError, StoreSilentError
from spartito.errors import EXIT_TASK_LOST, MismatchedCallsError, SpartitoError, TaskLostError
from spartito.notes import TORCH_LEVEL
from spartito.threads import in_thread
from spartito.waiting import Waiting

T = TypeVar("T")

ERROR = 2  # the number of that level in torch
LOOK = 0.5  # seconds between two looks who is missing
MARGIN = 3.0  # seconds beyond a limit in which a call that keeps one itself may still return


class KeyValues(Protocol):
    """What tasks need of a store: ours is one (`spartito.cluster.store.client`)."""

    def set(self, key: str, value: bytes) -> None:
        """Give ``key`` a value."""

    def get(self, key: str) -> bytes:
        """The value of ``key``, which is waited for."""

    def gather(self, keys: Iterable[str], seconds: float = 0.0) -> dict[str, bytes]:
        """The values of ``keys``, once all have one, or of those that do after ``seconds``."""

    def add(self, key: str, amount: int) -> int:
        """Add to the number at ``key``; returns what it is then."""

    def under(self, prefix: str) -> KeyValues:
        """The keys below ``prefix`` of these."""

    def close(self) -> None:
        """Close the connections; a later call makes new ones."""


def nobody(names: Collection[str]) -> Sequence[str]:
    """As `Membership.lost`, where it cannot be told."""
    return ()


@dataclass(frozen=True)
class Membership:
    """A group of tasks as one of them sees it.

    Attributes:
        rank: The index of this task in the group.
        names: The names of the tasks in rank order, for errors.
        store: A key-value store that the group has for itself.
        timeout: Seconds that a wait for another task may take.
        keeper: The task in whose process the store is, of this group or not; "" is rank 0.
        generation: That of the job's tasks that the group is of.
        recovers: Whether the tasks agree anew on who is there when one is lost.
        lost: Those of some names that have certainly ended, where that can be told.
    """

    rank: int
    names: Sequence[str]
    store: KeyValues
    timeout: float
    keeper: str = ""
    generation: int = 0
    recovers: bool = False
    lost: Callable[[Collection[str]], Sequence[str]] = nobody

    def __post_init__(self) -> None:
        object.__setattr__(self, "keeper", self.keeper or self.names[0])

    @property
    def size(self) -> int:
        """The number of tasks."""
        return len(self.names)

    @property
    def is_keeper(self) -> bool:
        """Whether the store ends with this process."""
        return self.names[self.rank] == self.keeper

    def under(self, prefix: str) -> Self:
        """The same group with the keys below ``prefix``."""
        return replace(self, store=self.store.under(prefix))

    def ask(self, call: Callable[[], T], limit: float | None = None) -> T:
        """As `ask`; None is the time limit of the group."""
        return ask(call, self.timeout if limit is None else limit, self.keeper)

    def missing(self, limit: float | None = None) -> list[str]:
        """Sign in, and return the names of those who do not within ``limit`` seconds.

        The keeper is missing if the store is gone or frozen from the start. A wait is logged.
        """
        limit = self.timeout if limit is None else limit
        return self.sign_in(limit, waiting=Waiting(self.rank, self.names))[0]

    def sign_in(
        self, limit: float, text: str = "", waiting: Waiting | None = None
    ) -> tuple[list[str], list[str]]:
        """As `missing`, and the texts of those who came; ``text`` is ours, "" is none."""
        missing = set(range(self.size))
        texts: dict[int, str] = {}
        start = time.monotonic()

        def look() -> None:
            self.store.set(str(self.rank), text.encode())
            seconds = 0.0
            while True:
                found = self.store.gather([str(other) for other in missing], seconds)
                for other, value in found.items():
                    texts[int(other)] = value.decode()
                    missing.discard(int(other))
                waited = time.monotonic() - start
                if not missing or waited >= limit:
                    return
                if seconds and self.lost([self.names[other] for other in missing]):
                    return
                if waiting is not None:
                    waiting.look(waited, missing, limit)
                seconds = min(LOOK, limit - waited)

        try:
            self.ask(look, limit)
        except TaskLostError:
            # Often the store went with its keeper just because somebody else did not come in time.
            if not texts:
                return [self.keeper], []
        found = [texts[rank] for rank in sorted(texts) if texts[rank]]
        return [self.names[rank] for rank in sorted(missing)], found


def ask(call: Callable[[], T], limit: float, keeper: str) -> T:
    """The result of ``call``, which uses the store and may hang where its keeper is frozen.

    Args:
        call: What is run, in a thread of its own.
        limit: Seconds to wait, and a margin.
        keeper: The task that has the store, for errors.

    Raises:
        TaskLostError: The store is gone or did not reply in time.
    """
    reply = in_thread(call, "spartito-store")
    if not wait([reply], limit + MARGIN).done:
        raise _lost(keeper, f"did not reply within {limit:g} s")
    with lost_with(keeper):
        return reply.result()


@contextmanager
def lost_with(keeper: str) -> Iterator[None]:
    """Where the store fails in this block, its keeper is lost."""
    try:
        yield
    except FencedError as error:
        raise TaskLostError(str(error)) from error
    except StoreSilentError as error:
        raise _lost(keeper, f"did not reply within {error.seconds:g} s") from error
    except (RuntimeError, StoreError) as error:
        raise _lost(keeper, "is gone") from error


def _lost(keeper: str, what: str) -> TaskLostError:
    return TaskLostError(
        f"{keeper} {what}: it keeps the store where the tasks meet",
        f"Look at the last lines of {keeper}. SPARTITO_TIMEOUT sets the limit in seconds.",
    )


def quiet_torch() -> None:
    """Let torch's C++ parts print errors only, unless the user said what they print.

    As ``TORCH_CPP_LOG_LEVEL`` does, for this process alone: its environment stays as it is.
    """
    if any(name in os.environ for name in TORCH_LEVEL):
        return
    library = next((Path(str(torch.__file__)).parent / "lib").glob("libc10.*"), "")
    with suppress(OSError, ValueError):  # another build of torch: it stays as loud as it is
        ctypes.c_int.in_dll(ctypes.CDLL(str(library)), "FLAGS_caffe2_log_level").value = ERROR


def error_to_text(error: SpartitoError) -> str:
    """What another task needs to raise ``error`` too."""
    return f"{error.exit_code} {error}"


def error_from_text(text: str, other: type[SpartitoError] = MismatchedCallsError) -> SpartitoError:
    """The error that another task gave to `error_to_text`: of a lost task, or an ``other`` one."""
    code, _, message = text.partition(" ")
    what, _, do = message.partition("\n  ")
    return (TaskLostError if int(code) == EXIT_TASK_LOST else other)(what, do)
