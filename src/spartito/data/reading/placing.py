"""Batches on their way to an accelerator, and what the host still knows of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from spartito.accelerators import kind_of
from spartito.data.reading.collate import rows

STAGED = 1 << 16
"""Bytes that a driver takes along at once; a copy of more from ordinary memory waits for it."""

FEW = 1 << 16
"""Labels that the host looks at itself: 30 us, as long as one operation takes to be launched."""


@dataclass(frozen=True)
class Placing:
    """How batches come to the device of a task."""

    device: torch.device

    @cached_property
    def moves(self) -> bool:
        """Whether batches have to leave the host's memory."""
        return self.device.type != "cpu"

    @cached_property
    def _narrows(self) -> bool:
        """Whether the device has no fp64, in which numpy makes its numbers."""
        return self.moves and not kind_of(self.device).has_doubles

    @cached_property
    def pins(self) -> bool:
        """Whether torch keeps pinned memory from which the device fetches a batch by itself."""
        return self.moves and kind_of(self.device).pins

    def ready(self, data: Any) -> Any:
        """A batch in memory that the device can fetch it from, in any thread.

        Args:
            data: As a `spartito.data.batch.Batch` has it.

        Returns:
            The batch; its large tensors in pinned memory, where there is such.
        """
        return rows(data, _pinned) if self.pins else data

    def move(self, data: Any) -> Any:
        """A batch on the device. What is there already stays as it is.

        Args:
            data: As a `spartito.data.batch.Batch` has it.

        Returns:
            The batch, which may still be on its way. `known_to_host` tells what its labels are.
        """
        return rows(data, self._moved) if self.moves else data

    def move_parts(self, tensor: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
        """The rows of several batches on the device, with one copy for all of them if that pays.

        Args:
            tensor: All rows.
            sizes: How many each batch has.

        Returns:
            The rows of each, which share memory and nothing else.
        """
        parts: Sequence[Tensor] = tensor.unsafe_split_with_sizes(sizes)
        if not self.moves:
            return parts
        if kind_of(self.device).compiles:  # one program for all, not one for each offset
            return [self._moved(part) for part in parts]
        found: Sequence[Tensor] = self._on_its_way(tensor).unsafe_split_with_sizes(sizes)
        for part, own in zip(found, parts, strict=True):
            _remember(part, own)
        return found

    def _moved(self, tensor: Tensor) -> Tensor:
        moved = self._on_its_way(tensor)
        if tensor.is_cpu:
            _remember(moved, tensor)
        return moved

    def _on_its_way(self, tensor: Tensor) -> Tensor:
        if self._narrows and tensor.dtype == torch.float64:  # no model there is in fp64
            tensor = tensor.float()
        begins = _pinned(tensor) if self.pins else tensor
        return begins.to(self.device, non_blocking=True)


HOST = Placing(torch.device("cpu"))
"""Batches stay where they are."""


def known_to_host(tensor: Tensor) -> Tensor | None:
    """The values of labels without waiting for a device.

    Args:
        tensor: On any device.

    Returns:
        A tensor in the host's memory: itself, or that from which it came to the device; None
        where there is none, or one of both was written to since.
    """
    if tensor.is_cpu:
        return tensor
    found = _origins.get(tensor)
    if found is None:
        return None
    origin, written, written_there = found
    unchanged = tensor._version == written_there and origin._version == written
    return origin if unchanged else None


_origins: Any = WeakTensorKeyDictionary()


def _remember(moved: Tensor, origin: Tensor) -> None:
    """Keep what ``moved`` came from, if it may be labels and the host can look at it quickly."""
    is_whole = not (moved.is_floating_point() or moved.is_complex())
    if not is_whole or moved.numel() > FEW or not origin.is_cpu:
        return
    if moved.is_inference() or origin.is_inference():  # torch does not tell who has written to it
        return
    _origins[moved] = origin, origin._version, moved._version


def _pinned(tensor: Tensor) -> Tensor:
    plain = tensor.is_cpu and type(tensor) is Tensor and tensor.layout == torch.strided
    if not plain or tensor.requires_grad or tensor.nbytes <= STAGED or tensor.is_pinned():
        return tensor
    return tensor.pin_memory()
