"""Where every parameter lies in the flat vector, and which server holds what of it: pure.

All parameters and buffers form one vector of bytes. It is ordered by (is buffer, frozen, dtype,
parameter group), so that a server can run the optimizer on a few long tensors (runs) instead
of on many short ones, and that what does not change need not travel; each server holds one
contiguous span of it.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import groupby, islice
from math import prod

from spartito.errors import UserError

BUFFER = -1
"""The group of what no optimizer touches: BatchNorm's statistics and their like."""
STILL = -2
"""The group of parameters that the optimizer does not know."""
LINE = 64  # bytes: every run begins at a multiple, every cut inside a tensor is at one

ITEM_SIZES = {
    "bool": 1, "uint8": 1, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "uint16": 2, "int16": 2, "float16": 2, "bfloat16": 2,
    "uint32": 4, "int32": 4, "float32": 4,
    "uint64": 8, "int64": 8, "float64": 8, "complex64": 8, "complex128": 16,
}  # fmt: skip
"""Bytes of one element, by torch's name of the dtype without "torch."."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One parameter or buffer: its name, dtype, shape, and the optimizer's group of it.

    ``frozen`` has a group, but learned nothing when the vector was made.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    group: int
    frozen: bool = False

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """How many bytes it has; `UserError` for a dtype that cannot lie on a server."""
        if self.dtype not in ITEM_SIZES:
            raise UserError(
                f"{self.name} has dtype {self.dtype}, which cannot lie on a parameter server",
                f"Known: {', '.join(ITEM_SIZES)}.",
            )
        return self.numel * ITEM_SIZES[self.dtype]


class Layout:
    """The flat vector: entries sorted as above, in the given order inside of a run.

    Each run of one (frozen, dtype, group) starts at a multiple of 64 bytes, without gaps inside.
    """

    __slots__ = ("digest", "entries", "offsets", "size")

    entries: tuple[Entry, ...]
    """Sorted."""
    offsets: tuple[int, ...]
    """Where each entry begins, in bytes."""
    size: int
    """Bytes of the whole vector, a multiple of 64."""
    digest: str
    """A short hash of all names, dtypes, shapes and groups: what tasks compare."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self.entries = tuple(sorted(entries, key=_key))
        offsets: list[int] = []
        end = 0
        for _, run in groupby(self.entries, _key):
            end = _up(end)
            for entry in run:
                offsets.append(end)
                end += entry.nbytes
        self.offsets = tuple(offsets)
        self.size = _up(end)
        schema = [(e.name, e.dtype, e.shape, e.group, e.frozen) for e in self.entries]
        self.digest = sha256(json.dumps(schema).encode()).hexdigest()[:16]

    @property
    def learned_dtypes(self) -> list[str]:
        """Those of what an optimizer updates."""
        return [e.dtype for e in self.entries if not e.frozen and e.group != BUFFER]


@dataclass(frozen=True, slots=True)
class Span:
    """What one server holds: bytes ``start`` to ``stop`` of the flat vector.

    ``start`` need not be a multiple of anything but the element's size: memory that holds the
    span should begin `phase` bytes after a multiple of 64, so that all runs stay aligned.
    """

    start: int
    stop: int

    @property
    def size(self) -> int:
        """Bytes."""
        return self.stop - self.start

    @property
    def phase(self) -> int:
        """Bytes from the last multiple of 64 to ``start``."""
        return self.start % LINE


@dataclass(frozen=True, slots=True)
class Part:
    """Elements ``begin`` to ``end`` of the flattened tensor of entry number ``entry``."""

    name: str
    entry: int
    begin: int
    end: int
    offset: int
    """Bytes from the beginning of the flat vector (not of the span)."""


@dataclass(frozen=True, slots=True)
class Run:
    """Elements of one dtype and group without a gap: bytes ``start`` to ``stop`` of the vector."""

    dtype: str
    group: int
    start: int
    stop: int
    parts: tuple[Part, ...]

    @property
    def learns(self) -> bool:
        """Whether the optimizer knows it."""
        return self.group >= 0


def cut(layout: Layout, servers: int, min_bytes: int, whole: bool) -> tuple[Span, ...]:
    """Contiguous spans, one per server in order, that together are the vector; of similar size.

    A tensor is cut only where both parts keep at least ``min_bytes``, and never if ``whole``.
    Raises `UserError` when there is nothing left for some server.
    """
    if servers < 1:
        raise UserError(
            f"{servers} parameter servers: there must be at least one",
            "Start some with --ps, or name them in TF_CONFIG under 'ps'.",
        )
    tensors = [
        (offset, offset + entry.nbytes)
        for entry, offset in zip(layout.entries, layout.offsets, strict=True)
        if entry.numel
    ]
    least = layout.size if whole else max(0, min_bytes)
    latest = list(islice(_latest(tensors, least), servers))
    if len(latest) < servers:
        raise UserError(
            f"{servers} parameter servers for parameters that fill {len(latest)} "
            + ("(no tensor is cut)" if whole else f"(at least {min_bytes:,} bytes of a tensor)"),
            f"Start at most {len(latest)} with --ps"
            + (
                ": this optimizer works on whole tensors."
                if whole
                else f', or have tensors cut finer: servers={{"min_shard_bytes": N}}, '
                f"where N is less than {min_bytes}."
            ),
        )
    points = [0]
    for server in range(1, servers):
        target = layout.size * server // servers
        last = latest[servers - server - 1]
        fitting = [p for p in _points(tensors, least, points[-1], target) if points[-1] < p <= last]
        points.append(min([*fitting, last], key=lambda point: abs(point - target)))
    return tuple(Span(*ends) for ends in zip(points, [*points[1:], layout.size], strict=True))


def runs(layout: Layout, span: Span) -> tuple[Run, ...]:
    """What of each (dtype, group) lies in ``span``, in the vector's order."""
    parts: list[Part] = []
    first = max(0, bisect_right(layout.offsets, span.start) - 1)
    for index in range(first, len(layout.entries)):
        entry, offset = layout.entries[index], layout.offsets[index]
        if offset >= span.stop:
            break
        start, stop = max(span.start, offset), min(span.stop, offset + entry.nbytes)
        if start < stop:
            item = ITEM_SIZES[entry.dtype]
            begin, end = (start - offset) // item, (stop - offset) // item
            parts.append(Part(entry.name, index, begin, end, start))
    return tuple(
        _run(layout, tuple(group))
        for _, group in groupby(parts, lambda part: _key(layout.entries[part.entry]))
    )


def unused(found: Sequence[Run], absent: Collection[int]) -> frozenset[int]:
    """Which of these runs, by index, consist of ``absent`` entries alone."""
    missing = frozenset(absent)
    if not missing:
        return missing
    return frozenset(
        number
        for number, run in enumerate(found)
        if all(part.entry in missing for part in run.parts)
    )


def table(
    layout: Layout, spans: Sequence[Span], names: Sequence[str]
) -> list[tuple[str, str, str, str]]:
    """Who holds what, a row per server and tensor: server, tensor, which of it, size."""
    return [
        (name, part.name, *_holding(layout.entries[part.entry], part))
        for span, name in zip(spans, names, strict=True)
        for run in runs(layout, span)
        for part in run.parts
    ]


def _key(entry: Entry) -> tuple[bool, bool, str, int]:
    return (entry.group < 0, entry.frozen, entry.dtype, entry.group)


def _up(size: int) -> int:
    return -(-size // LINE) * LINE


def _down(size: int) -> int:
    return size // LINE * LINE


def _latest(tensors: Sequence[tuple[int, int]], least: int) -> Iterator[int]:
    """Offsets at which spans begin if each, from the last one on, is as short as it can be.

    The k-th of them is the latest offset from which on k spans can still be filled.
    """
    for begin, end in reversed(tensors):
        point = _down(end - max(least, 1))
        while point > begin and point - begin >= least:
            yield point
            point = _down(point - max(least, 1))
        yield begin


def _points(
    tensors: Sequence[tuple[int, int]], least: int, previous: int, target: int
) -> Iterator[int]:
    """Of each tensor its beginning, and the offset next to ``target`` at which it may be cut."""
    for begin, end in tensors:
        yield begin
        first, last = _up(max(begin, previous) + max(least, 1)), _down(end - max(least, 1))
        if first <= last:
            yield min(max(_down(target), first), last)


def _run(layout: Layout, parts: tuple[Part, ...]) -> Run:
    entry, last = layout.entries[parts[0].entry], parts[-1]
    stop = last.offset + (last.end - last.begin) * ITEM_SIZES[entry.dtype]
    return Run(entry.dtype, entry.group, parts[0].offset, stop, parts)


def _holding(entry: Entry, part: Part) -> tuple[str, str]:
    size = f"{(part.end - part.begin) * ITEM_SIZES[entry.dtype]:,} bytes"
    if part.end - part.begin == entry.numel:
        return "all", size
    row = prod(entry.shape[1:])
    if part.begin % row == 0 == part.end % row:
        return f"rows {part.begin // row}:{part.end // row} of {entry.shape[0]}", size
    return f"elements {part.begin}:{part.end} of {entry.numel}", size
