"""torch's stores as ours, and ours as torch's."""

from __future__ import annotations

import time
from collections.abc import Iterable
from datetime import timedelta

import torch.distributed as dist

from spartito.cluster.store.client import Store

LOOK = 0.005  # seconds between two looks for a value


class OfTorch:
    """A store of torch, as `KeyValues`: that of torchrun, or of a process group of the user's."""

    def __init__(self, store: dist.Store) -> None:
        self.torch = store

    def set(self, key: str, value: bytes) -> None:
        """Give ``key`` a value."""
        self.torch.set(key, value.decode())

    def get(self, key: str) -> bytes:
        """The value of ``key``, which is waited for as long as the store does."""
        return self.torch.get(key)

    def gather(self, keys: Iterable[str], seconds: float = 0.0) -> dict[str, bytes]:
        """As `Store.gather`; who waits looks again and again."""
        missing, found = list(keys), dict[str, bytes]()
        end = time.monotonic() + seconds
        while True:
            for key in missing:
                if self.torch.check([key]):
                    found[key] = self.torch.get(key)
            missing = [key for key in missing if key not in found]
            if not missing or time.monotonic() >= end:
                return found
            time.sleep(LOOK)

    def add(self, key: str, amount: int) -> int:
        """Add to the number at ``key``; returns what it is then."""
        return self.torch.add(key, amount)

    def under(self, prefix: str) -> OfTorch:
        """The keys below ``prefix`` of these."""
        return OfTorch(dist.PrefixStore(prefix, self.torch))

    def close(self) -> None:
        """It is closed with the process, or by who made it."""


class ForTorch(dist.Store):
    """Our store, as torch's process groups take one.

    So torch opens none of its own, which would listen on all interfaces and ask nobody who he is.
    """

    def __init__(self, store: Store, limit: float) -> None:
        super().__init__()
        self._store = store
        self.set_timeout(timedelta(seconds=limit))

    def set(self, key: str, value: str | bytes) -> None:
        """Give ``key`` a value."""
        self._store.set(key, value.encode() if isinstance(value, str) else value)

    def get(self, key: str) -> bytes:
        """The value of ``key``, which is waited for."""
        return self._store.get(key, self.timeout.total_seconds())

    def add(self, key: str, amount: int) -> int:
        """Add to the number at ``key``."""
        return self._store.add(key, amount)

    def compare_set(self, key: str, expected: str | bytes, new: str | bytes) -> bytes:
        """As `Store.swap`; an empty ``expected`` is none."""
        before, after = _bytes(expected), _bytes(new)
        return self._store.swap(key, before or None, after) or before

    def delete_key(self, key: str) -> bool:
        """Forget ``key``; whether it had a value."""
        return self._store.delete(key)

    def check(self, keys: list[str]) -> bool:
        """Whether all have a value."""
        return len(self._store.gather(keys)) == len(set(keys))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all have a value."""
        limit = (self.timeout if timeout is None else timeout).total_seconds()
        missing = set(keys) - self._store.gather(keys, limit).keys()
        if missing:
            raise dist.DistStoreError(f"nobody has set {sorted(missing)} within {limit:g} s")

    def num_keys(self) -> int:
        """How many have a value."""
        return len(self._store.keys())

    def set_timeout(self, timeout: timedelta) -> None:
        """How long `get` and `wait` may take."""
        self._limit = timeout

    @property
    def timeout(self) -> timedelta:
        """How long `get` and `wait` may take."""
        return self._limit


def _bytes(text: str | bytes) -> bytes:
    return text.encode() if isinstance(text, str) else text


def for_torch(store: object, limit: float) -> dist.Store:
    """A store that torch takes: the one below an `OfTorch`, else ours as `ForTorch`."""
    if isinstance(store, OfTorch):
        return store.torch
    assert isinstance(store, Store)
    return ForTorch(store, limit)
