"""One job at a time writes into a store: a record of who has it, which he renews.

A store locks nothing. Every process writes a record of its own, and looks only then who else has
one: of two that come at the same time at least one sees the other. Who finds another's record is
refused if that is renewed while he looks; one that stays as it is for `LIMIT_SECONDS` is of a
process that is gone, and is removed. A process that was frozen so long finds its own removed. One
of the same machine is asked for by its number, so that a restart need not wait.
"""

from __future__ import annotations

import os
import re
import secrets
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from spartito.errors import UnwritableError, UserError
from spartito.folders import Holder, refusal
from spartito.notes import note, warn
from spartito.storage.remote import Store, UnreadableError

FOLDER = "spartito-lock"
RENEW_SECONDS = 20.0
LIMIT_SECONDS = 60.0
LOOK_SECONDS = 2.0

_RECORD = re.compile(r"holder-[0-9a-f]{16}\.json")


class HeldStore:
    """A store that this process holds, until `let_go` or its end.

    Args:
        store: Where the records alone lie: the folder `FOLDER` of the store.
        inherits: Whether this process goes on in place of a lost one of its job.

    Raises:
        UserError: Another job has the store, which is named, or it cannot be read.
    """

    def __init__(self, store: Store, inherits: bool = False) -> None:
        self._store, self._own, self._inherits = store, Holder.own(), inherits
        self._record = f"holder-{secrets.token_hex(8)}.json"
        self._over, self._taken_by, self._is_written = threading.Event(), b"", False
        self._gone = set[str]()
        """Records of processes that are gone."""
        self._outlast(self._others())
        try:
            self._write()
        except UnwritableError as error:  # backups are missed too then; it is tried again
            warn("another job is not kept off: %s", error)
        self._thread = threading.Thread(target=self._renew, name="spartito-store", daemon=True)
        self._thread.start()
        try:
            self._meet(self._others() if self._is_written else {})
        except BaseException:
            self.let_go()
            raise
        self._clear()

    def check(self) -> None:
        """Raise `UserError` where another job has taken the store: this one was frozen.

        Where that cannot be found out it is an `UnwritableError`.
        """
        try:
            self._look()
        except UnreadableError as error:
            raise UnwritableError(*str(error).split("\n  ", 1)) from error
        if self._taken_by:
            raise refusal(self._where, Holder.of(self._taken_by))

    def let_go(self) -> None:
        """Let others have it."""
        self._over.set()
        with suppress(UserError):
            if self._record in self._store.sizes():
                self._store.remove(self._record)

    @property
    def _where(self) -> str:
        return self._store.url.removesuffix(f"/{FOLDER}")

    def _meet(self, others: Mapping[str, bytes]) -> None:
        """Of those who came at the same time the first by name stays; he waits for them to leave.

        One that was complete before has seen nobody, and does not leave.
        """
        if others and min(others) < self._record:
            raise refusal(self._where, Holder.of(others[min(others)]))
        self._outlast(others)

    def _outlast(self, found: Mapping[str, bytes]) -> None:
        """Wait until these records are certainly left behind, or refuse."""
        first = {name: content for name, content in found.items() if self._may_live(content)}
        self._gone.update(found.keys() - first.keys())
        if not first:
            return
        note("%s was last written by %s; waiting up to %g s to see whether it lives", self._where,
             Holder.of(next(iter(first.values()))) or "another process", LIMIT_SECONDS)  # fmt: skip
        end = time.monotonic() + LIMIT_SECONDS
        while first and time.monotonic() < end:
            time.sleep(LOOK_SECONDS)
            now = self._others()
            first = {name: content for name, content in first.items() if name in now}
            for name, content in first.items():
                if now[name] != content:
                    raise refusal(self._where, Holder.of(now[name]))
        self._gone.update(first)

    def _may_live(self, content: bytes) -> bool:
        """Whether the process of a record may run still, and is none that this one replaces."""
        holder = Holder.of(content)
        if holder is None:  # it is just being written
            return True
        if holder.is_over or holder.life == self._own.life:
            return False
        return not (self._inherits and holder.job == self._own.job != "")

    def _others(self) -> dict[str, bytes]:
        """The records of others by name, but for those who are gone."""
        names = {name for name in self._store.sizes() if _RECORD.fullmatch(name)}
        others = sorted(names - self._gone - {self._record})
        return {name: content for name in others if (content := self._read(name)) is not None}

    def _read(self, name: str) -> bytes | None:
        """A record; None if it was removed meanwhile."""
        try:
            return self._store.read(name)
        except UnreadableError:
            if name in self._store.sizes():
                raise
            return None

    def _look(self) -> None:
        """Find out whether another one has the store by now."""
        if self._is_written and self._record in self._store.sizes():
            return
        for content in self._others().values():
            self._taken_by = content

    def _write(self) -> None:
        content = self._own.encode() + f"{time.time()}\n".encode()
        descriptor, path = tempfile.mkstemp(prefix="spartito-")
        try:
            with open(descriptor, "wb") as file:
                file.write(content)
            self._store.put(Path(path), self._record)
        finally:
            os.unlink(path)
        self._is_written = True

    def _clear(self) -> None:
        """Remove the records of those who are gone, by which they hear of it if they only slept."""
        with suppress(UserError):  # the next turn tries it again
            for name in self._gone.intersection(self._store.sizes()):
                self._store.remove(name)

    def _renew(self) -> None:
        while not self._over.wait(RENEW_SECONDS):
            with suppress(UserError):  # it may be reached again in time
                began = time.monotonic()
                self._look()
                if self._taken_by:
                    return
                if time.monotonic() < began + LIMIT_SECONDS / 2 and not self._over.is_set():
                    self._write()  # else it was frozen since, and looks again
                self._clear()
