"""What a task has from the servers: what is written there beside them would be lost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from spartito.errors import UserError
from spartito.fingerprints import fingerprints
from spartito.names import listed
from spartito.ps.client.vector import Vector

MOST_NAMES = 4


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
        both = zip(vector.layout.entries, vector.tensors, strict=True)
        self._learned = [
            (entry.name, tensor) for entry, tensor in both if entry.group >= 0 and not entry.frozen
        ]
        self._sums: list[int] = []
        self._watches = self._has_computed = False

    def watch(self, runs: bool) -> None:
        """From now on compare after each step, or no longer.

        Args:
            runs: Whether a user's code runs between steps.
        """
        self._watches = runs

    def note(self) -> None:
        """These are the servers' values."""
        self._sums = _sums_of(self._learned)

    def came(self) -> None:
        """New values have come; they are noted where somebody may change them."""
        self._sums = _sums_of(self._learned) if self._watches else []

    def check(self) -> None:
        """Refuse to replace what somebody has written.

        Raises:
            UserError: The values are not those that came.
        """
        if written := _changed(self._learned, self._sums):
            raise UserError(
                f"{listed(written, MOST_NAMES)} of the model changed on {self._name} between two "
                "steps under parameter_server: the servers hold the parameters, and their values "
                "replace what a callback or the script writes",
                "Write into parameters before the first step, load them by trainer.load_weights(), "
                "or take a synchronous strategy.",
            )

    @contextmanager
    def computing(self) -> Iterator[None]:
        """A block that computes gradients, in which a forward pass is not to write what learns.

        Writes that torch counts are found in each, those by ``.data`` in the first.

        Raises:
            UserError: It did.
        """
        before = [tensor._version for _, tensor in self._learned]
        sums = [] if self._has_computed else _sums_of(self._learned)
        self._has_computed = True
        yield
        both = zip(self._learned, before, strict=True)
        written = [name for (name, tensor), count in both if tensor._version != count]
        if written := written or _changed(self._learned, sums):
            raise UserError(
                f"{listed(written, MOST_NAMES)} of the model changed on {self._name} in the "
                "forward pass under parameter_server: the servers hold the parameters, and their "
                "values replace what it writes",
                "Leave max_norm out of an embedding; compute from the parameter without writing "
                "into it, or take a synchronous strategy.",
            )


def _sums_of(named: list[tuple[str, Tensor]]) -> list[int]:
    return fingerprints([tensor for _, tensor in named])


def _changed(named: list[tuple[str, Tensor]], before: list[int]) -> list[str]:
    """The names of those that are others now; none where none were noted."""
    now = _sums_of(named) if before else []
    both = zip(named, before, now, strict=False)
    return [name for (name, _), old, new in both if old != new]
