"""A step that is made again: what its forward pass has changed in the model is put back."""

from __future__ import annotations

import torch
from torch import Tensor, nn

Slots = list[tuple[dict[str, Tensor | None], str]]
"""Where buffers are: in which module's dict, by which name."""

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
        self._slots: Slots = []
        self._looked = False
        self._buffers: list[Tensor | None] = []
        self._copies: list[Tensor | None] = []
        self._versions: list[int] = []
        self._is_under_way = False

    def begin(self, looks: bool) -> None:
        """A step begins; ``looks``: the model may have other modules than in the last one."""
        if self._is_under_way:
            return
        self._is_under_way = True
        if looks or not self._looked:
            self._looked = True
            modules = self._model.modules()
            slots = [(each._buffers, name) for each in modules for name in each._buffers]
            if not _same(slots, self._slots):
                self._slots, self._buffers = slots, [None] * len(slots)
                self._copies, self._versions = list(self._buffers), [-1] * len(slots)
        elif not self._slots:
            return
        known: list[tuple[Tensor, Tensor]] = []
        for number, (module, name) in enumerate(self._slots):
            buffer, before = module.get(name), self._copies[number]
            if buffer is None:
                self._copies[number] = None
            elif before is None or buffer is not self._buffers[number]:  # modules may replace them
                self._copies[number] = buffer.detach().clone()
            elif buffer._version != self._versions[number] or buffer.numel() < LARGE:
                known.append((before, buffer))
            self._buffers[number] = buffer
            self._versions[number] = -1 if buffer is None else buffer._version
        _copy(known)

    def end(self) -> None:
        """It is complete: the update is made."""
        self._is_under_way = False

    def undo(self) -> None:
        """Put back what the step that is under way has changed, if there is one."""
        if self._is_under_way:
            pairs = zip(self._buffers, self._copies, strict=True)
            _copy([(to, copy) for to, copy in pairs if to is not None and copy is not None])
            for (module, name), buffer in zip(self._slots, self._buffers, strict=True):
                module[name] = buffer
            self._versions = [-1] * len(self._versions)  # what was written is looked at again
        self._is_under_way = False


def _same(one: Slots, other: Slots) -> bool:
    """Whether these are the same slots, whatever lies there."""
    alike = (a is b and m == n for (a, m), (b, n) in zip(one, other, strict=False))
    return len(one) == len(other) and all(alike)


@torch.no_grad()
def _copy(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Copy into the first of each pair the second."""
    if pairs:
        into, source = zip(*pairs, strict=True)
        torch._foreach_copy_([each.detach() for each in into], [each.detach() for each in source])
