"""All that a server holds, on its way from the chief and to it: values, optimizer state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from spartito.ps.protocol.layout import Span
from spartito.ps.protocol.messages import LoadState, Message, State
from spartito.ps.protocol.slots import State as OptimizerState

STATE_FACTOR = 8  # the optimizer's tensors are at most so many times the values

MOST_KEYS = 64 << 20
"""Bytes of a server's applied work items."""


def state_limit(span: Span) -> int:
    """The most bytes of the optimizer's state that are taken for the values of ``span``."""
    return STATE_FACTOR * span.size + (1 << 20)


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
