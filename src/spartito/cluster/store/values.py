"""The values of a store, and who waits for them: no sockets, no clock."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from spartito.cluster.store.protocol import (
    FULL,
    MOST_KEYS,
    RETIRED,
    Add,
    Delete,
    Gather,
    Hold,
    Keys,
    Reply,
    Request,
    Retire,
    Set,
    Swap,
)

MOST_BYTES = 256 << 20
"""Bytes of all keys and values."""
EACH = 64
"""Bytes that a key and its value count for beside their own."""

Who = TypeVar("Who")


@dataclass(slots=True, eq=False)
class Wait(Generic[Who]):
    """Somebody who waits for values; ``missing`` are those that are not there."""

    who: Who
    keys: tuple[str, ...]
    missing: set[str]


class Values(Generic[Who]):
    """A dictionary with waits. ``Who`` is what a caller calls itself."""

    def __init__(self, most: int = MOST_BYTES) -> None:
        self._values: dict[str, bytes] = {}
        self._retired: tuple[str, ...] = ()
        self._waits: dict[str, set[Wait[Who]]] = {}
        self._by_who: dict[Who, Wait[Who]] = {}
        self._ready: list[tuple[Who, Reply]] = []
        self._held: dict[str, Who] = {}
        self._most, self._bytes = most, 0

    def apply(self, request: Request, who: Who) -> Reply | None:
        """The reply to a request; None where ``who`` has to wait until it is `ready`."""
        if self._is_retired(request):
            return Reply(refused=RETIRED)
        match request:
            case Set(key, value):
                return self._put(key, value) or Reply()
            case Add(key, amount):
                return self._add(key, amount)
            case Swap(key, expected, new):
                if self._values.get(key) == expected and (full := self._put(key, new)):
                    return full
                return self._of((key,))
            case Delete(key):
                found = self._of((key,))
                self._drop(key)
                return found
            case Gather(keys, seconds):
                return self._gather(keys, seconds, who)
            case Keys(prefix):
                return self._of([key for key in self._values if key.startswith(prefix)])
            case Hold(key, value):
                self._held[key] = who
                return self._put(key, value) or Reply()
            case Retire(prefix):
                return self._retire(prefix)

    def ready(self) -> list[tuple[Who, Reply]]:
        """Those whose wait is over since the last call, and the replies to them."""
        ready, self._ready = self._ready, []
        return ready

    def give_up(self, who: Who) -> Reply:
        """End the wait of ``who``; returns what is there of what it waits for."""
        wait = self._by_who.pop(who, None)
        if wait is None:
            return Reply()
        for key in wait.keys:
            waits = self._waits.get(key, set())
            waits.discard(wait)
            if not waits:
                self._waits.pop(key, None)
        return self._of(wait.keys)

    def leave(self, who: Who) -> None:
        """Forget what ``who`` waits for, and the keys that it held."""
        self.give_up(who)
        for key in [key for key, holder in self._held.items() if holder is who]:
            del self._held[key]
            self._drop(key)

    def _gather(self, keys: tuple[str, ...], seconds: float, who: Who) -> Reply | None:
        if len(keys) > MOST_KEYS:
            return Reply(refused=FULL)
        missing = set(keys) - self._values.keys()
        if not missing or seconds <= 0:
            return self._of(keys)
        wait = Wait(who, keys, missing)
        self._by_who[who] = wait
        for key in keys:
            self._waits.setdefault(key, set()).add(wait)
        return None

    def _add(self, key: str, amount: int) -> Reply:
        try:
            number = int(self._values.get(key, b"0")) + amount
        except ValueError:
            return Reply(refused=f"the value of {key!r} is no number")
        return self._put(key, str(number).encode()) or self._of((key,))

    def _put(self, key: str, value: bytes) -> Reply | None:
        before = self._values.get(key)
        more = len(value) - len(before) if before is not None else _size(key, value)
        if self._bytes + more > self._most:
            return Reply(refused=FULL)
        self._bytes += more
        self._values[key] = value
        for wait in list(self._waits.get(key, ())):
            wait.missing.discard(key)
            if not wait.missing:
                self._ready.append((wait.who, self.give_up(wait.who)))
        return None

    def _drop(self, key: str) -> None:
        value = self._values.pop(key, None)
        if value is not None:
            self._bytes -= _size(key, value)
            for wait in self._waits.get(key, ()):
                wait.missing.add(key)

    def _retire(self, prefix: str) -> Reply:
        self._retired = (*(one for one in self._retired if not one.startswith(prefix)), prefix)
        for key in [key for key in self._values if key.startswith(prefix)]:
            self._drop(key)
        stale = {
            w.who for key, waits in self._waits.items() if key.startswith(prefix) for w in waits
        }
        for who in stale:
            self.give_up(who)
            self._ready.append((who, Reply(refused=RETIRED)))
        return Reply()

    def _is_retired(self, request: Request) -> bool:
        match request:
            case Gather(keys):
                return any(key.startswith(self._retired) for key in keys)
            case Keys() | Retire():
                return False
            case _:
                return request.key.startswith(self._retired)

    def _of(self, keys: Iterable[str]) -> Reply:
        values = self._values
        return Reply({key: values[key] for key in keys if key in values})


def _size(key: str, value: bytes) -> int:
    return len(key) + len(value) + EACH
