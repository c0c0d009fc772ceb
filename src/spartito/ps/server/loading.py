"""What a server is given at the start, until all of it has come."""

from __future__ import annotations

from math import prod

import msgspec
import torch

from spartito.decoders import msgpack_decoder
from spartito.ps.protocol.layout import ITEM_SIZES
from spartito.ps.protocol.memory import dtype_of
from spartito.ps.protocol.messages import Load, LoadState
from spartito.ps.protocol.slots import State as OptimizerState
from spartito.ps.protocol.timetable import Timetable
from spartito.ps.protocol.transfer import state_limit
from spartito.ps.server.shard import Shard
from spartito.wire.frames import ProtocolError, need


class Loading:
    """What has come of the values and the state for ``shard``; nothing of it is used before all.

    Raises `ProtocolError` for what does not fit.
    """

    def __init__(self, shard: Shard, load: Load, payload: memoryview) -> None:
        size = shard.span.size
        need(len(payload) == size, f"{size} bytes were expected, {len(payload)} came")
        need(shard.accepts(load.settings), "the optimizer has no such options")
        self.job = load.job
        self._shard, self._load = shard, load
        self._values = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        self._state: OptimizerState = {}
        self._bytes = 0

    @property
    def is_whole(self) -> bool:
        """Whether all has come."""
        return len(self._state) >= self._load.tensors

    def add(self, message: LoadState, payload: memoryview) -> None:
        """One tensor of the optimizer's state."""
        known = message.slot < len(self._shard.slots) and message.dtype in ITEM_SIZES
        need(known and min(message.shape, default=1) > 0, "no such state")
        size, most = (
            prod(message.shape) * ITEM_SIZES[message.dtype],
            state_limit(self._shard.span),
        )
        need(len(payload) == size, f"{size} bytes of state were expected, {len(payload)} came")
        self._bytes += size
        need(self._bytes <= most, f"more than {most} bytes of state came")
        data = torch.frombuffer(bytearray(payload), dtype=dtype_of(message.dtype))
        self._state[message.slot, message.key] = data.view(message.shape)

    def finish(self) -> None:
        """Give it all to the shard."""
        self._shard.values.copy_(self._values)
        self._shard.set(self._load.settings)
        self._shard.load_state(self._state)


def read_timetable(payload: memoryview, shard: Shard) -> Timetable:
    """A timetable of the options of ``shard``; `ProtocolError` for anything else."""
    try:
        found: Timetable = msgpack_decoder(Timetable).decode(payload)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolError(f"a timetable that is none came: {error}") from error
    need(all(map(shard.accepts, found.rows)), "the optimizer has no such options")
    return found
