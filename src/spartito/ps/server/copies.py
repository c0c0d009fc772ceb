"""What a primary tells its backup, in order, so that each has all that ever had a reply."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import msgspec
import torch
from torch import Tensor

from spartito.errors import SpartitoError
from spartito.notes import warn
from spartito.ps.protocol.codec import PlainCodec
from spartito.ps.protocol.layout import ITEM_SIZES, unused
from spartito.ps.protocol.memory import dtype_of
from spartito.ps.protocol.messages import Copy, Copying, Done, Elsewhere, Message, Update, Whole
from spartito.ps.protocol.runtime import Channel, Condition
from spartito.ps.server.shard import Shard
from spartito.wire.frames import Gone, need

COPY_SECONDS = 2.0
"""A backup that says nothing for so long is lost."""

MOST_BEHIND = 256 << 20
"""Bytes of updates that may wait while a new backup gets its first copy."""


class Copied(Protocol):
    """The store whose changes are told."""

    lock: Condition
    shard: Shard


class BackupLink:
    """The way to the backup. Called with the store's lock held, but for `run`, a thread's.

    ``connect`` opens it; ``dump`` copies all that the store has; ``fenced`` is called when the
    backup obeys another primary.
    """

    def __init__(
        self,
        store: Copied,
        connect: Callable[[], Channel],
        fenced: Callable[[], None],
        dump: Callable[[], tuple[dict[str, Tensor], dict[str, Any]]],
        timeout: float,
    ) -> None:
        self.state = Copying.BEHIND
        self._lock, self._connect, self._fenced, self._dump = store.lock, connect, fenced, dump
        span = store.shard.span
        self._codec, self._runs = PlainCodec(store.shard.layout, span), store.shard.runs
        self._size, self._timeout = span.size, timeout
        self._told = self._known = 0
        self._queue: deque[tuple[Message, tuple[Any, ...]]] = deque()
        self._over = False

    def mark(self) -> int:
        """Stands for all that was told until now."""
        return self._told

    def has(self, mark: int, whole: bool = False) -> bool:
        """Whether a reply may be sent to what was told until ``mark``; see `Store.settle`."""
        if self.state is Copying.BEHIND and not whole:
            return len(self._queue) * self._size <= MOST_BEHIND or self._known >= mark
        return self.state is Copying.WHOLE and self._known >= mark

    def update(self, update: Update, gradient: Tensor | None) -> None:
        """An update that is about to be made; ``gradient`` stays as it is until it has a reply."""
        parts: tuple[Any, ...] = ()
        if gradient is not None:
            own = gradient if self.state is Copying.WHOLE else gradient.clone()
            parts = tuple(self._codec.encode(own, unused(self._runs, update.absent)))
        self.tell(update, *parts)

    def all(self) -> None:
        """All that the store has."""
        tensors, about = self._dump()
        parts = {**tensors, "about": _bytes(msgspec.msgpack.encode(about))}
        heads = [
            (name, str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in parts.items()
        ]
        flat = [t.reshape(-1).contiguous().view(torch.uint8).numpy().data for t in parts.values()]
        self.tell(Copy(heads), *flat)

    def tell(self, message: Message, *payload: Any) -> None:
        """Whatever else it has to know."""
        self._told += 1
        if self.state is not Copying.LOST:
            self._queue.append((message, payload))
        self._lock.notify_all()

    def end(self) -> None:
        """Tell nothing more."""
        self._over = True
        self._queue.clear()
        self._lock.notify_all()

    def run(self) -> None:
        """Tell it all, until the end or until it is lost."""
        wire: Channel | None = None
        try:
            wire = self._connect()
            while (found := self._next()) is not None:
                message, payload = found
                wire.timeout = self._timeout if isinstance(message, Copy) else COPY_SECONDS
                wire.send(message, *payload)
                reply = wire.receive()
                if not isinstance(reply, Done):
                    if isinstance(reply, Elsewhere):
                        self._fenced()
                    raise Gone("it obeys another primary, or none")
                self._note(message)
        except (OSError, SpartitoError) as error:
            with self._lock:
                if not self._over:
                    warn("the backup is lost: %s", error)
                self.state = Copying.LOST
                self._queue.clear()
                self._lock.notify_all()
        finally:
            if wire is not None:
                wire.close()

    def _next(self) -> tuple[Message, tuple[Any, ...]] | None:
        with self._lock:
            self._lock.wait_for(lambda: bool(self._queue) or self._over)
            return None if self._over else self._queue.popleft()

    def _note(self, message: Message) -> None:
        """The backup has it."""
        with self._lock:
            self._known += 1
            if isinstance(message, Copy) and self.state is Copying.BEHIND:
                self.state = Copying.WHOLE  # from now on replies wait
                self.tell(Whole())
            self._lock.notify_all()


def read_copy(copy: Copy, payload: memoryview) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What `BackupLink.all` was given. Raises `ProtocolError` for what does not fit."""
    tensors, at = {}, 0
    for name, dtype, shape in copy.tensors:
        need(dtype in ITEM_SIZES, "no such dtype")
        kind = dtype_of(dtype)
        end = at + kind.itemsize * int(torch.Size(shape).numel())
        need(end <= len(payload), "a copy that is not whole")
        data = torch.frombuffer(bytearray(payload[at:end]) or bytearray(1), dtype=torch.uint8)
        tensors[name] = data[: end - at].view(kind).view(shape)
        at = end
    need(at == len(payload) and "about" in tensors, "a copy that is not whole")
    about: dict[str, Any] = msgspec.msgpack.decode(tensors.pop("about").numpy().tobytes())
    return tensors, about


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
