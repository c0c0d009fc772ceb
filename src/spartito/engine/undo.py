"""A step that is made again: what its forward pass has changed in the model is put back."""

from __future__ import annotations

import torch
from torch import Tensor, nn

LARGE = 1 << 16
"""Elements from which on a buffer is copied only when an operation has written into it.

torch's kernels update the statistics of BatchNorm, which are smaller, without a trace.
"""


class Undo:
    """Copies of a model's buffers, from before the step that is under way.

    Args:
        model: Whose buffers.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._buffers: list[Tensor] = []
        self._copies: list[Tensor] = []
        self._versions: list[int] = []
        self._is_under_way = False

    def begin(self, looks: bool) -> None:
        """A step begins; ``looks``: the model may have other buffers than in the last one."""
        if self._is_under_way:
            return
        self._is_under_way = True
        if looks or not self._buffers:
            found = list(self._model.buffers())
            if list(map(id, found)) != list(map(id, self._buffers)):
                self._buffers = found
                self._copies = [buffer.detach().clone() for buffer in found]
                self._versions = [buffer._version for buffer in found]
                return
        if not self._buffers:
            return
        versions = [buffer._version for buffer in self._buffers]
        changed = [
            number
            for number, buffer in enumerate(self._buffers)
            if versions[number] != self._versions[number] or buffer.numel() < LARGE
        ]
        self._copy(self._buffers, self._copies, changed)
        self._versions = versions

    def end(self) -> None:
        """It is complete: the update is made."""
        self._is_under_way = False

    def undo(self) -> None:
        """Put back what the step that is under way has changed, if there is one."""
        if self._is_under_way:
            self._copy(self._copies, self._buffers, range(len(self._buffers)))
            self._versions = [buffer._version for buffer in self._buffers]
        self._is_under_way = False

    @staticmethod
    @torch.no_grad()
    def _copy(source: list[Tensor], into: list[Tensor], numbers: range | list[int]) -> None:
        if numbers:
            torch._foreach_copy_(
                [into[number].detach() for number in numbers],
                [source[number].detach() for number in numbers],
            )
