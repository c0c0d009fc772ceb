"""How the bytes of a span travel: as they are, or with floating numbers in half the bytes."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from spartito.errors import UserError
from spartito.ps.layout import BUFFER, LINE, Layout, Span, runs
from spartito.ps.vector import dtype_of

WIRE_DTYPES = ("bfloat16", "float16")


class Codec(Protocol):
    """Memory of a span, uint8 ``(bytes,)``, to and from what the wire carries."""

    size: int
    """Bytes on the wire."""

    def encode(self, memory: Tensor) -> memoryview:
        """What to send; valid until the next call."""
        ...

    def room(self, memory: Tensor) -> memoryview:
        """Where to receive it."""
        ...

    def decode(self, memory: Tensor) -> None:
        """Bring what was received into ``memory``."""
        ...


class PlainCodec:
    """The bytes themselves."""

    def __init__(self, span: Span) -> None:
        self.size = span.size

    def encode(self, memory: Tensor) -> memoryview:
        """The memory itself."""
        return memory.numpy().data

    def room(self, memory: Tensor) -> memoryview:
        """The memory itself."""
        return memory.numpy().data

    def decode(self, memory: Tensor) -> None:
        """It is there already."""


class NarrowCodec:
    """Learned numbers of float32 and float64 travel as ``dtype``; all else as it is."""

    def __init__(self, layout: Layout, span: Span, dtype: torch.dtype) -> None:
        self._parts: list[tuple[slice, torch.dtype, slice, torch.dtype]] = []
        end = 0
        for run in runs(layout, span):
            own = dtype_of(run.dtype)
            narrowed = run.group != BUFFER and own in (torch.float32, torch.float64)
            sent = dtype if narrowed else own  # a statistic moves by less than such a rounding
            size = (run.stop - run.start) // own.itemsize * sent.itemsize
            here = slice(run.start - span.start, run.stop - span.start)
            self._parts.append((here, own, slice(end, end + size), sent))
            end += -(-size // LINE) * LINE
        self.size = end
        self._out = torch.zeros(end, dtype=torch.uint8)
        self._in = torch.zeros(end, dtype=torch.uint8)

    def encode(self, memory: Tensor) -> memoryview:
        """The numbers, rounded."""
        for here, own, there, sent in self._parts:
            values = memory[here].view(own)
            if sent == torch.float16 != own:
                values = _within_range(values)
            self._out[there].view(sent).copy_(values)
        return self._out.numpy().data

    def room(self, memory: Tensor) -> memoryview:
        """A buffer of its own."""
        return self._in.numpy().data

    def decode(self, memory: Tensor) -> None:
        """The numbers in the parameters' own dtype."""
        for here, own, there, sent in self._parts:
            memory[here].view(own).copy_(self._in[there].view(sent))


def _within_range(values: Tensor) -> Tensor:
    """Finite numbers beyond what float16 can say become the largest that it can."""
    largest = torch.finfo(torch.float16).max
    return torch.where(values.isinf(), values, values.clamp(-largest, largest))


def make_codec(layout: Layout, span: Span, wire_dtype: str | None) -> Codec:
    """How a span travels; ``wire_dtype`` None keeps every bit."""
    if wire_dtype is None:
        return PlainCodec(span)
    return NarrowCodec(layout, span, dtype_of(wire_dtype))


def check_wire_dtype(name: str | None) -> str | None:
    """torch's name of the dtype: ``bf16`` may be said for ``bfloat16``."""
    known = {"bf16": "bfloat16", "fp16": "float16"}
    found = known.get(name or "", name)
    if found is not None and found not in WIRE_DTYPES:
        raise UserError(
            f"wire_dtype={name!r}", "Known: bf16 (bfloat16), fp16 (float16); None keeps all bits."
        )
    return found
