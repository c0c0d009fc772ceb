"""How the bytes of a span travel: as they are, or with floating numbers in half the bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator

import torch
from torch import Tensor

from spartito.errors import UserError
from spartito.ps.protocol.layout import LINE, Layout, Span, runs
from spartito.ps.protocol.memory import dtype_of

WIRE_DTYPES = ("bfloat16", "float16")


class Codec(ABC):
    """Memory of a span, uint8 ``(bytes,)``, to and from what the wire carries.

    Runs, by their index in the span, can be left out on both ends: the others travel in a row.
    """

    size: int
    """Bytes on the wire, with nothing left out."""
    _travels: list[slice]
    """Where each run is in these bytes."""

    def size_without(self, left_out: Collection[int]) -> int:
        """Bytes on the wire without these runs."""
        if not left_out:
            return self.size
        there = (p for number, p in enumerate(self._travels) if number not in left_out)
        return sum(part.stop - part.start for part in there)

    def encode(self, memory: Tensor, left_out: Collection[int] = ()) -> list[memoryview]:
        """What to send; valid until the next call."""
        self._narrow(memory, left_out)
        whole = self.buffer(memory, sending=True)
        if not left_out:
            return [whole]
        return [whole[p] for number, p in enumerate(self._travels) if number not in left_out]

    def decode(self, memory: Tensor, payload: memoryview, left_out: Collection[int] = ()) -> None:
        """Bring what was received into ``memory``; what is left out stays as it is."""
        buffer, at = self.buffer(memory), 0
        for number, part in enumerate(self._travels if left_out else ()):
            if number not in left_out:
                size = part.stop - part.start
                buffer[part] = payload[at : at + size]
                at += size
        self._widen(memory, left_out)

    @abstractmethod
    def buffer(self, memory: Tensor, sending: bool = False) -> memoryview:
        """Where to receive it, if nothing is left out."""

    @abstractmethod
    def _narrow(self, memory: Tensor, left_out: Collection[int]) -> None:
        """Make ready what is sent."""

    @abstractmethod
    def _widen(self, memory: Tensor, left_out: Collection[int]) -> None:
        """Make numbers of what was received."""


class PlainCodec(Codec):
    """The bytes themselves."""

    def __init__(self, layout: Layout, span: Span) -> None:
        self.size = span.size
        self._travels = [
            slice(run.start - span.start, run.stop - span.start) for run in runs(layout, span)
        ]

    def buffer(self, memory: Tensor, sending: bool = False) -> memoryview:
        """The memory itself."""
        return memory.numpy().data

    def _narrow(self, memory: Tensor, left_out: Collection[int]) -> None:
        """It is ready."""

    def _widen(self, memory: Tensor, left_out: Collection[int]) -> None:
        """It is there already."""


class NarrowCodec(Codec):
    """Learned numbers of float32 and float64 travel as ``dtype``; all else as it is."""

    def __init__(self, layout: Layout, span: Span, dtype: torch.dtype) -> None:
        self._kinds: list[tuple[slice, torch.dtype, torch.dtype]] = []
        self._travels = []
        end = 0
        for run in runs(layout, span):
            own = dtype_of(run.dtype)
            narrowed = run.learns and own in (torch.float32, torch.float64)
            sent = dtype if narrowed else own  # a statistic moves by less than such a rounding
            size = (run.stop - run.start) // own.itemsize * sent.itemsize
            self._kinds.append((slice(run.start - span.start, run.stop - span.start), own, sent))
            self._travels.append(slice(end, end + size))
            end += -(-size // LINE) * LINE
        self.size = end
        self._out = torch.zeros(end, dtype=torch.uint8)
        self._in = torch.zeros(end, dtype=torch.uint8)

    def buffer(self, memory: Tensor, sending: bool = False) -> memoryview:
        """A buffer of its own for each direction."""
        found: memoryview = (self._out if sending else self._in).numpy().data
        return found

    def _narrow(self, memory: Tensor, left_out: Collection[int]) -> None:
        for number, ((here, own, sent), there) in enumerate(self._parts()):
            if number not in left_out:
                values = memory[here].view(own)
                if sent == torch.float16 != own:
                    values = _within_range(values)
                self._out[there].view(sent).copy_(values)

    def _widen(self, memory: Tensor, left_out: Collection[int]) -> None:
        for number, ((here, own, sent), there) in enumerate(self._parts()):
            if number not in left_out:
                memory[here].view(own).copy_(self._in[there].view(sent))

    def _parts(self) -> Iterator[tuple[tuple[slice, torch.dtype, torch.dtype], slice]]:
        return zip(self._kinds, self._travels, strict=True)


def _within_range(values: Tensor) -> Tensor:
    """Finite numbers beyond what float16 can say become the largest that it can."""
    largest = torch.finfo(torch.float16).max
    return torch.where(values.isinf(), values, values.clamp(-largest, largest))


def make_codec(layout: Layout, span: Span, wire_dtype: str | None) -> Codec:
    """How a span travels; ``wire_dtype`` None keeps every bit."""
    if wire_dtype is None:
        return PlainCodec(layout, span)
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
