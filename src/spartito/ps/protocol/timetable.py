"""The options of an optimizer's groups by global step: the chief writes them, servers obey.

A server knows best which global step it is at, and the chief alone has a schedule that counts.
So the chief looks some way ahead and tells each server what options hold at which step; whoever
pushes has no say in it.
"""

from __future__ import annotations

from typing import Any

import msgspec

from spartito.decoders import msgpack_decoder
from spartito.ps.protocol.fields import Count

Row = list[dict[str, Any]]
"""For each parameter group some of its options by name."""


class Timetable(msgspec.Struct, frozen=True):
    """``rows[i]`` holds at global step ``first + i``; the first one before, the last one after."""

    first: Count = 0
    rows: list[Row] = []

    def at(self, step: int) -> Row | None:
        """The options of a step; None where nothing was told."""
        if not self.rows:
            return None
        return self.rows[min(max(step - self.first, 0), len(self.rows) - 1)]


def decode_timetable(data: bytes) -> Timetable:
    """What `msgspec.msgpack.encode` made of one."""
    found: Timetable = msgpack_decoder(Timetable).decode(data)
    return found
