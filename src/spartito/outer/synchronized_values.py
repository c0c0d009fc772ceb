"""Values that a model shows for a while, which nobody may write into."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from spartito.errors import UserError
from spartito.fingerprints import checksum
from spartito.names import listed

MOST_NAMES = 4


class Shown:
    """What a model shows between two batches in place of its group's own values.

    Args:
        names: The user's names of its parameters.
        tensors: What this task shows of each.
    """

    def __init__(self, names: Sequence[str], tensors: Sequence[Tensor]) -> None:
        self._names = list(names)
        self._sums = [checksum([tensor]) for tensor in tensors]

    def check(self, tensors: Sequence[Tensor]) -> None:
        """Refuse to go on where somebody has written into them.

        Args:
            tensors: What this task shows now.

        Raises:
            UserError: It is not what was shown.
        """
        pairs = zip(self._names, self._sums, tensors, strict=True)
        written = [name for name, was, now in pairs if checksum([now]) != was]
        if not written:
            return
        raise UserError(
            f"{listed(written, MOST_NAMES)} changed while the model showed the merged values, "
            "after an evaluation or a save in the middle of an epoch: each group goes on from its "
            "own, and that is lost",
            "Write into parameters before the evaluation or save, or at the end of an epoch.",
        )
