"""What a loss module has gathered, as a centre that follows all outputs: checkpoints keep it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn


class LossBuffers:
    """The buffers of a loss that have other values than when its training was made.

    Those that nothing has changed are the script's, as weights of classes.

    Args:
        loss: The loss; one that is no module has none.
    """

    def __init__(self, loss: object) -> None:
        self._loss = loss if isinstance(loss, nn.Module) else nn.Module()
        self._first = {name: each.detach().clone() for name, each in self._buffers().items()}

    def changed(self) -> dict[str, Tensor]:
        """Those, by name."""
        return {
            name: each.detach()
            for name, each in self._buffers().items()
            if name not in self._first or not torch.equal(each, self._first[name])
        }

    def take(self, saved: Mapping[str, Tensor]) -> None:
        """Have what `changed` returned.

        Args:
            saved: The same, from a checkpoint. What another loss has is left out: who only predicts
                gives none.
        """
        own = self._buffers()
        for name, value in saved.items():
            if (like := own.get(name)) is None:
                continue
            path, _, key = name.rpartition(".")
            made = value.to(like.device, like.dtype, copy=True)
            self._loss.get_submodule(path)._buffers[key] = made

    def _buffers(self) -> dict[str, Tensor]:
        """Those that checkpoints of a module have."""
        return {
            f"{path}.{name}".removeprefix("."): each
            for path, module in self._loss.named_modules()
            for name, each in module._buffers.items()
            if each is not None and name not in module._non_persistent_buffers_set
        }
