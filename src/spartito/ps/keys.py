"""Which pieces a shard has applied: a bit for each, so that a push works once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

Key = tuple[int, int, int, int]
"""(stream, pass, step, slice)"""

MOST = 1 << 30
"""Pieces of a pass: 128 MiB of bits."""


class Keys:
    """A set of keys of ``slices`` slices, grown as steps come; a bit per piece."""

    def __init__(self, slices: int) -> None:
        self.slices = slices
        self._bits: dict[tuple[int, int], bytearray] = {}

    def __contains__(self, key: Key) -> bool:
        stream, number, step, index = key
        bits = self._bits.get((stream, number), b"")
        place = step * self.slices + index
        return place >> 3 < len(bits) and bool(bits[place >> 3] >> (place & 7) & 1)

    def __len__(self) -> int:
        return sum(int.from_bytes(bits, "little").bit_count() for bits in self._bits.values())

    def __iter__(self) -> Iterator[Key]:
        for (stream, number), bits in self._bits.items():
            for place in range(8 * len(bits)):
                if bits[place >> 3] >> (place & 7) & 1:
                    yield (stream, number, *divmod(place, self.slices))

    def accepts(self, key: Key) -> bool:
        """Whether there may be such a piece; nobody can make us allocate more than `MOST` bits."""
        stream, number, step, index = key
        return (
            min(key) >= 0
            and max(stream, number) < MOST
            and index < self.slices
            and step * self.slices + index < MOST
        )

    def add(self, keys: Iterable[Key]) -> int:
        """Take note of them; answers how many are new."""
        new = 0
        for stream, number, step, index in keys:
            bits = self._bits.setdefault((stream, number), bytearray())
            place = step * self.slices + index
            if place >> 3 >= len(bits):
                bits.extend(bytes(max(64, (place >> 3) + 1 - len(bits))))
            bit = 1 << (place & 7)
            new += not bits[place >> 3] & bit
            bits[place >> 3] |= bit
        return new

    def missing(
        self, stream: int, number: int, index: int, start: int, stop: int
    ) -> list[tuple[int, int]]:
        """The ranges of steps of ``[start, stop)`` of slice ``index`` of a pass that are not in."""
        bits = np.frombuffer(self._bits.get((stream, number), b""), np.uint8)
        known = np.unpackbits(bits, bitorder="little")[index :: self.slices][start:stop]
        absent = np.ones(stop - start + 2, np.int8)  # between two ends, so that ranges have edges
        absent[[0, -1]] = 0
        absent[1 : 1 + len(known)] -= known.astype(np.int8)
        edges = np.flatnonzero(np.diff(absent)) + start
        return [(int(first), int(last)) for first, last in edges.reshape(-1, 2)]

    def dump(self) -> dict[str, bytes]:
        """The bits of each pass, by ``stream/pass``."""
        return {f"{stream}/{number}": bytes(b) for (stream, number), b in self._bits.items()}

    @classmethod
    def load(cls, slices: int, dumped: dict[str, bytes]) -> Keys:
        """What `dump` answered."""
        made = cls(slices)
        for name, bits in dumped.items():
            stream, _, number = name.partition("/")
            made._bits[int(stream), int(number)] = bytearray(bits)
        return made
