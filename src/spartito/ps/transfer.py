"""All that a server holds, on its way from the chief and to it: values, optimizer state."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import torch
from torch import Tensor

from spartito.ps.layout import ITEM_SIZES, Span
from spartito.ps.messages import Load, LoadState, Message, State
from spartito.ps.shard import Shard
from spartito.ps.shard import State as OptimizerState
from spartito.ps.vector import dtype_of
from spartito.ps.wire import need

STATE_ROOM = 8  # the optimizer's tensors are at most so many times the values


def room_for_state(span: Span) -> int:
    """The most bytes of the optimizer's state that are taken for the values of ``span``."""
    return STATE_ROOM * span.size + (1 << 20)


def state_message(slot: int, key: str, value: Tensor) -> tuple[LoadState, memoryview]:
    """One tensor of an optimizer's state, as a message and its payload."""
    data = value.detach().reshape(-1).contiguous().view(torch.uint8)
    dtype = str(value.dtype).removeprefix("torch.")
    return LoadState(slot, key, dtype, list(value.shape)), data.numpy().data


def state_messages(
    values: Tensor, state: OptimizerState, options: list[dict[str, Any]]
) -> Iterator[tuple[Message, memoryview]]:
    """All that a shard holds: `State` with the values, and a message per tensor."""
    yield State(len(state), options), values.numpy().data
    for (slot, key), value in state.items():
        yield state_message(slot, key, value)


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
            room_for_state(self._shard.span),
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
