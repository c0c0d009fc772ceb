"""Memory of a span: how it is allocated, aligned, shared and seen as tensors."""

from __future__ import annotations

from itertools import count

import torch
from torch import Tensor

from spartito.errors import UserError
from spartito.ps.protocol.layout import Span


def dtype_of(name: str) -> torch.dtype:
    """torch's dtype of this name: ``float32``."""
    found: torch.dtype = getattr(torch, name)
    return found


def is_summed(name: str) -> bool:
    """Whether changes of a buffer of this dtype add up: it counts something."""
    return name.startswith(("int", "uint8"))


def is_mixed(name: str) -> bool:
    """Whether buffers of this dtype are statistics, whose values are mixed.

    Of what is neither summed nor mixed the newest value counts.
    """
    return name.startswith(("float", "bfloat", "complex")) and not name.startswith("float8")


def mix(values: Tensor, others: Tensor, weight: float) -> None:
    """Move ``values`` by ``weight``, 0 to 1, of the way to ``others``, and never beyond.

    What is equal stays as it is, bit by bit; what is not finite is taken from ``others``.
    """
    mixed = values.lerp(others, weight)
    values.copy_(torch.where(values.isfinite() & (values != others), mixed, others))


PAGE = 4096
STRIDE = 512
"""Bytes by which tensors that an update reads together lie apart within their pages: where all
begin at the same offset in a page, a core takes each store for one that the next load waits for
(4K aliasing), and the update takes up to 2.7 times as long."""
_turns = count()


def allocate(span: Span) -> Tensor:
    """Zeroed memory for a span, uint8 ``(bytes,)``, aligned so that all its runs are.

    Each call begins at another offset in its page; see `STRIDE`.
    """
    area = torch.zeros(span.size + 2 * PAGE, dtype=torch.uint8)
    first = -area.data_ptr() % PAGE + next(_turns) * STRIDE % PAGE + span.phase
    return area[first : first + span.size]


def apart(tensor: Tensor) -> Tensor:
    """A flat copy of ``tensor`` that begins at an offset in its page where others do not."""
    memory = allocate(Span(0, tensor.nbytes)).view(tensor.dtype)
    return memory.copy_(tensor.reshape(-1))


def flat(tensor: Tensor) -> Tensor:
    """The elements of a dense tensor in the order in which they lie in memory, as a view."""
    order = sorted(
        (stride, size)
        for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
        if size > 1
    )
    expected = 1
    for stride, size in order:
        if stride != expected and tensor.numel():
            raise UserError(
                f"a tensor of shape {tuple(tensor.shape)} with strides {tensor.stride()}",
                "Parameters on a server are dense: use .contiguous().",
            )
        expected *= size
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


LOCAL = "ps memory"
"""The purpose of the second connection of a task that shares memory."""


def areas(span: Span) -> tuple[int, int, int]:
    """Where a shared segment has its push area and its pull area, and its size, in bytes."""
    area = (-(-span.size // PAGE) + 1) * PAGE  # each begins at another offset in its page
    return STRIDE + span.phase, area + PAGE + 3 * STRIDE + span.phase, 2 * (area + PAGE)
