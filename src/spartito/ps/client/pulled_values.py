"""What a task has from the servers: what is written there beside them would be lost."""

from __future__ import annotations

import torch
from torch import Tensor

from spartito.errors import UserError
from spartito.names import listed
from spartito.ps.client.vector import Vector

MOST_NAMES = 4
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class PulledValues:
    """The parameters of a model, which the next values of the servers replace.

    Where a user's own code runs between two steps, as callbacks do, they are compared with what
    came.

    Args:
        vector: The model's tensors.
        name: The task, as messages name it.
    """

    def __init__(self, vector: Vector, name: str) -> None:
        self._name = name
        self._learned = [
            (entry.name, tensor)
            for entry, tensor in zip(vector.layout.entries, vector.tensors, strict=True)
            if entry.group >= 0 and not entry.frozen
        ]
        self._sums: list[int] = []
        self._watches = False
        self._learning: list[tuple[str, Tensor]] = []

    def watch(self, runs: bool, alone: bool) -> None:
        """From now on compare after each step, or no longer.

        Args:
            runs: Whether a user's code runs between steps.
            alone: Whether it runs here alone, as callbacks on the chief of several workers: then
                what learns now is to go on learning.
        """
        self._watches = runs
        self._learning = [pair for pair in self._learned if alone and pair[1].requires_grad]

    def note(self) -> None:
        """These are the servers' values."""
        self._sums = self._sums_now()

    def came(self) -> None:
        """New values have come; they are noted where somebody may change them."""
        self._sums = self._sums_now() if self._watches else []

    def _sums_now(self) -> list[int]:
        """Of each parameter the sum of its bits; read from a device at once."""
        if not self._learned:
            return []
        found: list[int] = torch.stack([_sum(tensor) for _, tensor in self._learned]).tolist()
        return found

    def check(self) -> None:
        """Refuse to replace what somebody has written.

        Raises:
            UserError: The values are not those that came, or here alone others learn.
        """
        now = self._sums_now() if self._sums else []  # where none were noted
        both = zip(self._learned, self._sums, now, strict=False)
        if written := [name for (name, _), before, after in both if before != after]:
            raise UserError(
                f"{listed(written, MOST_NAMES)} of the model changed on {self._name} between two "
                "steps under parameter_server: the servers hold the parameters, and their values "
                "replace what a callback or the script writes",
                "Write into parameters before the first step, load them by trainer.load_weights(), "
                "or take a synchronous strategy.",
            )
        if frozen := [name for name, tensor in self._learning if not tensor.requires_grad]:
            raise UserError(
                f"{listed(frozen, MOST_NAMES)} of the model was frozen on {self._name} during "
                "fit() under parameter_server: callbacks run there alone, and other workers go on "
                "learning it",
                "Freeze it before the Trainer is made, or take a synchronous strategy.",
            )


def _sum(tensor: Tensor) -> Tensor:
    """The sum of the values' bits, as whole numbers."""
    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    flat = plain.detach().contiguous().view(-1)
    return flat.view(_BITS[flat.element_size()]).sum(dtype=torch.int64)
