"""How tensors lie in memory: without gaps, apart, alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

SAMPLE = 16  # elements of a section
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def sample(tensor: Tensor) -> memoryview:
    """The bits of some elements of a tensor that has no gaps, evenly spaced in its memory."""
    flat = tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    bits = flat.view(_BITS[min(tensor.itemsize, 8)])
    return bits[:: max(1, bits.numel() // SAMPLE)].numpy().data


def dense(tensor: Tensor) -> tuple[torch.Size, tuple[int, ...]]:
    """The shape and the strides of a tensor that is laid out as this one, without gaps."""
    made = torch.empty_like(tensor, device="meta", memory_format=torch.preserve_format)
    return made.shape, made.stride()


def shaped(flat: Tensor, like: Tensor) -> Tensor:
    """``flat``, with as many elements, shaped and laid out as ``like``, a dense one."""
    return flat.as_strided(like.shape, like.stride(), flat.storage_offset())


def viewing(like: Tensor) -> Callable[[torch.UntypedStorage], Tensor]:
    """What makes of other memory the tensor that ``like`` is of its own."""
    form = like.storage_offset(), like.size(), like.stride()
    empty, conjugate, negative = like.new_empty(0), like.is_conj(), like.is_neg()

    def view(memory: torch.UntypedStorage) -> Tensor:
        found = empty.new_empty(0).set_(memory, *form)
        found = torch._neg_view(found) if negative else found
        return found.conj() if conjugate else found

    return view


def overlap(blocks: Sequence[tuple[int, int]]) -> bool:
    """Whether two blocks of memory, ``(address, bytes)``, have bytes in common."""
    filled = sorted(block for block in blocks if block[1])
    return any(one[0] + one[1] > two[0] for one, two in pairwise(filled))


def is_like(value: object, parameter: Tensor) -> bool:
    """Whether a state has a number for each element of its parameter, laid out as these."""
    return (
        type(value) is Tensor
        and value.is_cpu
        and value.dtype == parameter.dtype
        and value.shape == parameter.shape
        and value.stride() == parameter.stride()
    )
