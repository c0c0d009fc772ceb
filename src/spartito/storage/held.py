"""One job at a time writes into a store: a record of who has it, which he renews.

A store locks nothing. Who wants it finds the record of another job, and is refused if that is
renewed while he looks; one that stays as it is for `LIMIT_SECONDS` is of a process that is gone. A
process of the same machine is asked for by its number, so that a restart need not wait.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

from spartito.errors import UnwritableError, UserError
from spartito.folders import Holder, refusal
from spartito.log import note, warn
from spartito.storage.remote import Store

FOLDER, RECORD = "spartito-lock", "holder.json"
RENEW_SECONDS = 20.0
LIMIT_SECONDS = 60.0
LOOK_SECONDS = 2.0


class HeldStore:
    """A store that this process holds, until `let_go` or its end.

    Args:
        store: Where the record alone lies: the folder `FOLDER` of the store.
        inherits: Whether this process goes on in place of a lost one of its job.

    Raises:
        UserError: Another job has the store, which is named, or it cannot be read.
    """

    def __init__(self, store: Store, inherits: bool = False) -> None:
        self._store, self._own = store, Holder.own()
        self._over, self._taken_by = threading.Event(), b""
        self._written = b""
        self._outlast(inherits)
        try:
            self._write()
        except UnwritableError as error:  # backups are missed too then; it is tried again
            warn("another job is not kept off: %s", error)
        else:
            if self._found() != self._written:  # another has come at the same time
                raise refusal(self._where, Holder.of(self._found()))
        self._thread = threading.Thread(target=self._renew, name="spartito-store", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise `UserError` where another job has taken the store: this one was frozen."""
        if self._taken_by:
            raise refusal(self._where, Holder.of(self._taken_by))

    def let_go(self) -> None:
        """Let others have it."""
        self._over.set()
        with suppress(UserError):
            if self._found() == self._written:
                self._store.remove(RECORD)

    @property
    def _where(self) -> str:
        return self._store.url.removesuffix(f"/{FOLDER}")

    def _outlast(self, inherits: bool) -> None:
        """Wait until the record that is there is certainly left behind, or refuse."""
        first = self._found()
        holder = Holder.of(first)
        if holder is None or holder.is_over or holder.life == self._own.life:
            return
        if inherits and holder.job == self._own.job != "":
            return
        note("%s was last written by %s; waiting up to %g s to see whether it lives", self._where,
             holder, LIMIT_SECONDS)  # fmt: skip
        end = time.monotonic() + LIMIT_SECONDS
        while time.monotonic() < end:
            time.sleep(LOOK_SECONDS)
            if (now := self._found()) != first:
                if not now:  # he has ended
                    return
                raise refusal(self._where, Holder.of(now))

    def _found(self) -> bytes:
        """The record that is there; empty where none is."""
        return self._store.read(RECORD) if RECORD in self._store.sizes() else b""

    def _write(self) -> None:
        content = self._own.encode() + f"{time.time()}\n".encode()
        descriptor, path = tempfile.mkstemp(prefix="spartito-")
        try:
            with open(descriptor, "wb") as file:
                file.write(content)
            self._store.put(Path(path), RECORD)
        finally:
            os.unlink(path)
        self._written = content

    def _renew(self) -> None:
        while not self._over.wait(RENEW_SECONDS):
            with suppress(UserError):  # it may be reached again in time
                found = self._found()
                if found and found != self._written:
                    self._taken_by = found
                    return
                if not self._over.is_set():
                    self._write()
