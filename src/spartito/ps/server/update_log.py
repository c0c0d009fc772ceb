"""A record of every update of a shard, so that its values can be computed again from nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from spartito.ps.protocol.memory import allocate
from spartito.ps.protocol.options import settings
from spartito.ps.server.shard import Shard


class Entry(msgspec.Struct, frozen=True):
    """One update: the optimizer's options, and what `Shard.update` took."""

    settings: list[dict[str, Any]]
    absent: list[int]
    rate: float
    fresh: float
    gradient: bytes


class PushLog:
    """Updates in a file, in their order; a restarted server cuts off what its snapshot lacks."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "ab")  # noqa: SIM115 - open as long as the server serves

    @property
    def position(self) -> int:
        """Bytes so far."""
        return self._file.tell()

    def append(
        self, shard: Shard, gradient: Tensor, absent: Sequence[int], rate: float, fresh: float
    ) -> None:
        """Record an update that is about to be made."""
        data = gradient.numpy().tobytes()
        entry = Entry(settings(shard.optimizer), list(absent), rate, fresh, data)
        record = msgspec.msgpack.encode(entry)
        self._file.write(len(record).to_bytes(8, "little") + record)
        self._file.flush()

    def cut(self, position: int) -> None:
        """Forget what came after ``position``."""
        self._file.truncate(position)
        self._file.seek(position)

    def close(self) -> None:
        """Record nothing more."""
        self._file.close()


def replay(path: Path, shard: Shard) -> int:
    """Make the updates that were recorded on ``shard``; returns how many."""
    count, memory = 0, allocate(shard.span)
    for entry in entries(path):
        shard.set(entry.settings)
        memory.copy_(torch.frombuffer(bytearray(entry.gradient), dtype=torch.uint8))
        shard.update(memory, entry.absent, entry.rate, entry.fresh)
        count += 1
    return count


def entries(path: Path) -> Iterator[Entry]:
    """The records of a file."""
    with open(path, "rb") as file:
        while head := file.read(8):
            yield msgspec.msgpack.decode(file.read(int.from_bytes(head, "little")), type=Entry)
