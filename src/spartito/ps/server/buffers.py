"""Memory for copies, kept from one copy to the next."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class BufferPool:
    """Copies tensors into the memory of copies that are needed no more.

    Under a lock that is worth it: the first touch of fresh pages takes longer than the copy.
    Thread-safe, as long as each copy is given back once.
    """

    def __init__(self) -> None:
        self._free: list[dict[str, Tensor]] = []

    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies by the same names; the caller has them until `give_back`."""
        memory = self._free.pop() if self._free else {}
        return {name: _copied(tensor, memory.get(name)) for name, tensor in tensors.items()}

    def give_back(self, copies: dict[str, Tensor]) -> None:
        """Nobody looks at these ``copies`` any more."""
        self._free.append(copies)


def _copied(tensor: Tensor, memory: Tensor | None) -> Tensor:
    alike = memory is not None and (memory.shape, memory.dtype) == (tensor.shape, tensor.dtype)
    if memory is None or not alike or memory.stride() != tensor.stride():
        memory = torch.empty_like(tensor)
    return memory.copy_(tensor)
