"""Values that a chief leaves for the tasks that ask, by key."""

from __future__ import annotations

from collections.abc import Mapping

from spartito.ps.protocol.runtime import SYSTEM, Runtime
from spartito.ps.protocol.work import MAX_PUBLISHED


class KeyValues:
    """What was published so far. Thread-safe."""

    def __init__(
        self, runtime: Runtime = SYSTEM, values: Mapping[int, bytes] | None = None
    ) -> None:
        self._changed = runtime.condition()
        self._values = dict(values or {})
        self._ended = False

    def publish(self, key: int, value: bytes) -> None:
        """Give ``value`` to all who ask for ``key``."""
        if len(value) > MAX_PUBLISHED:
            raise ValueError(f"{len(value)} bytes to publish, more than {MAX_PUBLISHED}")
        with self._changed:
            self._values[key] = bytes(value)
            self._changed.notify_all()

    def published(self, key: int, patience: float) -> bytes | None:
        """What was published under ``key``, once it is; None after ``patience`` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: key in self._values or self._ended, patience)
            return self._values.get(key)

    def end(self) -> None:
        """Nothing more will be published: nobody waits any longer."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
