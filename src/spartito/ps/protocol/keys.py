"""Which pieces a shard has applied: a bit for each, so that a push works once."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

import numpy as np

from spartito.ps.protocol.fields import MOST, Number

Key = tuple[Number, Number, Number, Number]
"""(stream, pass, step, slice)"""

CHUNK = 512
"""Pieces whose bits are kept together: nobody can make us keep more by one key."""

ROW = struct.Struct(f"<qqq{CHUNK // 8}s")
"""Stream, pass, number of the chunk, its bits."""


class Keys:
    """A set of keys of ``slices`` slices: a bit per piece, in chunks that come as they are used."""

    def __init__(self, slices: int) -> None:
        self.slices = slices
        self._chunks: dict[tuple[int, int, int], bytearray] = {}

    def __contains__(self, key: Key) -> bool:
        chunk, place = self._where(key)
        bits = self._chunks.get(chunk)
        return bits is not None and bool(bits[place >> 3] >> (place & 7) & 1)

    def __len__(self) -> int:
        return sum(int.from_bytes(bits, "little").bit_count() for bits in self._chunks.values())

    def __iter__(self) -> Iterator[Key]:
        for (stream, number, chunk), bits in self._chunks.items():
            for place in range(CHUNK):
                if bits[place >> 3] >> (place & 7) & 1:
                    yield (stream, number, *divmod(chunk * CHUNK + place, self.slices))

    def accepts(self, key: Key) -> bool:
        """Whether there may be such a piece."""
        _, _, step, index = key
        return min(key) >= 0 and index < self.slices and step * self.slices + index < MOST

    def add(self, keys: Iterable[Key]) -> int:
        """Take note of them; answers how many are new."""
        new = 0
        for key in keys:
            chunk, place = self._where(key)
            bits = self._chunks.get(chunk)
            if bits is None:
                bits = self._chunks[chunk] = bytearray(CHUNK // 8)
            bit = 1 << (place & 7)
            new += not bits[place >> 3] & bit
            bits[place >> 3] |= bit
        return new

    def missing(
        self, stream: int, number: int, index: int, start: int, stop: int
    ) -> list[tuple[int, int]]:
        """The ranges of steps of ``[start, stop)`` of slice ``index`` of a pass that are not in."""
        first, last = start * self.slices // CHUNK, -(-stop * self.slices // CHUNK)
        none = bytes(CHUNK // 8)
        chunks = [self._chunks.get((stream, number, one), none) for one in range(first, last)]
        places = np.unpackbits(np.frombuffer(b"".join(chunks), np.uint8), bitorder="little")
        known = places[start * self.slices + index - first * CHUNK :: self.slices][: stop - start]
        absent = np.ones(stop - start + 2, np.int8)  # between two ends, so that ranges have edges
        absent[[0, -1]] = 0
        absent[1 : 1 + len(known)] -= known.astype(np.int8)
        edges = np.flatnonzero(np.diff(absent)) + start
        return [(int(first), int(last)) for first, last in edges.reshape(-1, 2)]

    def dump(self) -> bytes:
        """All of it; nothing for none."""
        return b"".join(ROW.pack(*chunk, bits) for chunk, bits in sorted(self._chunks.items()))

    @classmethod
    def load(cls, slices: int, dumped: bytes) -> Keys:
        """What `dump` answered; `struct.error` for anything else."""
        made = cls(slices)
        for stream, number, chunk, bits in ROW.iter_unpack(dumped):
            made._chunks[stream, number, chunk] = bytearray(bits)
        return made

    def _where(self, key: Key) -> tuple[tuple[int, int, int], int]:
        """The chunk of a piece, and the place of its bit there."""
        stream, number, step, index = key
        chunk, place = divmod(step * self.slices + index, CHUNK)
        return (stream, number, chunk), place
