"""By which all at the store see that a process lives: a key that ends with its connection."""

from __future__ import annotations

import threading
from contextlib import suppress

from spartito.cluster.store.client import Held, Store
from spartito.errors import SpartitoError

AGAIN = 0.1
"""Seconds until a lost connection is made again."""
LIVES = "lives/"


class Lifeline:
    """Holds the key of a process at the store until it is closed, or the process ends.

    Args:
        store: The job's.
        token: That of the process.

    Raises:
        StoreError: The store is out of reach.
    """

    def __init__(self, store: Store, token: str) -> None:
        self._store, self._key = store, f"{LIVES}{token}"
        self._closed = threading.Event()
        self._connection: Held | None = store.hold(self._key)
        threading.Thread(target=self._keep, name="spartito-lifeline", daemon=True).start()

    def close(self) -> None:
        """Let go. May be called again."""
        self._closed.set()
        if (connection := self._connection) is not None:
            connection.close()

    def _keep(self) -> None:
        while not self._closed.is_set():
            if self._connection is not None:
                self._connection.outlast()
                self._connection.close()
                self._connection = None
            if self._closed.wait(AGAIN):
                return
            with suppress(SpartitoError, OSError):
                self._connection = self._store.hold(self._key)
        if (connection := self._connection) is not None:
            connection.close()
