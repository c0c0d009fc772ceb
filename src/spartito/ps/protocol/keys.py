"""Which work items a shard has applied: a bit for each, so that a push works once."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

import numpy as np

from spartito.ps.protocol.fields import MOST, Number

Key = tuple[Number, Number, Number, Number]
"""(stream, pass, step, slice)"""

CHUNK = 512
"""Work items whose bits are kept together: nobody can make us keep more by one key."""

ROW = struct.Struct(f"<qqq{CHUNK // 8}s")
"""Stream, pass, number of the chunk, its bits."""


class Keys:
    """A set of keys of ``data_shards`` data shards: a bit each, in chunks made as they are used."""

    def __init__(self, data_shards: int) -> None:
        self.data_shards = data_shards
        self._chunks: dict[tuple[int, int, int], bytearray] = {}

    def __contains__(self, key: Key) -> bool:
        chunk, offset = self._where(key)
        bits = self._chunks.get(chunk)
        return bits is not None and bool(bits[offset >> 3] >> (offset & 7) & 1)

    def __len__(self) -> int:
        return sum(int.from_bytes(bits, "little").bit_count() for bits in self._chunks.values())

    def __iter__(self) -> Iterator[Key]:
        for (stream, number, chunk), bits in self._chunks.items():
            for offset in range(CHUNK):
                if bits[offset >> 3] >> (offset & 7) & 1:
                    yield (stream, number, *divmod(chunk * CHUNK + offset, self.data_shards))

    def accepts(self, key: Key) -> bool:
        """Whether there may be such a work item."""
        _, _, step, index = key
        return min(key) >= 0 and index < self.data_shards and step * self.data_shards + index < MOST

    def add(self, keys: Iterable[Key]) -> int:
        """Take note of them; returns how many are new."""
        new = 0
        for key in keys:
            chunk, offset = self._where(key)
            bits = self._chunks.get(chunk)
            if bits is None:
                bits = self._chunks[chunk] = bytearray(CHUNK // 8)
            bit = 1 << (offset & 7)
            new += not bits[offset >> 3] & bit
            bits[offset >> 3] |= bit
        return new

    def missing(
        self, stream: int, number: int, index: int, start: int, stop: int
    ) -> list[tuple[int, int]]:
        """The ranges of steps of ``[start, stop)`` of slice ``index`` of a pass that are not in."""
        first, last = start * self.data_shards // CHUNK, -(-stop * self.data_shards // CHUNK)
        none = bytes(CHUNK // 8)
        chunks = [self._chunks.get((stream, number, one), none) for one in range(first, last)]
        flags = np.unpackbits(np.frombuffer(b"".join(chunks), np.uint8), bitorder="little")
        known = flags[start * self.data_shards + index - first * CHUNK :: self.data_shards][
            : stop - start
        ]
        absent = np.ones(stop - start + 2, np.int8)  # between two ends, so that ranges have edges
        absent[[0, -1]] = 0
        absent[1 : 1 + len(known)] -= known.astype(np.int8)
        edges = np.flatnonzero(np.diff(absent)) + start
        return [(int(first), int(last)) for first, last in edges.reshape(-1, 2)]

    def dump(self) -> bytes:
        """All of it; nothing for none."""
        return b"".join(ROW.pack(*chunk, bits) for chunk, bits in sorted(self._chunks.items()))

    @classmethod
    def load(cls, data_shards: int, dumped: bytes) -> Keys:
        """What `dump` returned; `struct.error` for anything else."""
        made = cls(data_shards)
        for stream, number, chunk, bits in ROW.iter_unpack(dumped):
            made._chunks[stream, number, chunk] = bytearray(bits)
        return made

    def _where(self, key: Key) -> tuple[tuple[int, int, int], int]:
        """The chunk of a work item, and the offset of its bit there."""
        stream, number, step, index = key
        chunk, offset = divmod(step * self.data_shards + index, CHUNK)
        return (stream, number, chunk), offset
